"""Packed MXFP4 on a GPU: layers have the bits of the same weights in block FP8, small batches about the same sums."""

from functools import partial

import pytest
import torch

from fp8moe_plugin.bench.layer import random_step
from fp8moe_plugin.bench.packed import packed as packed_form
from fp8moe_plugin.bench.packed import random_mxfp4
from fp8moe_plugin.checkpoint import shapes
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.layers.pack import pack
from fp8moe_plugin.ops import batched_experts, fused_moe
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.ops.pack_mxfp4 import PARTS
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, PACKED_WIDE, SHARED, RowTile
from fp8moe_plugin.testing import captured, invariance
from tests import helpers as h
from tests.mxfp4 import CLOSE_EXPONENTS, PACKED_SIZES, Experts, garbage, pack_close, random_experts, random_projections

pytestmark = pytest.mark.gpu

LAYERS = {"flash-tp8": (16, 4096, 256, 6), "copies": (8, 1024, 2048, 2), "one-block": (5, 128, 128, 3)}
CPU = torch.device("cpu")
E4M3_STEP = 2**-3  # between two numbers, at most
NORMAL = 9  # the exponents of a row block then differ by at most 11, see `same_as_fp8`


def on_gpu(layer: h.Layer) -> h.Layer:
    return h.Layer(*(tensor.cuda() for tensor in layer))


def experts_of(name: str, span: int) -> Experts:
    experts, hidden, intermediate, _ = LAYERS[name]
    return random_experts(h.seeded(span, CPU), experts, hidden, intermediate, span)


def same_as_fp8(out: torch.Tensor, wanted: torch.Tensor, span: int) -> bool:
    """Whether a result has the bits of block FP8, or about its values where weights are subnormal e4m3 numbers.

    There are more of these than in block FP8, and wgmma, which adds up products with a limited precision, rounds theirs
    in other places.
    """
    return h.same_bits(out, wanted) if span <= NORMAL else h.relative_l2(out, wanted) <= 1e-2


@pytest.mark.parametrize("tokens", [1, 3, 9, 20, 70, 300, 700])
@pytest.mark.parametrize(("tile", "of_fp8"), [(FEW_ROWS, FEW_ROWS), (PACKED_WIDE, MANY_ROWS), (SHARED, MANY_ROWS)])
@pytest.mark.parametrize("span", [0, NORMAL, SPAN])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_bits_of_block_fp8(
    monkeypatch: pytest.MonkeyPatch, name: str, span: int, tile: RowTile, of_fp8: RowTile, tokens: int
) -> None:
    experts, hidden, _, topk = LAYERS[name]
    weights, gen = experts_of(name, span), torch.Generator("cuda").manual_seed(tokens)
    packed, fp8 = on_gpu(weights.packed()), on_gpu(weights.in_fp8())
    x, routing = h.random_tokens(gen, tokens, hidden), h.random_routing(gen, "distinct", tokens, topk, experts)
    taken_by_fp8 = h.force_step(monkeypatch, tile=of_fp8)
    with invariance(True):  # block FP8 would split K
        wanted = fused_moe(x, *fp8, *routing)
    taken = h.force_step(monkeypatch, tile=tile)
    out = fused_moe(x, *packed, *routing, weights=PACKED_MXFP4)
    assert len(taken) == len(taken_by_fp8) == 1
    assert same_as_fp8(out, wanted, span)
    assert all(h.same_bits(fused_moe(x, *packed, *routing, weights=PACKED_MXFP4), out) for _ in range(100))


@pytest.mark.parametrize("kind", ["distinct", "some_missing", "one_expert"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16])
@pytest.mark.parametrize("name", LAYERS)
def test_a_small_batch_has_the_sums_of_block_fp8(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, kind: str
) -> None:
    """They split K in other parts."""
    experts, hidden, _, topk = LAYERS[name]
    weights, gen = experts_of(name, SPAN), torch.Generator("cuda").manual_seed(tokens)
    packed, fp8 = on_gpu(weights.packed()), on_gpu(weights.in_fp8())
    x, routing = h.random_tokens(gen, tokens, hidden), h.random_routing(gen, kind, tokens, topk, experts)
    steps = h.force_step(monkeypatch, width=8 if tokens <= 8 else 16)
    wanted = fused_moe(x, *fp8, *routing)
    out = fused_moe(x, *packed, *routing, weights=PACKED_MXFP4)
    assert len(steps) == 2
    assert h.relative_l2(out, wanted) <= 1e-3
    assert all(h.same_bits(fused_moe(x, *packed, *routing, weights=PACKED_MXFP4), out) for _ in range(100))


