"""Replay CUDA graphs of the layer with changing tokens and routing, and compare each result with an eager call.

    python -m benchmarks.layer.graph_replays --out benchmarks/results/graph_replays-<date>.json

There is one graph per shape and number of tokens, all from one memory pool, so that they share scratch. The steps take
the graphs in turn, in an order that is drawn anew for each round. A step draws tokens, router weights and ids, copies
them into the inputs of its graph, fills the graph's result with NaN, replays, and calls `fused_moe` on the same
tensors: the two results must be equal in every bit, and must differ from the graph's previous result. The kinds of
routing alternate: uniform; skewed (few experts get most tokens); ids of -1 here and there; and no experts for the
second half of the tokens, as in a step that is padded to the size of a graph.

Graphs must contain only kernels, no copies or allocations; torch must not allocate during a replay
(`allocation.all.allocated` of `torch.cuda.memory_stats`); and from the end of the warm-up rounds to the last step,
neither the bytes that torch has handed out (`allocated_bytes`) may grow, nor the memory in use on the device
(`torch.cuda.mem_get_info`) by more than torch has reserved in that time for eager calls and inputs, which is reported.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer.operands import random_fp8, random_scales
from benchmarks.report import sources_sha256, write_report
from fp8moe_plugin.checkpoint.shapes import GROUP
from fp8moe_plugin.ops import fused_moe


class Shape(NamedTuple):
    experts: int
    hidden: int
    intermediate: int
    topk: int


SHAPES = {  # Qwen3-30B-A3B on one GPU, DeepSeek-V3 on one of eight tensor-parallel GPUs
    "qwen3-30b": Shape(128, 2048, 768, 8),
    "dsv3-tp8": Shape(256, 7168, 256, 8),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KINDS = ("uniform", "skewed", "some_missing", "padded")
SKEW = 1.5  # standard deviation of an expert's common logit, where a token's logits have 1
SHOWN_EVERY = 2000  # steps
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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

    def __init__(self, name: str, shape: Shape, layer: Layer, tokens: int, generator: torch.Generator, pool: Any):
        self.name, self.shape, self.layer, self.tokens = name, shape, layer, tokens
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

    def found(self) -> dict[str, Any]:
        """The results of the steps; waits for the device."""
        return {
            "shape": self.name,
            "tokens": self.tokens,
            "steps": self.steps,
            "wrong": int(self.wrong),
            "repeated": int(self.repeated),
            "nodes": self.nodes,
            "allocations_in_replays": self.allocations,
        }


def node_types(graph: torch.cuda.CUDAGraph) -> dict[str, int]:
    """How many nodes of each type a captured graph has."""
    from cuda.bindings import driver

    handle = driver.CUgraph(graph.raw_cuda_graph())
    _, _, count = checked(driver.cuGraphGetNodes(handle))
    _, nodes, _ = checked(driver.cuGraphGetNodes(handle, count))
    types = [checked(driver.cuGraphNodeGetType(node))[1] for node in nodes]
    return {kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower(): types.count(kind) for kind in types}


def checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The driver's answer; raises if it is an error."""
    if int(answer[0]):
        raise RuntimeError(f"the CUDA driver answers {answer[0]!r}")
    return answer


def allocations() -> int:
    """The number of allocations by torch so far."""
    return torch.cuda.memory_stats_as_nested_dict()["allocation"]["all"]["allocated"]


def memory() -> dict[str, int]:
    """Bytes in use, and how often torch has requested more from the driver."""
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "device": total - free,
        "segments_asked_for": stats["segment.all.allocated"],
    }


def turns(graphs: int, order: random.Random) -> Iterator[tuple[int, str]]:
    """Endless: the next graph and its kind of routing."""
    for kind in itertools.cycle(KINDS):
        yield from ((graph, kind) for graph in order.sample(range(graphs), graphs))


