"""Packed MXFP4 on the emulator: layers have the bits of the same weights in block FP8."""

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.ops import reference
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.ops.moe import batched_experts, fused_moe
from fp8moe_plugin.ops.routed_moe import routed_moe
from fp8moe_plugin.plan.sm90.layer import SortedStep, StepPlan
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, PACKED_WIDE, SHARED, RowTile
from tests import helpers as h
from tests.emulator.build import Kernels
from tests.emulator.device import Device
from tests.emulator.inputs import Slabs, empty_rows, slabs
from tests.emulator.layers import MOST_ERROR, packed_moe, run_packed_layer
from tests.mxfp4 import random_experts

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "span", "seed", "copies"),
    h.pairwise(
        [(3, 256, 128), (32, 384, 256), (55, 256, 128), (68, 128, 256), (90, 128, 384)],
        [0, SPAN],
        [1, 2],
        [False, True],
    ),
)
def test_a_layer_has_the_bits_of_block_fp8(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], span: int, seed: int, copies: bool
) -> None:
    packed = check_bits(emulator, monkeypatch, shape, span, seed, FEW_ROWS, FEW_ROWS, copies)
    assert isinstance(packed, SortedStep)
    assert packed.gathers != copies


@pytest.mark.parametrize(("shape", "span", "seed"), [((230, 384, 256), 11, 1), ((60, 640, 128), SPAN, 2)])
def test_many_rows_have_the_bits_of_block_fp8(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], span: int, seed: int
) -> None:
    check_bits(emulator, monkeypatch, shape, span, seed, MANY_ROWS, SHARED)


@pytest.mark.parametrize(
    ("multiprocessors", "counts", "shape", "span", "early", "biased"),
    [
        # One column, whose weights blocks split whatever the rows. GEMM 2 has a second one, which passes N, and one K
        # block.
        (3, [129, 128, 1, 0, 257], (384, 128), 11, True, False),
        # The first two of three columns are split or not; an odd number of SMs.
        (7, [192, 3, 130, 65, 1, 193], (256, 384), SPAN, True, True),
        # Tiles that are split and not in turns, of more K blocks than there are stages; of GEMM 2, of fewer.
        (2, [2, 130, 64, 129, 1], (1152, 256), 11, True, False),
        (2, [256, 9, 320], (256, 384), 11, False, False),
        (4, [1, 130, 33, 200], (128, 256), 0, True, True),  # one K block
        # Two, three and four blocks of tokens in turns.
        (2, [192, 256, 129, 100, 128, 255, 160, 65], (128, 128), 11, True, False),
    ],
)
def test_shared_tiles_have_the_bits_of_block_fp8(
    emulator_runtime: ctypes.CDLL,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    multiprocessors: int,
    counts: list[int],
    shape: tuple[int, int],
    span: int,
    early: bool,
    biased: bool,
) -> None:
    """`counts`: rows of each expert. `early`: GEMM 2 starts early, and counts what GEMM 1 has stored."""
    emulator = Device(emulator_runtime, kernels, multiprocessors)
    (step,) = check_bits_of_counts(emulator, monkeypatch, counts, shape, span, biased, tile=SHARED)
    assert isinstance(step, SortedStep)
    assert step.pdl_down == early


@pytest.mark.parametrize(
    ("multiprocessors", "counts", "shape", "span", "copies", "biased"),
    [
        # Each width of a tile, and experts of more than one tile. GEMM 2 has a column and a half.
        (3, [65, 80, 1, 100, 0, 128], (384, 128), 11, False, False),
        (2, [129, 33, 64, 112, 17], (640, 256), SPAN, True, True),
        # More K blocks than there are stages; a column for several tiles, and half of one.
        (2, [96, 241, 120], (1152, 256), 11, True, False),
        (7, [121, 5, 48, 104], (128, 384), 0, False, True),
        (1, [90, 119], (2048, 128), SPAN, True, True),
    ],
)
def test_wide_tiles_have_the_bits_of_block_fp8(
    emulator_runtime: ctypes.CDLL,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    multiprocessors: int,
    counts: list[int],
    shape: tuple[int, int],
    span: int,
    copies: bool,
    biased: bool,
) -> None:
    """`counts`: rows of each expert."""
    emulator = Device(emulator_runtime, kernels, multiprocessors)
    check_bits_of_counts(emulator, monkeypatch, counts, shape, span, biased, tile=PACKED_WIDE, copies=copies)


