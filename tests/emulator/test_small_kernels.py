"""The kernels around the GEMMs give the bits of their plain-torch references on the emulator; and a whole layer.

Called outside the emulator, an op on CPU tensors is its reference.
"""

import pytest
import torch

from fp8moe_plugin.ops import fused_moe, per_token_group_quant_fp8, quantize, silu_mul_quant_fp8
from fp8moe_plugin.ops.transpose_scales import transpose_scales
from fp8moe_plugin.plan.scratch import scale_pitch
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, RowTile
from fp8moe_plugin.plan.tuning import QUANTIZE_FEW_TOKENS
from tests import helpers as h
from tests.emulator.device import Device
from tests.steps import (
    combine,
    copy_rows,
    empty_tokens,
    quantize_rows,
    quantize_tokens,
    route,
    tiles_of_counts,
    tiles_of_ends,
    tiles_of_indices,
)

CPU = torch.device("cpu")
seeds = pytest.mark.parametrize("seed", [1, 2])
kinds_of_tiles = pytest.mark.parametrize("tile", [FEW_ROWS, MANY_ROWS])


@seeds
@kinds_of_tiles
@pytest.mark.parametrize("tokens", [100, 800])  # one chunk of pairs, three
def test_route_equals_the_reference(emulator: Device, tokens: int, tile: RowTile, seed: int) -> None:
    _, ids = h.random_routing(h.seeded(seed, CPU), "out_of_range", tokens, 3, 9)
    actual = emulator.execute(seed, lambda: route(ids, 9, tile))
    h.assert_same_routing(actual, route(ids, 9, tile))


@seeds
@kinds_of_tiles
def test_tiles_of_counts_clamp_and_equal_the_reference(emulator: Device, tile: RowTile, seed: int) -> None:
    max_m = 300
    counts = torch.randint(-5, max_m + 9, (40,), generator=h.seeded(seed, CPU), dtype=torch.int32)
    actual = emulator.execute(seed, lambda: tiles_of_counts(counts, max_m, tile))
    h.assert_same_tiles(actual, tiles_of_counts(counts, max_m, tile))


@seeds
def test_tiles_of_indices_equal_the_reference(emulator: Device, seed: int) -> None:
    gen = h.seeded(seed, CPU)
    lengths = torch.randint(1, 200, (20,), generator=gen)
    ids = torch.randint(-2, 10, lengths.shape, generator=gen, dtype=torch.int32).repeat_interleave(lengths)
    out, expected = (h.poisoned(len(ids), 200, dtype=torch.bfloat16, device=CPU) for _ in range(2))
    actual = emulator.execute(seed, lambda: tiles_of_indices(ids, 8, MANY_ROWS, out))
    h.assert_same_tiles(actual, tiles_of_indices(ids, 8, MANY_ROWS, expected))
    assert h.same_bits(out, expected)


@seeds
@kinds_of_tiles
@pytest.mark.parametrize("alignment", [1, 96, 128])
def test_tiles_of_ends_equal_the_reference(emulator: Device, alignment: int, tile: RowTile, seed: int) -> None:
    gen = h.seeded(seed, CPU)
    ends = torch.randint(0, 400, (1100,), generator=gen, dtype=torch.int32).cumsum(0).int()
    ends[-3:] += 1000  # past the last row
    rows = int(ends[-4]) + 50
    actual = emulator.execute(seed, lambda: tiles_of_ends(ends, rows, alignment, tile))
    h.assert_same_tiles(actual, tiles_of_ends(ends, rows, alignment, tile))


@seeds
@pytest.mark.parametrize("tokens", [1, 37, QUANTIZE_FEW_TOKENS + 3])
def test_quantized_tokens_and_rows_equal_the_reference(emulator: Device, tokens: int, seed: int) -> None:
    gen = h.seeded(seed, CPU)
    x, slots = h.random_tokens(gen, tokens, 384), torch.randperm(3 * tokens, generator=gen).int().view(tokens, 3)
    slots[::4, 1] = -1

    def ops() -> list[h.Quantized]:
        tokens_out = empty_tokens(tokens, 384, CPU)
        quantize_tokens(x, tokens_out)
        return [tokens_out, per_token_group_quant_fp8(x), quantize_rows(x, slots), quantize.quantize_tokens(x, False)]

    expected = ops()
    copied = emulator.execute(seed, lambda: copy_rows(expected[0], slots))
    for pair, reference in zip([*emulator.execute(seed, ops), copied], [*expected, expected[2]], strict=True):
        for got, wanted in zip(pair, reference, strict=True):
            assert h.same_bits(got.contiguous(), wanted.contiguous())


@seeds
def test_silu_mul_quant_is_close_to_the_reference(emulator: Device, seed: int) -> None:
    counts = [37, 0, 8, 40]
    gate_up = h.random_tokens(h.seeded(seed, CPU), len(counts), max(counts), 512)
    masked_m = torch.tensor(counts, dtype=torch.int32)
    q, scales = emulator.execute(seed, lambda: silu_mul_quant_fp8(gate_up, masked_m))
    expected_q, expected_scales = silu_mul_quant_fp8(gate_up, masked_m)
    for group, count in enumerate(counts):
        torch.testing.assert_close(scales[group, :count], expected_scales[group, :count], rtol=1e-6, atol=0)
        differ = q[group, :count].view(torch.uint8) != expected_q[group, :count].view(torch.uint8)
        assert differ.count_nonzero() <= max(2, 1e-4 * differ.numel())
        assert h.untouched(q[group, count:])


