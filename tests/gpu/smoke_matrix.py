"""Every public op over a small matrix of shapes, checked, in few launches: made for a slow checker.

compute-sanitizer --tool memcheck python tests/gpu/smoke_matrix.py [names of checks: quantize route ..]
"""

import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from fp8moe_plugin import ops
from fp8moe_plugin.formats.activation import SILU
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.spec import FORMATS
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.ops.pack_mxfp4 import PARTS
from fp8moe_plugin.ops.quantize import quantize_tokens
from fp8moe_plugin.plan.sm90.catalog import (
    DENSE_CLUSTER_TILE_N,
    DENSE_TILE_N,
    DENSE_TILE_ROWS,
    PACKED_FORMATS,
    SMALL_BATCH_TOKENS,
)
from fp8moe_plugin.plan.sm90.tiles import MANY_ROWS
from fp8moe_plugin.plan.tuning import GATHER_UP_TO, LONG_K, QUANTIZE_FEW_TOKENS
from tests import helpers as h
from tests import indexer
from tests.k_grouped import gradients
from tests.mxfp4 import garbage, pack_close, random_experts, random_projections
from tests.steps import route, route_reference

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
ROWS = (0, 1, 65, 129, 145)
HIDDEN, INTERMEDIATE, EXPERTS = 1024, 128, 5  # K of both ways to hand out tiles
CLAMPED = h.MODIFIED[0]  # its kernels compute the others, too
COPIES_FROM = GATHER_UP_TO + 128  # channels of experts that read copies of their tokens


def check_quantize(gen: torch.Generator, rows: int) -> None:
    for tokens, ue8m0 in itertools.product((rows, rows + QUANTIZE_FEW_TOKENS), (False, True)):
        x = h.random_tokens(gen, tokens, 384)
        h.assert_quantized(ops.per_token_group_quant_fp8(x, ue8m0=ue8m0), x, ue8m0)


def check_silu_mul_quant(gen: torch.Generator, rows: int) -> None:
    gate_up = h.random_tokens(gen, 2, rows + 3, 2 * INTERMEDIATE)
    counts = torch.tensor([rows, 0], dtype=torch.int32, device=DEVICE)
    for activation in (SILU, CLAMPED):
        q, scales = ops.silu_mul_quant_fp8(gate_up, counts, activation=activation)
        expected = h.swiglu(gate_up[0, :rows], activation)
        h.assert_quantized((q[0, :rows], scales[0, :rows]), expected, slack=h.SWIGLU_SLACK)


def check_route(gen: torch.Generator, rows: int) -> None:
    for topk in (3, 40):  # 40: more than one block
        _, ids = h.random_routing(gen, "some_missing", rows, topk, 64)
        actual, expected = route(ids, 64, MANY_ROWS), route_reference(ids, 64, MANY_ROWS)
        count = int(expected.tiles.num_tiles[0])
        assert torch.equal(actual.slots, expected.slots)
        assert torch.equal(actual.tiles.table[:count], expected.tiles.table[:count])


def check_gemm(gen: torch.Generator, rows: int) -> None:
    a = h.random_quantized(gen, rows, 384)
    for n in (8, 136, 576):
        b = h.random_weights(gen, n, 384)
        for dtype in (torch.bfloat16, torch.float32):
            c = h.random_tokens(gen, rows, n).to(dtype)
            out = h.poisoned(rows, n, dtype=dtype, device=DEVICE)
            h.assert_rounded(ops.fp8_gemm_nt(a, b, out), h.product(a, b))
            h.assert_rounded(ops.fp8_gemm_nt(a, b, out, c), h.product(a, b) + c.double())


def check_linear(gen: torch.Generator, rows: int) -> None:
    for k, weights in itertools.product((384, LONG_K), FORMATS):
        x, weight = h.random_tokens(gen, rows, k), h.random_weights(gen, 136, k, weights=weights)
        h.assert_rounded(ops.fp8_linear(x, *weight), h.product(ops.per_token_group_quant_fp8(x), weight))


