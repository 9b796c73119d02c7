"""The kernels of the experts' second GEMM with a bias, on the emulator, against float64 of the same operands."""

import pytest
import torch

from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, RowTile
from tests import helpers as h
from tests.emulator.activations import CPU
from tests.emulator.device import Device
from tests.emulator.inputs import assert_product, empty_rows, slabs
from tests.emulator.layers import MOST_ERROR
from tests.steps import grouped_gemm, tiles_of_counts

OAI = h.MODIFIED[1]  # everywhere: other activations would be other kernels, which take long to compile
TOPK, EXPERTS, ROUTED_SCALE = 6, 9, 2.5


def second_gemm(emulator: Device, seed: int, tile: RowTile) -> None:
    gen, counts, n = h.seeded(0, CPU), [144, 33, 0, 65] if tile is MANY_ROWS else [33, 8, 1], 384
    rows, w2 = slabs(gen, counts, 256), h.random_weights(gen, len(counts), n, 256)
    bias, out = h.random_biases(gen, len(counts), n, 128)["w2_bias"], empty_rows(rows, n)

    def ops() -> None:
        grouped_gemm(rows.a, w2, out, tiles_of_counts(rows.masked_m, rows.max_m, tile), bias=bias)

    emulator.execute(seed, ops)
    assert_product(out, rows, rows.a, w2, bias)


def of_many_rows(emulator: Device, seed: int) -> None:
    second_gemm(emulator, seed, MANY_ROWS)


def of_few_rows(emulator: Device, seed: int) -> None:
    second_gemm(emulator, seed, FEW_ROWS)


def small_batch(emulator: Device, seed: int) -> None:
    """Both kernels, with a shared expert, and with blocks that split K."""
    gen, tokens = h.seeded(0, CPU), 5
    x, layer = h.random_tokens(gen, tokens, 256), h.random_layer(gen, EXPERTS, 256, 256)
    biases = h.random_biases(gen, EXPERTS, 256, 256)
    weights, ids = h.random_routing(gen, "some_missing", tokens, TOPK, EXPERTS)
    weights = torch.where(ids < 0, float("nan"), weights)
    options = {**biases, "activation": OAI, "shared_expert": True, "routed_scale": ROUTED_SCALE}
    with pytest.MonkeyPatch.context() as patch:
        steps = h.force_step(patch, width=8)
        out = emulator.execute(seed, lambda: fused_moe(x, *layer, weights, ids, **options))
    assert steps[0].down_splits > 1
    columns = h.with_shared_expert(weights, ids, EXPERTS, ROUTED_SCALE)
    expected = h.layer_reference(x, layer, *columns, quantized=True, activation=OAI, biases=biases)
    assert h.relative_l2(out, expected) <= MOST_ERROR
