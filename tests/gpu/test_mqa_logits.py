"""Logits of an indexer on the GPU: sizes that the emulator cannot run, CUDA graphs, equal bits."""

import pytest
import torch

from fp8moe_plugin import ops
from tests import helpers as h
from tests.gpu.test_cuda_graphs import assert_replays_equal_eager
from tests.indexer import PAGE, RANGES, assert_decode, assert_prefill, decode, poisoned_results, prefill

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SHAPES = [(64, 128), (32, 128), (64, 64), (32, 64), (64, 32), (32, 32)]  # heads, channels


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_contiguous_kv(ranges, heads, dim, dtype):
    call = prefill(h.seeded(0, DEVICE), 515, 3001, heads, dim, ranges)
    for clean, width in ((True, 0), (False, 0), (False, 1000)):
        with poisoned_results() as memory:
            logits = call.run(clean_logits=clean, max_seqlen_k=width, logits_dtype=dtype)
        assert_prefill(call, logits, memory[0], width=width, clean=clean)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
@pytest.mark.parametrize("runs", [1, 66, 132])
def test_logits_of_paged_kv(next_n, heads, dim, runs):
    lengths = torch.randint(0, 3000, (40,), generator=torch.Generator().manual_seed(runs)).tolist()
    call = decode(h.seeded(0, DEVICE), [0, 1, 64, 65, *lengths, 0], next_n, heads, dim)
    for dtype in (torch.float32, torch.bfloat16):
        with poisoned_results() as memory:
            logits = call.run(runs=runs, logits_dtype=dtype)
        assert_decode(call, logits, memory[-1])


@pytest.mark.parametrize("batch", [1, 5, 255, 256, 257, 4096])
@pytest.mark.parametrize("runs", [1, 66, 132, 500])
def test_the_runs_are_those_of_the_reference(batch, runs):
    gen = h.seeded(batch, DEVICE)
    lengths = torch.randint(-100, 9000, (batch, 2), generator=gen, device=DEVICE, dtype=torch.int32)
    expected = ops.get_paged_mqa_logits_metadata(lengths.cpu(), PAGE, runs)
    assert torch.equal(ops.get_paged_mqa_logits_metadata(lengths, PAGE, runs).cpu(), expected)


@pytest.mark.parametrize("ranges", RANGES)
def test_the_same_call_gives_the_same_bits(ranges):
    a, b = prefill(h.seeded(0, DEVICE), 700, 5000, ranges=ranges), decode(h.seeded(0, DEVICE), [9000, 0, 777], 2)
    first, second = a.run(), b.run(runs=132)
    for _ in range(50):
        assert h.same_bits(a.run(), first)
        again = b.run(runs=132)
        for i, length in enumerate(b.lengths):
            rows = slice(2 * i, 2 * i + 2)
            assert h.same_bits(again[rows, :length].contiguous(), second[rows, :length].contiguous())


def test_captured_logits_follow_the_ranges():
    gen = h.seeded(0, DEVICE)
    call = prefill(gen, 200, 2000)

    def draw(step: int) -> tuple[torch.Tensor, ...]:
        drawn = prefill(gen, 200, 2000, ranges=RANGES[step % len(RANGES)])
        return drawn.q, drawn.starts, drawn.ends

    def run(q: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return ops.fp8_mqa_logits(q, call.kv, call.weights, starts, ends)

    assert_replays_equal_eager(run, draw)


@pytest.mark.parametrize("next_n", [1, 4])
def test_captured_logits_follow_lengths_and_tables(next_n):
    """Requests that have ended have no KV, as those that pad a batch."""
    gen, most = h.seeded(0, DEVICE), 2000
    call = decode(gen, [most] * 24, next_n)
    pages = len(call.kv_cache)

    def draw(step: int) -> tuple[torch.Tensor, ...]:
        lens = torch.randint(0, most + 1, (24, next_n), generator=gen, device=DEVICE, dtype=torch.int32)
        lens *= torch.arange(24, device=DEVICE).unsqueeze(1) % 5 != step % 5
        table = torch.randint(0, pages, call.block_table.shape, generator=gen, device=DEVICE, dtype=torch.int32)
        return call.q.clone(), lens, table

    def run(q: torch.Tensor, lens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        schedule = ops.get_paged_mqa_logits_metadata(lens, PAGE, 132 if next_n == 1 else 66)
        logits = ops.fp8_paged_mqa_logits(q, call.kv_cache, call.weights, lens, table, schedule, most)
        there = torch.arange(most, device=DEVICE) < lens[:, -1:].repeat_interleave(next_n, 0)
        return torch.where(there, logits, 0.0)

    assert_replays_equal_eager(run, draw)
