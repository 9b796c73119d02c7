"""Ranks of an expert-parallel group in one process: on a GPU each if there are several, else in streams of one GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.ops.devices import set_num_sms
from fp8moe_plugin.ops.push import push_moe
from fp8moe_plugin.ops.window import Window, open_window
from fp8moe_plugin.plan.sm90.catalog import MAX_RANKS
from fp8moe_plugin.plan.sm90.push import window_layout
from tests import helpers as h

pytestmark = pytest.mark.gpu

TOPK, HIDDEN, INTERMEDIATE, EXPERTS = 4, 1024, 384, 16
ROWS = 400  # most of a rank
CALLS = [(1, 1), (0, 3), (7, 2), (40, 70), (400, 399), (300, 0)]  # tokens of even and of odd ranks
MOST_ERROR = 5e-3  # relative L2: sums of ranks are rounded to bfloat16
PATIENCE = 10 * 2 * 10**9  # clock cycles
STEPS = 2000

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rank:
    device: torch.device
    stream: torch.cuda.Stream
    window: Window
    all_experts: h.Layer
    experts: h.Layer
    owners: torch.Tensor
    expert_map: torch.Tensor

    def push(self, rows: int, inputs: Inputs) -> torch.Tensor:
        x, *routing = inputs
        return push_moe(self.window, self.owners, rows, x, *self.experts, *routing, self.expert_map)

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield


@pytest.fixture(scope="module", params=[MAX_RANKS + 1, 2], ids=["sums", "rows"])
def group(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    """The ranks push sums only, or rows in some steps."""
    with h.rows_pushed_from(request.param):
        yield from open_group()


def open_group() -> Iterator[list[Rank]]:
    gpus = torch.cuda.device_count()
    devices = [torch.device("cuda", i if gpus > 1 else 0) for i in range(min(gpus, 4) if gpus > 1 else 2)]
    nbytes = window_layout(len(devices), ROWS, HIDDEN, TOPK, EXPERTS).nbytes
    memories = [torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device) for device in devices]
    for memory in memories:
        for other in memories:
            memory[:1].copy_(other[:1])  # torch lets the GPUs reach each other
    addresses = [memory.data_ptr() for memory in memories]
    layer = h.random_layer(h.seeded(0, torch.device("cpu")), EXPERTS, HIDDEN, INTERMEDIATE)
    owners, dealt = h.deal_experts(layer, len(devices))
    ranks = []
    for rank, (device, memory) in enumerate(zip(devices, memories, strict=True)):
        lost = torch.zeros(1, dtype=torch.int32).pin_memory()
        window = open_window(memory, addresses, rank, ROWS, HIDDEN, TOPK, EXPERTS, lost, PATIENCE)
        of_rank, local = dealt[rank]
        of_all, experts = (h.Layer(*(tensor.to(device) for tensor in each)) for each in (layer, of_rank))
        stream = torch.cuda.Stream(device)
        ranks.append(Rank(device, stream, window, of_all, experts, owners.to(device), local.to(device)))
    for device in devices:
        torch.cuda.synchronize(device)
    if gpus == 1:
        set_num_sms(48)  # kernels of one rank that wait for another leave it room
    yield ranks
    set_num_sms(0)


def draw(rank: Rank, tokens: int, seed: int) -> Inputs:
    """In the rank's stream, which does not wait for the default one."""
    gen = h.seeded(seed, rank.device)
    with rank.current():
        return h.random_tokens(gen, tokens, HIDDEN), *h.random_routing(gen, "some_missing", tokens, TOPK, EXPERTS)


def synchronize(group: list[Rank]) -> None:
    for rank in group:
        rank.stream.synchronize()


def test_calls_of_any_size_in_a_row(group: list[Rank]) -> None:
    for seed in range(3):
        for call in CALLS:
            rows, results = max(call), []
            inputs = [draw(rank, call[i % 2], 10 * seed + i) for i, rank in enumerate(group)]
            for rank, given in zip(group, inputs, strict=True):
                with rank.current():
                    results.append(rank.push(rows, given))
            synchronize(group)
            for rank, (x, *routing), result in zip(group, inputs, results, strict=True):
                with rank.current():
                    expected = fused_moe(x, *rank.all_experts, *routing)
                    assert h.relative_l2(result, expected) <= MOST_ERROR
            synchronize(group)


def test_graphs_replay_in_any_order(group: list[Rank]) -> None:
    """Each replay has the bits of the call before the capture.

    All ranks replay before anything else is launched: loading a kernel waits for what runs on a GPU.
    """
    captured = []
    for call in CALLS:
        inputs = [draw(rank, call[i % 2], i) for i, rank in enumerate(group)]
        expected = []
        for rank, given in zip(group, inputs, strict=True):
            with rank.current():
                expected.append(rank.push(max(call), given))
        synchronize(group)
        graphs, results = [], []
        for rank, given in zip(group, inputs, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(rank.device), torch.cuda.graph(graph, stream=rank.stream):
                results.append(rank.push(max(call), given))
            graphs.append(graph)
        captured.append((inputs, graphs, results, expected))
    other = [torch.zeros((), dtype=torch.int64, device=rank.device) for rank in group]
    for rank in group:
        torch.cuda.synchronize(rank.device)
    order = torch.randint(len(CALLS), (STEPS,), generator=torch.Generator().manual_seed(0)).tolist()
    for which in order:
        _, graphs, results, expected = captured[which]
        for rank, graph, result in zip(group, graphs, results, strict=True):
            with rank.current():
                result.fill_(float("nan"))
                graph.replay()
        for rank, result, wanted, count in zip(group, results, expected, other, strict=True):
            with rank.current():
                count += (h.bits(result) != h.bits(wanted)).any()
    synchronize(group)
    assert [int(count) for count in other] == [0] * len(group)