@seeds
@pytest.mark.parametrize(("rows", "k_blocks"), [(1, 1), (65, 33), (700, 5)])
def test_transposed_scales_equal_the_given_ones(emulator: Device, rows: int, k_blocks: int, seed: int) -> None:
    gen, pitch = h.seeded(seed, CPU), scale_pitch(3 * rows)
    wide = torch.rand(3, rows, k_blocks + 2, generator=gen)  # rows are further apart than they are long
    for scales, strides in ((wide[1, :, :k_blocks], (1, pitch)), (wide[..., :k_blocks], (rows, 1, pitch))):
        out = h.poisoned(pitch * k_blocks, dtype=torch.float32, device=CPU).as_strided(scales.shape, strides)
        counts = torch.full((3 if scales.dim() == 3 else 1,), rows, dtype=torch.int32)
        emulator.execute(seed, lambda s=scales, o=out, c=counts: transpose_scales(s, o, c))
        assert h.same_bits(out.contiguous(), scales.contiguous())


@seeds
def test_scales_of_rows_without_a_count_are_neither_read_nor_written(emulator: Device, seed: int) -> None:
    counts = [70, 0, -3, 1, 999]
    scales = torch.rand(len(counts), 130, 9, generator=h.seeded(seed, CPU))
    out = h.poisoned(len(counts), 9, 132, dtype=torch.float32, device=CPU).mT[:, :130]
    masked_m = torch.tensor(counts, dtype=torch.int32)
    emulator.execute(seed, lambda: transpose_scales(scales, out, masked_m))
    for group, count in enumerate(counts):
        count = min(max(count, 0), 130)
        assert h.same_bits(out[group, :count].contiguous(), scales[group, :count].contiguous())
        assert h.untouched(out[group, count:])


@seeds
@pytest.mark.parametrize("topk", [1, 9])
def test_combine_equals_the_reference(emulator: Device, topk: int, seed: int) -> None:
    gen, tokens = h.seeded(seed, CPU), 13
    rows = h.random_tokens(gen, tokens * topk, 1152)
    slots = torch.randperm(len(rows), generator=gen).int().view(tokens, topk)
    slots[::3] = -1
    weights = torch.rand(tokens, topk, generator=gen)

    def op() -> torch.Tensor:
        return combine(rows, slots, weights, h.poisoned(tokens, 1152, dtype=torch.bfloat16, device=CPU))

    assert h.same_bits(emulator.execute(seed, op), op())


@seeds
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"),
    [
        (1, 1024, 128),
        (32, 2048, 256),
        (40, 256, 256),
        (7, 1024, 384),
        (150, 256, 256),
        (300, 256, 256),
        (300, 256, 768),
        (200, 256, 1152),
    ],
)
def test_a_layer_of_experts(emulator: Device, tokens: int, hidden: int, intermediate: int, seed: int) -> None:
    gen, experts = h.seeded(seed, CPU), 3
    x, layer = h.random_tokens(gen, tokens, hidden), h.random_layer(gen, experts, hidden, intermediate)
    weights, ids = h.random_routing(gen, "some_missing", tokens, 2, experts)
    out = emulator.execute(seed, lambda: fused_moe(x, *layer, weights, ids))
    assert h.relative_l2(out, h.layer_reference(x, layer, weights, ids, quantized=True)) <= 1e-2


@pytest.mark.parametrize(("tokens", "topk", "ids_64"), [(1, 1, False), (40, 2, True), (300, 2, False), (300, 4, True)])
def test_a_shared_expert_is_one_more_column(emulator: Device, tokens: int, topk: int, ids_64: bool) -> None:
    """300 tokens with 5 experts each take two blocks of pairs, and the second one begins within a token."""
    gen, experts = h.seeded(0, CPU), 6
    x, layer = h.random_tokens(gen, tokens, 256), h.random_layer(gen, experts, 256, 128)
    weights, ids = h.random_routing(gen, "out_of_range", tokens, topk, experts)
    ids = ids.long() if ids_64 else ids
    out = emulator.execute(1, lambda: fused_moe(x, *layer, weights, ids, shared_expert=True, routed_scale=2.5))
    columns = h.with_shared_expert(weights, ids, experts, 2.5)
    assert h.same_bits(out, emulator.execute(2, lambda: fused_moe(x, *layer, *columns)))
    assert h.relative_l2(out, h.layer_reference(x, layer, *columns, quantized=True)) <= 1e-2


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_shared_expert_has_weights_in_the_last_column(emulator: Device, tokens: int) -> None:
    gen, experts = h.seeded(0, CPU), 6
    x, layer = h.random_tokens(gen, tokens, 256), h.random_layer(gen, experts, 256, 128)
    weights, ids = h.random_routing(gen, "distinct", tokens, 3, experts - 1)
    columns, all_ids = h.with_shared_expert(weights, ids, experts, 1.0)
    columns[:, -1] = torch.rand(tokens, generator=gen)
    out = emulator.execute(1, lambda: fused_moe(x, *layer, columns, ids, shared_expert=True))
    assert h.same_bits(out, emulator.execute(2, lambda: fused_moe(x, *layer, columns, all_ids)))
    assert h.relative_l2(out, h.layer_reference(x, layer, columns, all_ids, quantized=True)) <= 1e-2
