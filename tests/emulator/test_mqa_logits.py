"""Logits of an indexer on the emulator: right wherever a token has KV, and nothing else is written."""

import functools

import pytest
import torch

from fp8moe_plugin.ops import get_paged_mqa_logits_metadata
from fp8moe_plugin.ops.mqa_logits import prepared_mqa_logits
from fp8moe_plugin.ops.paged_mqa_logits import prepared_paged_mqa_logits
from fp8moe_plugin.ops.paged_mqa_metadata import prepared_metadata
from tests import helpers as h
from tests.emulator.device import Device
from tests.indexer import (
    PAGE,
    RANGES,
    assert_decode,
    assert_prefill,
    decode,
    poisoned_results,
    prefill,
    spoilt_decode,
    spoilt_prefill,
)

CPU = torch.device("cpu")
seeds = pytest.mark.parametrize("seed", [1, 2])
OPTIONS = {
    "clean": {"clean_logits": True},
    "as it is": {"clean_logits": False},
    "compressed": {"clean_logits": False, "max_seqlen_k": 300},
    "compressed as in 2.8": {"clean_logits": 77},
    "bfloat16": {"clean_logits": True, "logits_dtype": torch.bfloat16},
}


def run_prefill(emulator: Device, seed: int, shape: tuple[int, ...], ranges: str, options: dict[str, object]) -> None:
    call = prefill(h.seeded(seed, CPU), *shape, ranges=ranges)
    with poisoned_results() as memory:
        logits = emulator.execute(seed, lambda: call.run(**options))
    kept = options["clean_logits"]
    width = kept if kept is not True and kept else options.get("max_seqlen_k", 0)
    assert_prefill(call, logits, memory[0], width=width, clean=kept is True)


# Tokens, KV rows, heads, channels: tokens that fill no block, KV that fills no tile, fewer tiles than blocks.
@seeds
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 64, 128), (9, 700, 64, 128), (30, 270, 32, 128), (5, 333, 64, 64), (13, 90, 32, 32)]
)
def test_logits_of_contiguous_kv(emulator: Device, shape: tuple[int, ...], ranges: str, seed: int) -> None:
    run_prefill(emulator, seed, shape, ranges, OPTIONS["clean"])


@seeds
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_form_of_the_result(emulator: Device, options: dict[str, object], ranges: str, seed: int) -> None:
    run_prefill(emulator, seed, (11, 400, 64, 128), ranges, options)


def test_many_tokens_of_little_kv(emulator: Device) -> None:
    """Each thread counts the tiles of several blocks of tokens, and blocks of the grid begin in the middle of them."""
    run_prefill(emulator, 0, (4 * 500, 70, 64, 32), "ragged", OPTIONS["as it is"])


@pytest.mark.parametrize("ranges", ["causal", "ragged"])
def test_the_bits_do_not_depend_on_who_computes_what(emulator: Device, ranges: str) -> None:
    call = prefill(h.seeded(0, CPU), 10, 500, ranges=ranges)
    first, *others = (emulator.execute(seed, lambda: call.run(clean_logits=True)) for seed in range(3))
    assert all(h.same_bits(first, other) for other in others)


@pytest.mark.parametrize("heads", [32, 64])
def test_nan_reaches_the_logits(emulator: Device, heads: int) -> None:
    call, spoilt = spoilt_prefill(h.seeded(heads, CPU), heads)
    assert torch.equal(emulator.execute(1, call.run).isnan(), spoilt)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_nan_reaches_the_paged_logits(emulator: Device, next_n: int) -> None:
    call, spoilt = spoilt_decode(h.seeded(next_n, CPU), next_n)
    assert torch.equal(emulator.execute(1, functools.partial(call.run, runs=3)).isnan(), spoilt)


def test_launches_are_prepared_once_for_a_shape(emulator: Device) -> None:
    """What a launch depends on, but for addresses, is the same for all layers of a step."""
    prepared = prepared_mqa_logits, prepared_paged_mqa_logits, prepared_metadata
    for function in prepared:
        function.cache_clear()
    for seed in range(3):
        chunk, pages = prefill(h.seeded(seed, CPU), 5, 90), decode(h.seeded(seed, CPU), [70, 5])
        with poisoned_results() as memory:
            logits = emulator.execute(seed, chunk.run)
        assert_prefill(chunk, logits, memory[0], clean=True)
        with poisoned_results() as memory:
            logits = emulator.execute(seed, functools.partial(pages.run, runs=2))
        assert_decode(pages, logits, memory[-1])
    assert [function.cache_info()[:2] for function in prepared] == [(2, 1)] * 3  # hits, misses


# Lengths of requests: empty ones at both ends and between, a single row, whole pages, more than a split.
LENGTHS = {
    "one": [700],
    "short": [1, 64, 65, 0, 128],
    "ragged": [0, 300, 0, 0, 513, 7, 256, 0],
    "none": [0, 0, 0],
}


@seeds
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    ("next_n", "heads", "dim"), [(1, 64, 128), (2, 64, 128), (3, 32, 64), (4, 64, 128), (3, 64, 128)]
)
def test_logits_of_paged_kv(emulator: Device, next_n: int, heads: int, dim: int, lengths: list[int], seed: int) -> None:
    call = decode(h.seeded(seed, CPU), lengths, next_n, heads, dim)
    with poisoned_results() as memory:
        logits = emulator.execute(seed, lambda: call.run(runs=3))
    assert_decode(call, logits, memory[-1])


@seeds
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "dim"), [(32, 32), (32, 128), (64, 64)])
def test_each_shape_of_paged_kv(emulator: Device, heads: int, dim: int, next_n: int, seed: int) -> None:
    call = decode(h.seeded(seed, CPU), [130, 0, 600], next_n, heads, dim)
    with poisoned_results() as memory:
        logits = emulator.execute(seed, lambda: call.run(runs=4, logits_dtype=torch.bfloat16))
    assert_decode(call, logits, memory[-1])


@seeds
@pytest.mark.parametrize("runs", [1, 2])  # 4 multiprocessors: two blocks a run
def test_four_tokens_of_a_request_share_runs(emulator: Device, runs: int, seed: int) -> None:
    call = decode(h.seeded(seed, CPU), [1, 900, 64, 0, 200], 4)
    with poisoned_results() as memory:
        logits = emulator.execute(seed, lambda: call.run(runs=runs))
    assert_decode(call, logits, memory[-1])


def test_requests_longer_than_the_result(emulator: Device) -> None:
    call = decode(h.seeded(0, CPU), [700, 90], 2)
    with poisoned_results() as memory:
        logits = emulator.execute(0, lambda: call.run(runs=3, most=333))
    assert_decode(call, logits, memory[-1], most=333)


@pytest.mark.parametrize("runs", [1, 5, 132, 300])
@pytest.mark.parametrize("batch", [1, 7, 256, 700])
def test_the_runs_are_those_of_the_reference(emulator: Device, batch: int, runs: int) -> None:
    gen = h.seeded(batch * runs, CPU)
    lengths = torch.randint(-500, 3000, (batch, 2), generator=gen, dtype=torch.int32)
    actual = emulator.execute(0, lambda: get_paged_mqa_logits_metadata(lengths, PAGE, runs))
    assert torch.equal(actual, get_paged_mqa_logits_metadata(lengths, PAGE, runs))