def check_bits_of_counts(
    emulator: Device,
    monkeypatch: pytest.MonkeyPatch,
    counts: list[int],
    shape: tuple[int, int],
    span: int,
    biased: bool,
    **step: Any,
) -> list[StepPlan]:
    """Compares a layer in such a step with block FP8 of many rows. Returns its plan. `step`: of `h.force_step`."""
    gen, experts = h.seeded(1, CPU), random_experts(h.seeded(1, CPU), len(counts), *shape, span)
    x, routing = h.random_tokens(gen, sum(counts), shape[0]), h.routing_of_counts(gen, counts)
    packed, fp8 = experts.packed(), experts.in_fp8()
    biases = h.random_biases(gen, len(counts), *shape) if biased else {}
    h.force_step(monkeypatch, tile=MANY_ROWS)
    wanted = emulator.execute(1, lambda: fused_moe(x, *fp8, *routing, **biases))
    taken = h.force_step(monkeypatch, **step)
    assert h.same_bits(emulator.execute(1, lambda: packed_moe(x, packed, *routing, **biases)), wanted)
    assert h.relative_l2(wanted, h.layer_reference(x, fp8, *routing, quantized=True, biases=biases)) <= MOST_ERROR
    return taken


def check_bits(
    emulator: Device,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    span: int,
    seed: int,
    fp8_tile: RowTile,
    packed_tile: RowTile,
    copies: bool | None = None,
    apart: int = 2,
) -> StepPlan:
    """Returns the step of the packed layer."""
    tokens, hidden, intermediate = shape
    gen, experts = h.seeded(seed, CPU), random_experts(h.seeded(seed, CPU), 3, hidden, intermediate, span, apart)
    x, routing = h.random_tokens(gen, tokens, hidden), h.random_routing(gen, "distinct", tokens, 2, 3)
    packed, fp8 = experts.packed(), experts.in_fp8()
    h.force_step(monkeypatch, tile=fp8_tile)
    wanted = emulator.execute(seed, lambda: fused_moe(x, *fp8, *routing))
    taken = h.force_step(monkeypatch, tile=packed_tile, copies=copies)
    assert h.same_bits(emulator.execute(seed, lambda: packed_moe(x, packed, *routing)), wanted)
    assert h.relative_l2(wanted, h.layer_reference(x, fp8, *routing, quantized=True)) <= MOST_ERROR
    (step,) = taken
    return step


@pytest.mark.parametrize(
    ("shape", "tile"), [((3, 256, 384), FEW_ROWS), ((90, 384, 256), FEW_ROWS), ((90, 384, 256), SHARED)]
)
def test_blocks_that_are_far_apart_have_the_bits_of_block_fp8(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], tile: RowTile
) -> None:
    fp8_tile = FEW_ROWS if tile is FEW_ROWS else MANY_ROWS
    check_bits(emulator, monkeypatch, shape, SPAN, 1, fp8_tile, tile, apart=2 * SPAN)


