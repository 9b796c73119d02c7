"""Replays of CUDA graphs of the layer with changing tokens and routing, each compared with an eager call.

There is one graph for each number of tokens, all from one memory pool, so that they share scratch. The steps take the
graphs in turn, in an order that is drawn anew for each round. A step draws tokens, router weights and ids, copies them
into the inputs of its graph, fills the graph's result with NaN, replays, and calls `fused_moe` on the same tensors: the
two results must be equal in every bit, and must differ from the graph's previous result. The kinds of routing
alternate: uniform; skewed (few experts get most tokens); ids of -1 here and there; and no experts for the second half
of the tokens, as in a step that is padded to the size of a graph.

Graphs must contain only kernels, no copies or allocations; torch must not allocate during a replay
(`allocation.all.allocated` of `torch.cuda.memory_stats`); and from the end of the warm-up rounds to the last step,
neither the bytes that torch has handed out (`allocated_bytes`) may grow, nor the memory in use on the device
(`torch.cuda.mem_get_info`) by more than torch has reserved in that time for eager calls and inputs.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fp8moe_plugin.ops import fused_moe
from tests import helpers as h


class Shape(NamedTuple):
    experts: int
    hidden: int
    intermediate: int
    topk: int


KINDS = ("uniform", "skewed", "some_missing", "padded")
SKEW = 1.5  # standard deviation of an expert's common logit, where a token's logits have 1


def draw(generator: torch.Generator, shape: Shape, tokens: int, kind: str) -> tuple[torch.Tensor, ...]:
    """Tokens, router weights and ids of a step, for `fused_moe`."""
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, **options)
    logits = torch.randn(tokens, shape.experts, **options)
    if kind == "skewed":
        logits += SKEW * torch.randn(shape.experts, **options)
    weights, ids = logits.sigmoid().topk(shape.topk)
    if kind == "some_missing":
        ids.masked_fill_(torch.rand(ids.shape, **options) < 0.3, -1)
    elif kind == "padded":
        ids[(tokens + 1) // 2 :] = -1
    return x, weights / weights.sum(-1, keepdim=True), ids.int()


class CapturedLayer:
    """A graph of one call of `fused_moe`, and the results of its steps, counted on the device."""

    def __init__(self, shape: Shape, layer: h.Layer, tokens: int, generator: torch.Generator, pool: Any):
        self.shape, self.layer, self.tokens = shape, layer, tokens
        self.steps = self.allocations = 0
        self.wrong, self.repeated = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
        self.inputs = draw(generator, shape, tokens, KINDS[0])
        self.eager(self.inputs)  # compiles and loads every kernel
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.graph, pool=pool):
            self.result = self.eager(self.inputs)
        self.nodes = node_types(self.graph)
        self.before = torch.zeros_like(self.result)

    def eager(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, weights, ids = inputs
        return fused_moe(x, *self.layer, weights, ids)

    def step(self, generator: torch.Generator, kind: str) -> None:
        fresh = draw(generator, self.shape, self.tokens, kind)
        for own, new in zip(self.inputs, fresh, strict=True):
            own.copy_(new)
        self.result.fill_(float("nan"))
        before = allocations()
        self.graph.replay()
        self.allocations += allocations() - before
        bits = self.result.view(torch.int16)
        self.wrong += (bits != self.eager(fresh).view(torch.int16)).any() | self.result.isnan().any()
        self.repeated += (bits == self.before.view(torch.int16)).all()
        self.before.copy_(self.result)
        self.steps += 1

    def faults(self) -> Iterator[str]:
        """Yields what went wrong in the steps; waits for the device."""
        if int(self.wrong):
            yield f"{int(self.wrong)} of {self.steps} steps differ from eager, or hold NaN"
        if int(self.repeated):
            yield f"{int(self.repeated)} of {self.steps} steps gave the result of the step before"
        if set(self.nodes) != {"kernel"}:
            yield f"the graph has nodes other than kernels: {self.nodes}"
        if self.allocations:
            yield f"{self.allocations} allocations in replays"


def node_types(graph: torch.cuda.CUDAGraph) -> dict[str, int]:
    """Returns how many nodes of each type a captured graph has."""
    from cuda.bindings import driver

    handle = driver.CUgraph(graph.raw_cuda_graph())
    _, _, count = checked(driver.cuGraphGetNodes(handle))
    _, nodes, _ = checked(driver.cuGraphGetNodes(handle, count))
    types = [checked(driver.cuGraphNodeGetType(node))[1] for node in nodes]
    return {kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower(): types.count(kind) for kind in types}


def checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the driver's answer; raises if it is an error."""
    if int(answer[0]):
        raise RuntimeError(f"the CUDA driver answers {answer[0]!r}")
    return answer


def allocations() -> int:
    """Returns the number of allocations by torch so far."""
    return torch.cuda.memory_stats_as_nested_dict()["allocation"]["all"]["allocated"]


def memory() -> dict[str, int]:
    """Bytes in use."""
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "device": total - free,
    }


def turns(graphs: int, order: random.Random) -> Iterator[tuple[int, str]]:
    """Endless: the next graph and its kind of routing."""
    for kind in itertools.cycle(KINDS):
        yield from ((graph, kind) for graph in order.sample(range(graphs), graphs))


def capture_all(generator: torch.Generator, shape: Shape, sizes: tuple[int, ...]) -> list[CapturedLayer]:
    pool = torch.cuda.graph_pool_handle()
    layer = h.random_layer(generator, shape.experts, shape.hidden, shape.intermediate)
    return [CapturedLayer(shape, layer, tokens, generator, pool) for tokens in sizes]


def faults(graphs: list[CapturedLayer], steps: int, seed: int) -> list[str]:
    """Returns what went wrong in this many steps, after two warm-up rounds of each kind of routing."""
    generator, order = torch.Generator("cuda").manual_seed(seed), turns(len(graphs), random.Random(seed))
    for index, kind in itertools.islice(order, 2 * len(KINDS) * len(graphs)):
        graphs[index].step(generator, kind)
    for graph in graphs:
        graph.steps = graph.allocations = 0
        graph.wrong.zero_()
        graph.repeated.zero_()
    begin = memory()
    for index, kind in itertools.islice(order, steps):
        graphs[index].step(generator, kind)
    end = memory()
    growth = {name: end[name] - begin[name] for name in begin}
    found = [f"{graph.tokens} tokens: {fault}" for graph in graphs for fault in graph.faults()]
    if growth["allocated"] > 0:
        found.append(f"{growth['allocated']} bytes more are allocated than before the steps")
    if growth["device"] > max(growth["reserved"], 0):
        found.append(f"{growth['device']} bytes more are in use on the device, torch has reserved {growth['reserved']}")
    return found
