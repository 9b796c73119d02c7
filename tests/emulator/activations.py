"""Each kernel that applies an activation, on the emulator, against float64 of the same operands."""

from collections.abc import Callable

import pytest
import torch

from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.ops import fused_moe, silu_mul_quant_fp8
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, small_batch_step
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS
from fp8moe_plugin.plan.spec import LayerSpec
from tests import helpers as h
from tests.emulator.device import Device
from tests.emulator.inputs import slabs
from tests.emulator.layers import MOST_ERROR
from tests.steps import gate_up, split_k, tiles_of_counts

CPU = torch.device("cpu")
COUNTS = [144, 65, 33]  # in gate_up: with a tail, without one, and rows whose groups are shared by warpgroups
HIDDEN, INTERMEDIATE = 256, 128


def many_rows(
    emulator: Device, seed: int, activation: Activation, weights: WeightFormat = FP8_BLOCK, biased: bool = False
) -> None:
    rows = slabs(gen := h.seeded(0, CPU), COUNTS, HIDDEN)
    w13 = h.random_weights(gen, 3, 2 * INTERMEDIATE, HIDDEN, weights=weights)
    bias = h.random_biases(gen, 3, HIDDEN, INTERMEDIATE)["w13_bias"] if biased else None

    def ops() -> h.Quantized:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, MANY_ROWS)
        return gate_up(rows.a, w13, tiles, activation=activation, bias=bias)

    assert_activated(emulator.execute(seed, ops), sums_of(rows.a, w13, bias), COUNTS, activation)


def few_rows(
    emulator: Device,
    seed: int,
    activation: Activation,
    weights: WeightFormat = FP8_BLOCK,
    biased: bool = False,
    splits: int = 2,
) -> None:
    gen, counts = h.seeded(0, CPU), [33, 8, 1]
    x = h.random_quantized(gen, 40, HIDDEN)
    w13 = h.random_weights(gen, 3, 2 * INTERMEDIATE, HIDDEN, weights=weights)
    tokens = torch.randint(40, (3, 36), generator=gen, dtype=torch.int32)
    bias = h.random_biases(gen, 3, HIDDEN, INTERMEDIATE)["w13_bias"] if biased else None

    def ops() -> h.Quantized:
        tiles = tiles_of_counts(torch.tensor(counts, dtype=torch.int32), tokens.shape[1], FEW_ROWS)
        split, tiles = split_k(splits, tiles, tokens.numel(), INTERMEDIATE)
        options = {"activation": activation, "tokens": tokens, "split": split, "bias": bias}
        return gate_up((x[0], x[1].contiguous()), w13, tiles, **options)

    found, rows = emulator.execute(seed, ops), (x[0][tokens.long()], x[1][tokens.long()])
    assert_activated(found, sums_of(rows, w13, bias), counts, activation)


def small_batch(
    emulator: Device,
    seed: int,
    activation: Activation,
    weights: WeightFormat = FP8_BLOCK,
    biased: bool = False,
    width: int = 8,
) -> None:
    def plan(spec: LayerSpec, tokens: int, multiprocessors: int) -> SmallBatchStep:
        return small_batch_step(spec._replace(activation=activation), tokens, width, multiprocessors)

    gen = h.seeded(0, CPU)
    x, layer = h.random_tokens(gen, width - 1, HIDDEN), h.random_layer(gen, 4, HIDDEN, INTERMEDIATE, weights)
    routing = h.random_routing(gen, "distinct", len(x), 2, 4)
    biases = h.random_biases(gen, 4, HIDDEN, INTERMEDIATE) if biased else {}
    with pytest.MonkeyPatch.context() as patch:
        h.force_layer(patch, plan)
        out = emulator.execute(seed, lambda: fused_moe(x, *layer, *routing, weights=weights, **biases))
    options = {"activation": activation, "biases": biases}
    error = h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=True, **options))
    assert error <= MOST_ERROR


def by_itself(emulator: Device, seed: int, activation: Activation) -> None:
    counts = [37, 0, 8]
    sums = h.random_tokens(h.seeded(0, CPU), len(counts), max(counts), 2 * INTERMEDIATE)
    masked_m = torch.tensor(counts, dtype=torch.int32)
    found = emulator.execute(seed, lambda: silu_mul_quant_fp8(sums, masked_m, activation=activation))
    assert_activated(found, sums, counts, activation)


def sums_of(a: h.Quantized, w13: h.Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    return h.product(a, w13) + (0 if bias is None else bias.double()[:, None])


OF_EXPERTS: dict[str, Callable[..., None]] = {  # those that also take the format of weights and whether there is a bias
    "gate_up": many_rows,
    "gate_up_few_rows": few_rows,
    "gate_up_small_batch": small_batch,
}
KERNELS: dict[str, Callable[..., None]] = {**OF_EXPERTS, "silu_mul_quant": by_itself}


def assert_activated(found: h.Quantized, sums: torch.Tensor, counts: list[int], activation: Activation) -> None:
    """Each element that is there is a neighbour of float64's, whose limits matter; no others are written."""
    for group, count in enumerate(counts):
        expected = h.swiglu(sums[group, :count], activation)
        h.assert_quantized((found[0][group, :count], found[1][group, :count]), expected, slack=h.MODIFIED_SLACK)
        assert h.untouched(found[0][group, count:])