@pytest.mark.parametrize(
    ("shape", "kind", "seed"),
    h.pairwise([(1, 256, 128), (7, 1152, 256), (12, 1024, 384), (16, 4224, 128)], ["distinct", "some_missing"], [1, 2]),
)
def test_a_small_batch_has_the_bits_of_block_fp8(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], kind: str, seed: int
) -> None:
    tokens, hidden, intermediate = shape
    gen, experts = h.seeded(seed, CPU), random_experts(h.seeded(seed, CPU), 3, hidden, intermediate, SPAN)
    x, routing = h.random_tokens(gen, tokens, hidden), h.random_routing(gen, kind, tokens, 2, 3)
    packed, fp8 = experts.packed(), experts.in_fp8()
    h.force_step(monkeypatch, width=8 if tokens <= 8 else 16)
    wanted = emulator.execute(seed, lambda: fused_moe(x, *fp8, *routing))
    out = emulator.execute(seed, lambda: packed_moe(x, packed, *routing))
    one_k_block = intermediate == GROUP  # sums of more are rounded in another order: two teams of warps take turns
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=0)
    assert (h.bits(out) != h.bits(wanted)).sum() <= (0 if one_k_block else out.numel() // 1000)
    assert h.relative_l2(wanted, h.layer_reference(x, fp8, *routing, quantized=True)) <= MOST_ERROR


def of_quantized_tokens(x: torch.Tensor, layer: h.Layer, routing: h.Quantized, **form: Any) -> torch.Tensor:
    q, scales = reference.quantize(x)
    return fused_moe(q, *layer, *routing, hidden_scale=scales, **form)


def with_shared_expert(x: torch.Tensor, layer: h.Layer, routing: h.Quantized, **form: Any) -> torch.Tensor:
    weights, ids = routing
    return fused_moe(x, *layer, weights, ids % 2, shared_expert=True, routed_scale=2.5, **form)


def of_one_of_two_ranks(x: torch.Tensor, layer: h.Layer, routing: h.Quantized, **form: Any) -> torch.Tensor:
    expert_map = torch.tensor([-1, 1, -1, 0, 2, -1], dtype=torch.int32)
    return fused_moe(x, *layer, routing[0], routing[1] * 2 + 1, expert_map=expert_map, **form)


def with_chosen_experts(x: torch.Tensor, layer: h.Layer, routing: h.Quantized, **form: Any) -> torch.Tensor:
    logits = torch.randn(len(x), len(layer.w13), generator=h.seeded(1, CPU))
    return routed_moe(x, *layer, logits, 2, **form)


SORTED = [{"tile": FEW_ROWS, "copies": False}, {"tile": FEW_ROWS, "copies": True}, {"tile": SHARED}]
CALLS = with_shared_expert, of_one_of_two_ranks, with_chosen_experts


@pytest.mark.parametrize(
    ("call", "step"),
    [*itertools.product(CALLS, [*SORTED, {"width": 8}]), *((of_quantized_tokens, step) for step in SORTED)],
)
def test_every_kind_of_call_has_the_bits_of_block_fp8(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, call: Callable[..., torch.Tensor], step: dict[str, Any]
) -> None:
    tokens = 7 if "width" in step else 140
    gen, experts = h.seeded(0, CPU), random_experts(h.seeded(0, CPU), 3, 256, 128, SPAN)
    x, routing = h.random_tokens(gen, tokens, 256), h.random_routing(gen, "distinct", tokens, 2, 3)
    packed, fp8 = experts.packed(), experts.in_fp8()
    h.force_step(monkeypatch, **step | ({"tile": MANY_ROWS} if step.get("tile") is SHARED else {}))
    wanted = emulator.execute(1, lambda: call(x, fp8, routing))
    taken = h.force_step(monkeypatch, **step)
    assert h.same_bits(emulator.execute(1, lambda: call(x, packed, routing, weights=PACKED_MXFP4)), wanted)
    assert len(taken) == 1
    assert h.relative_l2(wanted, call(x, packed, routing, weights=PACKED_MXFP4)) <= MOST_ERROR


@pytest.mark.parametrize(
    ("tokens", "span", "seed", "tile"),
    [
        (5, 15, 1, FEW_ROWS),
        (20, 40, 2, SHARED),
        (140, 30, 1, SHARED),
        (20, 30, 1, FEW_ROWS),
        (40, 70, 1, FEW_ROWS),
    ],
)
def test_wider_blocks_take_further_steps(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, tokens: int, span: int, seed: int, tile: RowTile
) -> None:
    h.force_step(monkeypatch, tile=tile)
    assert run_packed_layer(emulator, seed, tokens, span) <= MOST_ERROR


def run_batched(emulator: Device, seed: int, rows: Slabs, layer: h.Layer, expected_m: int, **form: Any) -> torch.Tensor:
    out = empty_rows(rows, rows.a[0].shape[2])
    call = *rows.a, *layer, rows.masked_m
    emulator.execute(seed, lambda: batched_experts(*call, expected_m=expected_m, out=out, **form))
    return out


@pytest.mark.parametrize("expected_m", [1, 1000])
@pytest.mark.parametrize(
    ("counts", "shape", "span", "in_rows", "seed"),
    [
        ([130, 0, 64, 1], (384, 256), SPAN, True, 1),
        ([9, 300, 70, 0], (256, 384), 0, True, 2),
        ([141, 17], (896, 128), 11, False, 1),  # max_m is a multiple of 4: kernels for many rows read scales in place
    ],
)
def test_batched_experts_have_the_bits_of_block_fp8(
    emulator: Device, counts: list[int], shape: tuple[int, int], span: int, in_rows: bool, seed: int, expected_m: int
) -> None:
    gen, experts = h.seeded(seed, CPU), random_experts(h.seeded(seed, CPU), len(counts), *shape, span)
    rows = slabs(gen, counts, shape[0])
    if not in_rows:
        rows = replace(rows, a=(rows.a[0], h.column_major(rows.a[1])))
    wanted = run_batched(emulator, seed, rows, experts.in_fp8(), max(counts))
    out = run_batched(emulator, seed, rows, experts.packed(), expected_m, weights=PACKED_MXFP4)
    for expert, count in enumerate(counts):
        assert h.same_bits(out[expert, :count], wanted[expert, :count]), f"expert {expert}"
        assert h.untouched(out[expert, count:]), f"expert {expert}: rows behind its {count} are written"


@pytest.mark.parametrize(("expected_m", "span", "seed"), [(1, 40, 2), (1000, 30, 1)])
def test_batched_experts_take_further_steps(emulator: Device, expected_m: int, span: int, seed: int) -> None:
    counts = [70, 0, 129]
    gen, layer = h.seeded(seed, CPU), random_experts(h.seeded(seed, CPU), len(counts), 384, 256, span).packed()
    rows = slabs(gen, counts, 384)
    out = run_batched(emulator, seed, rows, layer, expected_m, weights=PACKED_MXFP4)
    wanted = batched_experts(*rows.a, *layer, rows.masked_m, expected_m=expected_m, weights=PACKED_MXFP4)
    for expert, count in enumerate(counts):
        for actual, expected in zip(out[expert, :count].T, wanted[expert, :count].T, strict=True):
            assert not count or h.relative_l2(actual, expected) <= MOST_ERROR