@pytest.mark.parametrize("tokens", [8, 64])
def test_replays_have_the_same_bits(tokens: int) -> None:
    """TMA overwrote scales of eight tokens that were being read, in one layer of seven."""
    device = torch.device("cuda")
    experts = shapes.Experts(1, 256, 6, 4096, 256)
    weights, (x, routings) = packed_form(random_mxfp4(experts, device)), random_step(experts, tokens, device)
    outs = [torch.empty_like(x) for _ in routings]
    layers = [
        partial(fused_moe, x, *weights.w13, *weights.w2, *routing, weights=PACKED_MXFP4, out=out)
        for routing, out in zip(routings, outs, strict=True)
    ]
    graph = captured(layers)
    graph.replay()
    first, others = [out.clone() for out in outs], torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(200):
        graph.replay()
        others += sum((a.view(torch.int16) != b.view(torch.int16)).any() for a, b in zip(outs, first, strict=True))
    assert others == 0


@pytest.mark.parametrize("expected_m", [1, 200])
@pytest.mark.parametrize("span", [0, NORMAL, SPAN])
@pytest.mark.parametrize("name", LAYERS)
def test_batched_experts_have_the_bits_of_block_fp8(name: str, span: int, expected_m: int) -> None:
    experts, hidden, *_ = LAYERS[name]
    weights, gen = experts_of(name, span), torch.Generator("cuda").manual_seed(expected_m)
    packed, fp8 = on_gpu(weights.packed()), on_gpu(weights.in_fp8())
    rows = h.random_quantized(gen, experts, 300, hidden)
    counts = torch.randint(0, 301, (experts,), generator=gen, device="cuda", dtype=torch.int32)

    def run(layer: h.Layer, form: WeightFormat) -> torch.Tensor:
        out = torch.zeros(rows[0].shape, dtype=torch.bfloat16, device="cuda")
        return batched_experts(*rows, *layer, counts, expected_m=expected_m, weights=form, out=out)

    out = run(packed, PACKED_MXFP4)
    assert same_as_fp8(out, run(fp8, FP8_BLOCK), span)
    assert all(h.same_bits(run(packed, PACKED_MXFP4), out) for _ in range(100))


@pytest.mark.parametrize(("tokens", "span"), [(2, SPAN + 1), (40, 30), (300, 70)])
@pytest.mark.parametrize("name", LAYERS)
def test_wider_blocks_take_further_steps(name: str, tokens: int, span: int) -> None:
    experts, hidden, _, topk = LAYERS[name]
    packed, gen = experts_of(name, span).packed(), h.seeded(tokens, CPU)
    x, routing = h.random_tokens(gen, tokens, hidden), h.random_routing(gen, "distinct", tokens, topk, experts)
    on_cpu = fused_moe(x, *packed, *routing, weights=PACKED_MXFP4)
    out = fused_moe(x.cuda(), *on_gpu(packed), *(part.cuda() for part in routing), weights=PACKED_MXFP4)
    assert h.relative_l2(out.cpu(), on_cpu) <= 2e-2
    for channel in range(0, hidden, 97):  # one value between the GEMMs, rounded the other way, may be all of a channel
        assert h.relative_l2(out[:, channel].cpu(), on_cpu[:, channel]) <= E4M3_STEP, channel


@pytest.mark.parametrize("further", [0, 3])
@pytest.mark.parametrize("shard_id", PARTS)
@pytest.mark.parametrize("exponents", CLOSE_EXPONENTS)
@pytest.mark.parametrize(("sizes", "blocks"), [*PACKED_SIZES, ((2048, 4096), (16, 32))])
def test_experts_are_packed_as_on_a_cpu(
    sizes: tuple[int, int], blocks: tuple[int, int], exponents: str, shard_id: str, further: int
) -> None:
    given = random_projections(h.seeded(further, CPU), 2, *sizes, exponents)
    wanted = garbage(2, shard_id, blocks, further)
    to = [tensor.cuda() for tensor in wanted]
    pack_close(*wanted, shard_id, *given)
    pack_close(*to, shard_id, *(half.cuda() for half in given))
    assert all(h.same_bits(tensor.cpu(), its) for tensor, its in zip(to, wanted, strict=True))


@pytest.mark.parametrize("shard_id", PARTS)
def test_packing_neither_waits_nor_takes_memory(shard_id: str) -> None:
    """But for the exponents, which the engine has on the host."""
    codes, exponents = random_projections(h.seeded(0, CPU), 1, 2048, 4096, "random")
    parameters = tuple(tensor.cuda() for tensor in garbage(1, shard_id, (16, 32), further=0))
    both = codes.cuda(), exponents
    packing = partial(pack, "w", parameters, [0], shard_id, both, running=False, balanced=False)
    packing()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packing()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before == exponents.nbytes