def check_dense_tiles(gen: torch.Generator, rows: int) -> None:
    for weights in FORMATS:
        check_dense_tiles_of(weights, gen, rows)


def check_dense_tiles_of(weights: WeightFormat, gen: torch.Generator, rows: int) -> None:
    x, weight = h.random_tokens(gen, rows, 384), h.random_weights(gen, 392, 384, weights=weights)
    expected = h.product(ops.per_token_group_quant_fp8(x), weight)
    for tile in itertools.product(DENSE_TILE_ROWS, DENSE_TILE_N):
        with pytest.MonkeyPatch.context() as patch:
            h.force_dense_tile(patch, *tile)
            h.assert_rounded(ops.fp8_linear(x, *weight), expected)
    for tile_n in DENSE_CLUSTER_TILE_N:
        with pytest.MonkeyPatch.context() as patch:
            h.force_dense_clusters(patch, tile_n)
            h.assert_rounded(ops.fp8_linear(x, *weight), expected)


def check_contiguous(gen: torch.Generator, rows: int) -> None:
    indices = torch.tensor([0] * rows + [-1] * 3 + [2] * rows, dtype=torch.int32, device=DEVICE)
    a, b = h.random_quantized(gen, len(indices), 384), h.random_weights(gen, 3, 136, 384)
    out = h.poisoned(len(indices), 136, dtype=torch.bfloat16, device=DEVICE)
    ops.m_grouped_fp8_gemm_nt_contiguous(a, b, out, indices)
    expected = h.dequantize_tokens(*a) @ h.dequantize_weights(*b).mT
    h.assert_rounded(out[indices == 0], expected[0][indices == 0])
    h.assert_rounded(out[indices == 2], expected[2][indices == 2])
    assert not out[indices < 0].any()


def check_masked(gen: torch.Generator, rows: int) -> None:
    counts = torch.tensor([rows, 0, 1], dtype=torch.int32, device=DEVICE)
    max_m = rows + 3
    a, b = h.random_quantized(gen, 3, max_m, 384), h.random_weights(gen, 3, 136, 384)
    here = torch.arange(max_m, device=DEVICE) < counts[:, None]
    for expected_m, scales in ((1, a[1]), (200, a[1].contiguous())):
        out = h.poisoned(3, max_m, 136, dtype=torch.bfloat16, device=DEVICE)
        ops.m_grouped_fp8_gemm_nt_masked((a[0], scales), b, out, counts, expected_m)
        h.assert_rounded(out[here], h.product(a, b)[here])
        assert h.untouched(out[~here])


