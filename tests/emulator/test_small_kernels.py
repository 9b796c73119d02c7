"""The kernels around the GEMMs give the bits of their plain-torch references on the emulator; and a whole layer."""

import pytest
import torch

from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.ops.combine import combine, combine_reference
from fp8moe_plugin.ops.quantize import (
    empty_tokens,
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_reference,
    quantize_rows,
    quantize_rows_reference,
    quantize_tokens,
)
from fp8moe_plugin.ops.route import (
    Tiles,
    _runs,
    _tiles_reference,
    route,
    route_reference,
    tiles_of_counts,
    tiles_of_counts_reference,
    tiles_of_indices,
)
from fp8moe_plugin.ops.silu_mul_quant import silu_mul_quant_fp8, silu_mul_quant_fp8_reference
from tests import helpers as h
from tests.emulator.device import Device

CPU = torch.device("cpu")
seeds = pytest.mark.parametrize("seed", [1, 2])
block_sizes = pytest.mark.parametrize("block_m", [64, 128])


def assert_same_tiles(actual: Tiles, expected: Tiles) -> None:
    assert actual.num_tiles.tolist() == expected.num_tiles.tolist()
    count = int(expected.num_tiles[0])
    assert torch.equal(actual.table[:count], expected.table[:count])
    if actual.ready is not None:
        assert not actual.ready[: 1 + count].any()


@seeds
@block_sizes
@pytest.mark.parametrize("tokens", [100, 800])  # one chunk of pairs, three
def test_route_equals_the_reference(emulator: Device, tokens: int, block_m: int, seed: int) -> None:
    _, ids = h.random_routing(h.seeded(seed, CPU), "out_of_range", tokens, 3, 9)
    actual = emulator.execute(seed, lambda: route(ids, 9, block_m))
    expected = route_reference(ids, 9, block_m)
    rows = int(expected.num_rows)
    assert int(actual.num_rows) == rows
    assert torch.equal(actual.slots, expected.slots)
    assert torch.equal(actual.tokens[:rows], expected.tokens[:rows])
    assert_same_tiles(actual.tiles, expected.tiles)


@seeds
@block_sizes
def test_tiles_of_counts_clamp_and_equal_the_reference(emulator: Device, block_m: int, seed: int) -> None:
    max_m = 300
    counts = torch.randint(-5, max_m + 9, (40,), generator=h.seeded(seed, CPU), dtype=torch.int32)
    groups = [(g, g * max_m, g * max_m + count) for g, count in enumerate(counts.clamp(0, max_m).tolist())]
    actual = emulator.execute(seed, lambda: tiles_of_counts(counts, max_m, block_m))
    assert_same_tiles(actual, tiles_of_counts_reference(groups, block_m, CPU))


@seeds
def test_tiles_of_indices_equal_the_reference(emulator: Device, seed: int) -> None:
    gen = h.seeded(seed, CPU)
    lengths = torch.randint(1, 200, (20,), generator=gen)
    ids = torch.randint(-2, 10, lengths.shape, generator=gen, dtype=torch.int32).repeat_interleave(lengths)
    actual = emulator.execute(seed, lambda: tiles_of_indices(ids, 8, 128))
    assert_same_tiles(actual, _tiles_reference(_runs(ids.tolist(), 8), 128, CPU))


@seeds
@pytest.mark.parametrize("tokens", [1, 37])
def test_quantized_tokens_and_rows_equal_the_reference(emulator: Device, tokens: int, seed: int) -> None:
    gen = h.seeded(seed, CPU)
    x, slots = h.random_tokens(gen, tokens, 384), torch.randperm(3 * tokens, generator=gen).int().view(tokens, 3)
    slots[::4, 1] = -1
    tokens_out = empty_tokens(tokens, 384, CPU)

    def ops() -> list[h.Quantized]:
        quantize_tokens(x, tokens_out)
        return [tokens_out, per_token_group_quant_fp8(x), quantize_rows(x, slots)]

    dense = per_token_group_quant_fp8_reference(x)
    expected = [dense, dense, quantize_rows_reference(x, slots, False)]
    for pair, reference in zip(emulator.execute(seed, ops), expected, strict=True):
        for got, wanted in zip(pair, reference, strict=True):
            assert h.same_bits(got.contiguous(), wanted.contiguous())


@seeds
def test_silu_mul_quant_is_close_to_the_reference(emulator: Device, seed: int) -> None:
    counts = [37, 0, 8, 40]
    gate_up = h.random_tokens(h.seeded(seed, CPU), len(counts), max(counts), 512)
    q, scales = emulator.execute(seed, lambda: silu_mul_quant_fp8(gate_up, torch.tensor(counts, dtype=torch.int32)))
    expected_q, expected_scales = silu_mul_quant_fp8_reference(gate_up)
    for group, count in enumerate(counts):
        torch.testing.assert_close(scales[group, :count], expected_scales[group, :count], rtol=1e-6, atol=0)
        differ = q[group, :count].view(torch.uint8) != expected_q[group, :count].view(torch.uint8)
        assert differ.count_nonzero() <= max(2, 1e-4 * differ.numel())
        assert h.untouched(q[group, count:])


@seeds
@pytest.mark.parametrize("topk", [1, 9])
def test_combine_equals_the_reference(emulator: Device, topk: int, seed: int) -> None:
    gen, tokens = h.seeded(seed, CPU), 13
    rows = h.random_tokens(gen, tokens * topk, 1152)
    slots = torch.randperm(len(rows), generator=gen).int().view(tokens, topk)
    slots[::3] = -1
    weights = torch.rand(tokens, topk, generator=gen)
    out = h.poisoned(tokens, 1152, dtype=torch.bfloat16, device=CPU)
    emulator.execute(seed, lambda: combine(rows, slots, weights, out))
    assert h.same_bits(out, combine_reference(rows, slots, weights))


@seeds
@pytest.mark.parametrize(("tokens", "intermediate"), [(40, 256), (300, 256), (300, 768), (200, 1152)])
def test_a_layer_of_experts(emulator: Device, tokens: int, intermediate: int, seed: int) -> None:
    gen, experts = h.seeded(seed, CPU), 3
    x, layer = h.random_tokens(gen, tokens, 256), h.random_layer(gen, experts, 256, intermediate)
    weights, ids = h.random_routing(gen, "some_missing", tokens, 2, experts)
    out = emulator.execute(seed, lambda: fused_moe(x, *layer, weights, ids))
    assert h.relative_l2(out, h.layer_reference(x, layer, weights, ids, quantized=True)) <= 1e-2