def capture_all(generator: torch.Generator, shapes: dict[str, Shape], sizes: tuple[int, ...]) -> list[CapturedLayer]:
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    for name, shape in shapes.items():
        layer = random_layer(shape)
        graphs += [CapturedLayer(name, shape, layer, tokens, generator, pool) for tokens in sizes]
    return graphs


def random_layer(shape: Shape) -> Layer:
    experts, hidden, intermediate, _ = shape
    sizes = ((2 * intermediate, hidden), (hidden, intermediate))
    values = [random_fp8((experts, n, k)) for n, k in sizes]
    scales = [random_scales((experts, n // GROUP, k // GROUP), k) for n, k in sizes]
    return values[0], scales[0], values[1], scales[1]


def replay(graphs: list[CapturedLayer], steps: int, seed: int) -> dict[str, Any]:
    """The results of this many steps, after two warm-up rounds of each kind of routing."""
    generator, order = torch.Generator("cuda").manual_seed(seed), turns(len(graphs), random.Random(seed))
    for index, kind in itertools.islice(order, 2 * len(KINDS) * len(graphs)):
        graphs[index].step(generator, kind)
    for graph in graphs:
        graph.steps = graph.allocations = 0
        graph.wrong.zero_()
        graph.repeated.zero_()
    begin, start = memory(), time.monotonic()
    for done, (index, kind) in enumerate(itertools.islice(order, steps), 1):
        graphs[index].step(generator, kind)
        if done % SHOWN_EVERY == 0 and done < steps:
            wrong = sum(int(graph.wrong) for graph in graphs)
            print(f"{done} steps, {wrong} wrong, {time.monotonic() - start:.1f} s", flush=True)
    end = memory()
    growth = {name: end[name] - begin[name] for name in begin}
    return {
        "steps": steps,
        "seed": seed,
        "seconds": round(time.monotonic() - start, 1),
        "memory_growth": growth,
        "graphs": [graph.found() for graph in graphs],
    }


def faults(results: dict[str, Any]) -> list[str]:
    """The faults, as messages."""
    found = []
    for graph in results["graphs"]:
        where = f"{graph['shape']}, {graph['tokens']} tokens"
        if graph["wrong"]:
            found.append(f"{where}: {graph['wrong']} of {graph['steps']} steps differ from eager, or hold NaN")
        if graph["repeated"]:
            found.append(f"{where}: {graph['repeated']} of {graph['steps']} steps gave the result of the step before")
        if set(graph["nodes"]) != {"kernel"}:
            found.append(f"{where}: the graph has nodes other than kernels: {graph['nodes']}")
        if graph["allocations_in_replays"]:
            found.append(f"{where}: {graph['allocations_in_replays']} allocations in replays")
    growth = results["memory_growth"]
    if growth["allocated"] > 0:
        found.append(f"{growth['allocated']} bytes more are allocated than before the steps")
    if growth["device"] > max(growth["reserved"], 0):
        found.append(f"{growth['device']} bytes more are in use on the device, torch has reserved {growth['reserved']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    graphs = capture_all(torch.Generator("cuda").manual_seed(args.seed), SHAPES, TOKENS)
    results = replay(graphs, args.steps, args.seed)
    print("shape      tokens  steps  wrong  nodes")
    for graph in results["graphs"]:
        nodes = ", ".join(f"{count} {kind}" for kind, count in graph["nodes"].items())
        print(f"{graph['shape']:10} {graph['tokens']:6} {graph['steps']:6} {graph['wrong']:6}  {nodes}")
    growth = ", ".join(f"{name} {value}" for name, value in results["memory_growth"].items())
    print(f"{args.steps} steps in {results['seconds']} s; growth of memory: {growth}")
    wrong = faults(results)
    for fault in wrong:
        print(f"FAULT: {fault}")
    if args.out:
        write_report(args.out, {"sources_sha256": sources_sha256(), "faults": wrong} | results)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