def check_psum(gen: torch.Generator, rows: int) -> None:
    ends = torch.tensor([rows, rows, -(-rows // 16) * 16 + 1], dtype=torch.int32, device=DEVICE)
    m, last = int(ends[2]) + 3, int(ends[2]) - 1
    a, b = h.random_quantized(gen, m, 384), h.random_weights(gen, 3, 136, 384)
    expected = h.dequantize_tokens(*a) @ h.dequantize_weights(*b).mT
    for expected_m, scales in ((1, a[1]), (200, a[1].contiguous())):
        out = h.poisoned(m, 136, dtype=torch.bfloat16, device=DEVICE)
        ops.m_grouped_fp8_gemm_nt_psum((a[0], scales), b, out, ends, expected_m, alignment=16)
        h.assert_rounded(out[:rows], expected[0, :rows])
        h.assert_rounded(out[last], expected[2, last])
        assert h.untouched(out[rows:last])
        assert h.untouched(out[last + 1 :])


def check_batched_experts(gen: torch.Generator, rows: int) -> None:
    for weights in set(FORMATS) - set(PACKED_FORMATS):
        check_batched_experts_of(weights, gen, rows)


def check_batched_experts_of(weights: WeightFormat, gen: torch.Generator, rows: int) -> None:
    layer = h.random_layer(gen, 3, HIDDEN, INTERMEDIATE, weights)
    counts = torch.tensor([rows, 0, 1], dtype=torch.int32, device=DEVICE)
    max_m = rows + 3
    q, scales = h.random_quantized(gen, 3, max_m, HIDDEN)
    here = torch.arange(max_m, device=DEVICE) < counts[:, None]
    gate_up = h.product((q, scales), layer[:2])
    expected = h.swiglu(gate_up) @ h.dequantize_weights(*layer[2:]).mT
    for expected_m in (1, 200):
        out = h.poisoned(*q.shape, dtype=torch.bfloat16, device=DEVICE)
        ops.batched_experts(q, scales, *layer, counts, expected_m=expected_m, weights=weights, out=out)
        assert h.relative_l2(out[here], expected[here]) <= 0.07
        assert h.untouched(out[~here])


def check_pack_mxfp4(gen: torch.Generator, rows: int) -> None:
    on_cpu = h.seeded(rows, CPU)
    for shard_id, further in itertools.product(PARTS, (0, 1)):
        given = random_projections(on_cpu, 2, rows, 160, "random")
        wanted = garbage(2, shard_id, (2, 2), further)
        to = [tensor.to(DEVICE) for tensor in wanted]
        pack_close(*wanted, shard_id, *given)
        pack_close(*to, shard_id, *(half.to(DEVICE) for half in given))
        assert all(h.same_bits(tensor.cpu(), its) for tensor, its in zip(to, wanted, strict=True))


def check_packed_mxfp4(gen: torch.Generator, rows: int) -> None:
    """Blocks that span more than SPAN binades take further steps; others small batches, copies or wide tiles."""
    narrow = {rows, min(rows, SMALL_BATCH_TOKENS[-1])}
    steps = {*((tokens, INTERMEDIATE) for tokens in narrow), *((min(rows, tokens), COPIES_FROM) for tokens in (24, 90))}
    for (tokens, intermediate), span in itertools.product(steps, (SPAN, 30)):
        packed = random_experts(h.seeded(0, CPU), 2, HIDDEN, intermediate, span).packed()
        x, routing = h.random_tokens(gen, tokens, HIDDEN), h.random_routing(gen, "distinct", tokens, 2, 2)
        on_cpu, on_gpu = (x.cpu(), *packed, *(part.cpu() for part in routing)), (part.to(DEVICE) for part in packed)
        tensors = x, *on_gpu, *routing
        for biases in ({}, h.random_biases(gen, 2, HIDDEN, intermediate)):
            of_cpu = {name: bias.cpu() for name, bias in biases.items()}
            expected = ops.fused_moe(*on_cpu, **of_cpu, weights=PACKED_MXFP4)
            assert h.relative_l2(ops.fused_moe(*tensors, **biases, weights=PACKED_MXFP4).cpu(), expected) <= 2e-2


def check_packed_batched_experts(gen: torch.Generator, rows: int) -> None:
    counts, max_m = torch.tensor([rows, 0, 1], dtype=torch.int32), rows + 3
    here = torch.arange(max_m) < counts[:, None]
    q, scales = h.random_quantized(gen, 3, max_m, HIDDEN)
    for expected_m, span in itertools.product((1, 200), (SPAN, 30)):
        packed = random_experts(h.seeded(0, CPU), 3, HIDDEN, INTERMEDIATE, span).packed()
        form = {"expected_m": expected_m, "weights": PACKED_MXFP4}
        expected = ops.batched_experts(q.cpu(), scales.cpu(), *packed, counts, **form)
        out = h.poisoned(*q.shape, dtype=torch.bfloat16, device=DEVICE)
        on_gpu = (part.to(DEVICE) for part in (*packed, counts))
        ops.batched_experts(q, scales, *on_gpu, **form, out=out)
        assert h.relative_l2(out.cpu()[here], expected[here]) <= 2e-2
        assert h.untouched(out.cpu()[~here])


def check_fused_moe(gen: torch.Generator, rows: int) -> None:
    x = h.random_tokens(gen, rows, HIDDEN)
    for intermediate in (INTERMEDIATE, COPIES_FROM):
        layer = h.random_layer(gen, EXPERTS, HIDDEN, intermediate)
        for kind in h.ROUTINGS:
            weights, ids = h.random_routing(gen, kind, rows, 3, EXPERTS)
            expected = h.layer_reference(x, layer, weights, ids, quantized=True)
            assert h.relative_l2(ops.fused_moe(x, *layer, weights, ids), expected) <= 2e-2
            q, scales = quantize_tokens(x, False)
            out = ops.fused_moe(q, *layer, weights, ids, hidden_scale=scales)
            assert h.relative_l2(out, expected) <= 2e-2
            columns = h.with_shared_expert(weights, ids, EXPERTS, 2.5)
            out = ops.fused_moe(x, *layer, weights, ids, shared_expert=True, routed_scale=2.5)
            assert h.relative_l2(out, h.layer_reference(x, layer, *columns, quantized=True)) <= 2e-2
            expected = h.layer_reference(x, layer, weights, ids, quantized=True, activation=CLAMPED)
            assert h.relative_l2(ops.fused_moe(x, *layer, weights, ids, activation=CLAMPED), expected) <= 2e-2


def check_biases(gen: torch.Generator, rows: int) -> None:
    for intermediate, weights in itertools.product((INTERMEDIATE, COPIES_FROM), set(FORMATS) - set(PACKED_FORMATS)):
        layer = h.random_layer(gen, EXPERTS, HIDDEN, intermediate, weights)
        biases = h.random_biases(gen, EXPERTS, HIDDEN, intermediate)
        for tokens in {rows, min(rows, SMALL_BATCH_TOKENS[-1])}:
            x, routing = h.random_tokens(gen, tokens, HIDDEN), h.random_routing(gen, "some_missing", tokens, 3, EXPERTS)
            out = ops.fused_moe(x, *layer, *routing, **biases, weights=weights, activation=CLAMPED)
            wanted = {"quantized": True, "activation": CLAMPED, "biases": biases}
            assert h.relative_l2(out, h.layer_reference(x, layer, *routing, **wanted)) <= 2e-2


def check_fp8_channel(gen: torch.Generator, rows: int) -> None:
    x = h.random_tokens(gen, rows, HIDDEN)
    for intermediate, activation in itertools.product((INTERMEDIATE, COPIES_FROM), (SILU, CLAMPED)):
        layer = h.random_layer(gen, EXPERTS, HIDDEN, intermediate, FP8_CHANNEL)
        for kind in h.ROUTINGS:
            routing = h.random_routing(gen, kind, rows, 3, EXPERTS)
            out = ops.fused_moe(x, *layer, *routing, weights=FP8_CHANNEL, activation=activation)
            expected = h.layer_reference(x, layer, *routing, quantized=True, activation=activation)
            assert h.relative_l2(out, expected) <= 2e-2


def check_routed_moe(gen: torch.Generator, rows: int) -> None:
    for topk, experts in ((3, EXPERTS), (32, 260)):
        x, layer = h.random_tokens(gen, rows, HIDDEN), h.random_layer(gen, experts, HIDDEN, INTERMEDIATE)
        for choice in ({"padding": torch.arange(rows, device=DEVICE) % 5 == 4}, {"renormalize": False}):
            logits = torch.randn(rows, experts, generator=gen, device=DEVICE)
            expected = ops.fused_moe(x, *layer, *ops.choose_experts(logits, topk, **choice))
            assert h.same_bits(ops.routed_moe(x, *layer, logits, topk, **choice), expected)
            logits, choice = logits[:, 1:].contiguous(), choice | {"shared_gate": h.random_tokens(gen, 1, HIDDEN)}
            chosen = ops.choose_experts(logits, topk - 1, hidden_states=x, **choice)
            expected = ops.fused_moe(x, *layer, *chosen, shared_expert=True)
            assert h.same_bits(ops.routed_moe(x, *layer, logits, topk - 1, **choice), expected)


def check_choose_experts(gen: torch.Generator, rows: int) -> None:
    for experts, topk in ((9, 9), (128, 8), (512, 32)):
        logits = torch.randn(rows, experts, generator=gen, device=DEVICE)
        weights, ids = ops.choose_experts(logits, topk)
        assert torch.equal(ids, logits.topk(topk).indices.int())
        torch.testing.assert_close(weights, logits.topk(topk).values.softmax(-1), rtol=1e-5, atol=1e-7)
        x, gate = h.random_tokens(gen, rows, 2048), h.random_tokens(gen, 1, 2048) / 32
        weights, _ = ops.choose_experts(logits, topk, hidden_states=x, shared_gate=gate)
        expected = (x.double() @ gate.double().T).sigmoid().float()
        torch.testing.assert_close(weights[:, -1:], expected, rtol=1e-5, atol=1e-7)


def check_router_gemm(gen: torch.Generator, rows: int) -> None:
    for k, experts in ((32, 3), (1056, 20), (8192, 128)):
        x, weight = h.random_tokens(gen, rows, k), h.random_tokens(gen, experts, k)
        exact = x.double() @ weight.double().T  # torch sums parts of bfloat16 products in bfloat16
        torch.testing.assert_close(ops.router_gemm(x, weight).double(), exact, rtol=2**-8, atol=1e-3)


def check_mqa_logits(gen: torch.Generator, rows: int) -> None:
    for heads, dim in ((64, 128), (32, 64)):
        for ranges in indexer.RANGES:
            call = indexer.prefill(gen, rows, 300, heads, dim, ranges)
            for clean, width in ((True, 0), (False, 77)):
                with indexer.poisoned_results() as memory:
                    logits = call.run(clean_logits=clean, max_seqlen_k=width)
                indexer.assert_prefill(call, logits, memory[0], width=width, clean=clean)


def check_paged_mqa_logits(gen: torch.Generator, rows: int) -> None:
    for next_n, heads, dim in ((1, 64, 128), (2, 64, 128), (3, 32, 32), (4, 64, 128)):
        for runs in (3, 66):
            call = indexer.decode(gen, [0, rows, 3 * rows, 1, 0], next_n, heads, dim)
            with indexer.poisoned_results() as memory:
                logits = call.run(runs=runs)
            indexer.assert_decode(call, logits, memory[-1])


def check_k_grouped(gen: torch.Generator, rows: int) -> None:
    for n, ks in ((16, [128, 0, 256]), (400, [384] * 3), (32, [128 * (i % 3) for i in range(37)])):
        call = gradients(gen, rows, n, ks)
        for in_place in (True, False):
            d = call.c.clone() if in_place else h.poisoned(*call.c.shape, dtype=torch.float32, device=DEVICE)
            call.assert_right(call.run(d, d if in_place else call.c))


CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_quantize,
        check_silu_mul_quant,
        check_route,
        check_gemm,
        check_linear,
        check_dense_tiles,
        check_contiguous,
        check_masked,
        check_psum,
        check_batched_experts,
        check_fused_moe,
        check_fp8_channel,
        check_biases,
        check_pack_mxfp4,
        check_packed_mxfp4,
        check_packed_batched_experts,
        check_routed_moe,
        check_choose_experts,
        check_router_gemm,
        check_mqa_logits,
        check_paged_mqa_logits,
        check_k_grouped,
    )
}


def main() -> int:
    failures = 0
    if unknown := set(sys.argv[1:]) - CHECKS.keys():
        sys.exit(f"There is no check {', '.join(sorted(unknown))}. There are {', '.join(CHECKS)}.")
    chosen = list(itertools.product(sys.argv[1:] or CHECKS, ROWS))
    for name, rows in chosen:
        try:
            CHECKS[name](h.seeded(rows, DEVICE), rows)
            torch.cuda.synchronize()
        except AssertionError as error:
            failures += 1
            print(f"FAILED check_{name} with {rows} rows: {error}")
    print(f"{len(chosen)} cases, {failures} failed")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
