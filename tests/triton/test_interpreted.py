"""The ops on Triton kernels, in Triton's interpreter, against the plain-torch reference."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit.compiler import compile_kernel
from fp8moe_plugin.ops import devices
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.ops.quantize import quantize_tokens
from fp8moe_plugin.plan.triton import catalog
from fp8moe_plugin.plan.triton.catalog import FEW_ROWS, MORE_ROWS, PACKED_TILE_ROWS
from tests import helpers as h
from tests.emulator.build import Kernels as EmulatedKernels
from tests.emulator.build import can_compile
from tests.emulator.build import runtime as emulator_runtime
from tests.emulator.device import Device as Emulator
from tests.mxfp4 import random_experts
from tests.triton.device import Device
from tests.triton.plans import force_step

CPU = torch.device("cpu")
EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 6, 3, 256, 256
MOST_ERROR = 1e-3  # relative L2: sums in another order change a few last bits of bfloat16, and codes after SwiGLU
SMALL_BATCH_ERROR = 3e-3  # as rows of experts are not rounded to bfloat16 before the weighted sum


@pytest.fixture
def gen() -> torch.Generator:
    return h.seeded(0, CPU)


def both(op: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any, Device]:
    """Returns what the reference returns and what the Triton kernels do, and the device that launched them."""
    expected, device = copy.deepcopy(op(*args, **options)), Device()
    with pytest.MonkeyPatch.context() as patch:
        h.serve(patch, device)
        assert devices.device_of(torch.empty(0)) is device
        return expected, op(*args, **options), device


def sources(device: Device) -> list[str]:
    return [launch.key.source.removeprefix("triton_") for launch in device.launched]


# ---- the layer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile_rows", "kind", "tokens", "ue8m0"),
    [
        (None, "distinct", 1, False),
        (None, "some_missing", 3, True),
        (None, "nowhere", 2, False),
        (FEW_ROWS, "out_of_range", 20, False),
        (FEW_ROWS, "one_expert", 7, True),
        (MORE_ROWS, "distinct", 60, True),
        (MORE_ROWS, "nowhere", 4, False),
        (MORE_ROWS, "first_half", 200, False),
    ],
)
def test_every_tile_gives_the_layer(
    gen: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    tile_rows: int | None,
    kind: str,
    tokens: int,
    ue8m0: bool,
) -> None:
    force_step(monkeypatch, tile_rows)
    intermediate = INTERMEDIATE if tile_rows else 128  # small batches take many small programs
    layer, x = h.random_layer(gen, EXPERTS, HIDDEN, intermediate), h.random_tokens(gen, tokens, HIDDEN)
    call = x, *layer, *h.random_routing(gen, kind, tokens, TOPK, EXPERTS)
    expected, actual, device = both(ops.fused_moe, *call, ue8m0=ue8m0)
    assert h.relative_l2(actual, expected) <= (SMALL_BATCH_ERROR if tile_rows is None else MOST_ERROR)
    prepare = ["quantize_count", "route"] if tokens * TOPK > 128 else ["quantize_route"]
    few = ["gate_up_small_batch", "down_small_batch"]
    assert sources(device) == (few if tile_rows is None else [*prepare, "gate_up", "gemm", "combine"])


@pytest.mark.parametrize("activation", h.MODIFIED, ids=lambda activation: activation.kind)
@pytest.mark.parametrize(("tokens", "tile_rows"), [(2, None), (20, FEW_ROWS), (20, MORE_ROWS)])
def test_a_modified_swiglu(
    gen: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    activation: Activation,
    tokens: int,
    tile_rows: int | None,
) -> None:
    force_step(monkeypatch, tile_rows, activation)
    layer, x = h.random_layer(gen, EXPERTS, HIDDEN, 128), h.random_tokens(gen, tokens, HIDDEN)
    routing = h.random_routing(gen, "some_missing", tokens, TOPK, EXPERTS)
    _, actual, _ = both(ops.fused_moe, x, *layer, *routing)
    expected = h.layer_reference(x, layer, *routing, quantized=True, activation=activation)
    assert h.relative_l2(actual, expected) <= 2 * SMALL_BATCH_ERROR


@pytest.mark.parametrize(
    ("tokens", "tile_rows", "kind"),
    [(3, None, "some_missing"), (20, FEW_ROWS, "one_expert"), (20, MORE_ROWS, "distinct")],
)
def test_weights_with_a_scale_for_each_row(
    gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, tokens: int, tile_rows: int | None, kind: str
) -> None:
    force_step(monkeypatch, tile_rows)
    layer, x = h.random_layer(gen, EXPERTS, HIDDEN, 128, FP8_CHANNEL), h.random_tokens(gen, tokens, HIDDEN)
    call = x, *layer, *h.random_routing(gen, kind, tokens, TOPK, EXPERTS)
    expected, actual, _ = both(ops.fused_moe, *call, weights=FP8_CHANNEL)
    assert h.relative_l2(actual, expected) <= (SMALL_BATCH_ERROR if tile_rows is None else MOST_ERROR)


@pytest.mark.parametrize(("tokens", "tile_rows"), [(3, PACKED_TILE_ROWS[0]), (40, PACKED_TILE_ROWS[1])])
@pytest.mark.parametrize("span", [SPAN, 30])
def test_packed_weights(
    gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, tokens: int, tile_rows: int, span: int
) -> None:
    """Of a span that block FP8 represents, the bits of the same weights in block FP8."""
    force_step(monkeypatch, tile_rows)
    experts, x = random_experts(gen, 3, HIDDEN, 128, span), h.random_tokens(gen, tokens, HIDDEN)
    routing = h.random_routing(gen, "some_missing", tokens, 2, 3)
    expected, actual, _ = both(ops.fused_moe, x, *experts.packed(), *routing, weights=PACKED_MXFP4)
    assert h.relative_l2(actual, expected) <= MOST_ERROR
    if span == SPAN:
        force_step(monkeypatch, FEW_ROWS)
        _, in_fp8, _ = both(ops.fused_moe, x, *experts.in_fp8(), *routing)
        assert h.same_bits(actual, in_fp8)


def test_packed_weights_with_biases(gen: torch.Generator) -> None:
    layer, x = random_experts(gen, 3, HIDDEN, 128, SPAN).packed(), h.random_tokens(gen, 2, HIDDEN)
    biases = h.random_biases(gen, 3, HIDDEN, 128)
    call = x, *layer, *h.random_routing(gen, "distinct", 2, 2, 3)
    expected, actual, device = both(ops.fused_moe, *call, **biases, weights=PACKED_MXFP4)
    assert h.relative_l2(actual, expected) <= MOST_ERROR
    assert sources(device) == ["quantize_route", "packed_gate_up", "packed_gemm", "combine"]


@pytest.mark.parametrize(("tokens", "tile_rows"), [(3, None), (20, FEW_ROWS), (20, MORE_ROWS)])
def test_biases_are_added_once(
    gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, tokens: int, tile_rows: int | None
) -> None:
    force_step(monkeypatch, tile_rows)
    layer, x = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE), h.random_tokens(gen, tokens, HIDDEN)
    biases = h.random_biases(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    call = x, *layer, *h.random_routing(gen, "some_missing", tokens, TOPK, EXPERTS)
    expected, actual, _ = both(ops.fused_moe, *call, **biases)
    assert h.relative_l2(actual, expected) <= (SMALL_BATCH_ERROR if tile_rows is None else MOST_ERROR)


@pytest.mark.parametrize(("tokens", "tile_rows"), [(2, None), (50, FEW_ROWS)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_experts_of_a_rank_are_found_by_the_map(
    gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tokens: int, tile_rows: int | None
) -> None:
    force_step(monkeypatch, tile_rows)
    layer, x = h.random_layer(gen, 3, HIDDEN, 128), h.random_tokens(gen, tokens, HIDDEN)
    weights, ids = h.random_routing(gen, "out_of_range", tokens, TOPK, EXPERTS)
    expert_map = torch.tensor([-1, 2, -1, 0, 1, 7], dtype=torch.int32)
    wide = ids.to(dtype)
    wide[0, 0] += 2 ** (32 if dtype == torch.int64 else 30)  # its low half is an expert
    expected, actual, _ = both(ops.fused_moe, x, *layer, weights, wide, expert_map=expert_map)
    assert h.relative_l2(actual, expected) <= (SMALL_BATCH_ERROR if tile_rows is None else MOST_ERROR)


@pytest.mark.parametrize(
    ("tokens", "topk", "tile_rows"), [(5, 2, FEW_ROWS), (60, 3, FEW_ROWS), (3, 0, FEW_ROWS), (1, 0, None), (2, 2, None)]
)
def test_a_shared_expert_and_a_scale_of_the_routed_ones(
    gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, tokens: int, topk: int, tile_rows: int | None
) -> None:
    force_step(monkeypatch, tile_rows)
    layer, x = h.random_layer(gen, EXPERTS + 1, HIDDEN, 128), h.random_tokens(gen, tokens, HIDDEN)
    weights, ids = h.random_routing(gen, "out_of_range", tokens, topk, EXPERTS)
    call = x, *layer, weights, ids.long()
    expected, actual, _ = both(ops.fused_moe, *call, shared_expert=True, routed_scale=2.5)
    assert h.relative_l2(actual, expected) <= (SMALL_BATCH_ERROR if tile_rows is None else MOST_ERROR)


@pytest.mark.parametrize(("tokens", "tile_rows"), [(60, FEW_ROWS), (2, None)])
def test_a_shared_expert_with_a_column_of_weights(
    gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, tokens: int, tile_rows: int | None
) -> None:
    force_step(monkeypatch, tile_rows)
    layer, x = h.random_layer(gen, EXPERTS + 1, HIDDEN, 128), h.random_tokens(gen, tokens, HIDDEN)
    weights, ids = h.random_routing(gen, "distinct", tokens, TOPK, EXPERTS)
    columns = torch.cat([weights, torch.rand(tokens, 1, generator=gen)], 1)
    expected, actual, _ = both(ops.fused_moe, x, *layer, columns, ids, shared_expert=True)
    assert h.relative_l2(actual, expected) <= (SMALL_BATCH_ERROR if tile_rows is None else MOST_ERROR)


@pytest.mark.parametrize("tokens", [3, 60])
def test_tokens_that_arrive_quantized_give_the_same_bits(
    gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    layer, x = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE), h.random_tokens(gen, tokens, HIDDEN)
    routing = h.random_routing(gen, "some_missing", tokens, TOPK, EXPERTS)
    q, scales = ops.per_token_group_quant_fp8(x)
    _, actual, device = both(ops.fused_moe, q, *layer, *routing, hidden_scale=scales.contiguous())
    assert not any("small_batch" in source for source in sources(device))
    force_step(monkeypatch, next(run.args.block_m for run in device.launched if hasattr(run.args, "block_m")))
    _, expected, _ = both(ops.fused_moe, x, *layer, *routing)
    assert h.same_bits(actual, expected)


def test_a_long_step_is_routed_in_chunks_of_several_parts(
    gen: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two chunks at most, each has two parts of 128 pairs, and the second has no pair in its last one."""
    monkeypatch.setattr(catalog, "MAX_CHUNKS", 2)
    force_step(monkeypatch, MORE_ROWS)
    layer, x = h.random_layer(gen, EXPERTS, 128, 128), h.random_tokens(gen, 120, 128)
    call = x, *layer, *h.random_routing(gen, "some_missing", 120, TOPK, EXPERTS)
    expected, actual, device = both(ops.fused_moe, *call)
    assert h.relative_l2(actual, expected) <= MOST_ERROR
    route = next(launch for launch in device.launched if launch.key.source == "triton_route")
    assert (route.grid, route.args.parts) == (2, 2)


@pytest.mark.parametrize(
    ("expected_m", "weights"), [(4, FP8_BLOCK), (100, FP8_BLOCK), (4, FP8_CHANNEL), (100, PACKED_MXFP4)]
)
def test_batched_experts(gen: torch.Generator, expected_m: int, weights: WeightFormat) -> None:
    packed, max_m = weights is PACKED_MXFP4, 70
    sizes = 3, HIDDEN, INTERMEDIATE
    layer = random_experts(gen, *sizes, SPAN).packed() if packed else h.random_layer(gen, *sizes, weights)
    q, scales = h.random_quantized(gen, 3, max_m, HIDDEN)
    counts, outs = torch.tensor([70, 0, 17], dtype=torch.int32), []
    for serve in (False, True):
        out = h.poisoned(3, max_m, HIDDEN, dtype=torch.bfloat16, device=CPU)
        call = (q, scales, *layer, counts)
        with pytest.MonkeyPatch.context() as patch:
            if serve:
                h.serve(patch, Device())
            outs.append(ops.batched_experts(*call, expected_m=expected_m, weights=weights, out=out))
    for e, count in enumerate(counts.tolist()):
        assert h.untouched(outs[1][e, count:])
        assert count == 0 or h.relative_l2(outs[1][e, :count], outs[0][e, :count]) <= MOST_ERROR


# ---- GEMMs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(1, 40), (16, 136), (17, 264), (130, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("added", [False, True])
def test_dense_gemm(gen: torch.Generator, m: int, n: int, dtype: torch.dtype, added: bool) -> None:
    a, b = h.random_quantized(gen, m, HIDDEN), h.random_weights(gen, n, HIDDEN)
    c = torch.randn(m, n, generator=gen).to(dtype) if added else None
    outs = [h.poisoned(m, n, dtype=dtype, device=CPU) for _ in range(2)]
    ops.fp8_gemm_nt(a, b, outs[0], c)
    with pytest.MonkeyPatch.context() as patch:
        h.serve(patch, Device())
        ops.fp8_gemm_nt(a, b, outs[1], c)
    exact = h.product(a, b) + (0 if c is None else c.double())
    h.assert_rounded(outs[1], exact)
    assert h.relative_l2(outs[1], outs[0]) <= MOST_ERROR


def test_rows_of_a_gemm_may_have_scales_of_any_strides(gen: torch.Generator) -> None:
    (q, scales), b = h.random_quantized(gen, 24, HIDDEN), h.random_weights(gen, 128, HIDDEN)
    wide = torch.full((24, 6), float("nan"))
    wide[:, ::3] = scales
    outs = [torch.empty(24, 128).bfloat16() for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        h.serve(patch, Device())
        ops.fp8_gemm_nt((q, scales), b, outs[0])
        ops.fp8_gemm_nt((q, wide[:, ::3]), b, outs[1])
    assert h.same_bits(*outs)


def test_k_need_not_be_whole_blocks_and_rows_may_be_apart(gen: torch.Generator) -> None:
    a, b = h.random_quantized(gen, 24, HIDDEN), h.random_weights(gen, 128, HIDDEN)
    short = HIDDEN - 48
    cut = (a[0][:, :short], a[1]), (b[0][:, :short], b[1])
    expected, actual, _ = both(ops.fp8_gemm_nt, *cut, torch.empty(24, 128).bfloat16())
    assert h.relative_l2(actual, expected) <= MOST_ERROR
    indices = torch.arange(24, dtype=torch.int32) // 8 - 1
    groups = (torch.stack([cut[1][0]] * 2), torch.stack([b[1]] * 2))
    expected, actual, _ = both(
        ops.m_grouped_fp8_gemm_nt_contiguous, cut[0], groups, torch.empty(24, 128).bfloat16(), indices
    )
    assert h.relative_l2(actual, expected) <= MOST_ERROR


def test_what_has_no_triton_kernel_is_refused_by_name(gen: torch.Generator) -> None:
    a, b = h.random_quantized(gen, 8, HIDDEN), h.random_weights(gen, 1, 128, HIDDEN)
    ends = torch.tensor([8], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        h.serve(patch, Device())
        with pytest.raises(UnsupportedError, match=r"gemm_nt_psum has no Triton kernel.*Unset FP8MOE_BACKEND"):
            ops.m_grouped_fp8_gemm_nt_psum(a, b, torch.empty(8, 128).bfloat16(), ends, 8)
        with pytest.raises(UnsupportedError, match=r"This op.* has no Triton kernel"):
            ops.get_paged_mqa_logits_metadata(torch.ones(1, 1, dtype=torch.int32), 64, 132)


@pytest.mark.parametrize("weights", [FP8_BLOCK, FP8_CHANNEL], ids=lambda weights: weights.name)
def test_linear(gen: torch.Generator, weights: WeightFormat) -> None:
    x, weight = h.random_tokens(gen, 3, 4, HIDDEN), h.random_weights(gen, 72, HIDDEN, weights=weights)
    bias = torch.randn(72).bfloat16()
    expected, actual, device = both(ops.fp8_linear, x, *weight, bias, ue8m0=True)
    assert h.relative_l2(actual, expected) <= 2**-8  # this result is rounded before the bias is added, too
    assert sources(device) == ["quantize", "gemm"]


@pytest.mark.parametrize("indices", [[0] * 70 + [-1] * 3 + [2] * 5 + [9] + [1] * 64 + [0] * 2, [-1, -1], [1]])
def test_contiguous_grouped_gemm(gen: torch.Generator, indices: list[int]) -> None:
    m, m_indices = len(indices), torch.tensor(indices, dtype=torch.int32)
    a, b = h.random_quantized(gen, m, HIDDEN), h.random_weights(gen, 3, 136, HIDDEN)
    outs = [h.poisoned(m, 136, dtype=torch.bfloat16, device=CPU) for _ in range(2)]
    ops.m_grouped_fp8_gemm_nt_contiguous(a, b, outs[0], m_indices)
    with pytest.MonkeyPatch.context() as patch:
        h.serve(patch, Device())
        ops.m_grouped_fp8_gemm_nt_contiguous(a, b, outs[1], m_indices)
    written = (m_indices >= 0) & (m_indices < 3)
    assert (outs[1][~written] == 0).all()
    assert not written.any() or h.relative_l2(outs[1][written], outs[0][written]) <= MOST_ERROR


@pytest.mark.parametrize("expected_m", [3, 90])
def test_masked_grouped_gemm(gen: torch.Generator, expected_m: int) -> None:
    a, b = h.random_quantized(gen, 3, 80, HIDDEN), h.random_weights(gen, 3, 136, HIDDEN)
    masked_m, outs = torch.tensor([80, 0, 9], dtype=torch.int32), []
    for serve in (False, True):
        out = h.poisoned(3, 80, 136, dtype=torch.bfloat16, device=CPU)
        with pytest.MonkeyPatch.context() as patch:
            if serve:
                h.serve(patch, Device())
            outs.append(ops.m_grouped_fp8_gemm_nt_masked(a, b, out, masked_m, expected_m))
    for g, count in enumerate(masked_m.tolist()):
        assert h.untouched(outs[1][g, count:])
        assert count == 0 or h.relative_l2(outs[1][g, :count], outs[0][g, :count]) <= MOST_ERROR


# ---- quantization --------------------------------------------------------------------------------------------------


def codes(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.uint8)


def cuda_and_triton(op: Callable[..., h.Quantized], *args: Any, **options: Any) -> tuple[h.Quantized, h.Quantized]:
    """Returns what the CUDA kernels return, in the emulator, and what the Triton kernels do, interpreted."""
    emulator = Emulator(emulator_runtime(), EmulatedKernels(), multiprocessors=4)
    return emulator.execute(0, lambda: op(*args, **options)), both(op, *args, **options)[1]


@pytest.mark.parametrize("ue8m0", [False, True])
def test_quantize_equals_the_reference_bit_by_bit(gen: torch.Generator, ue8m0: bool) -> None:
    x = h.random_tokens(gen, 21, 384) * torch.exp2(torch.randint(-20, 9, (21, 1), generator=gen))
    x[3, 130], x[4, :128], x[5, 7] = float("nan"), 0, 3e38
    expected, actual, _ = both(ops.per_token_group_quant_fp8, x.bfloat16(), ue8m0=ue8m0)
    spoilt = expected[1].isnan()
    assert int(spoilt.sum()) == int(not ue8m0)  # the exponent of NaN has no room to be rounded up
    assert torch.equal(actual[1].isnan(), spoilt)
    assert torch.equal(actual[1].nan_to_num(), expected[1].nan_to_num())
    number = ~actual[0].isnan()
    assert (~number).sum() == 128  # all codes of the group with NaN
    assert torch.equal(codes(actual[0])[number] & 0x7F, codes(expected[0])[number] & 0x7F)
    number &= expected[0].float() != 0
    assert torch.equal(codes(actual[0])[number], codes(expected[0])[number])


def test_tokens_for_an_all_to_all_have_contiguous_scales(gen: torch.Generator) -> None:
    expected, actual, _ = both(quantize_tokens, h.random_tokens(gen, 21, 384), False)
    h.assert_same_numbers(actual, expected)


@pytest.mark.skipif(not can_compile(), reason="the emulator needs an x86-64 with a g++ that knows C++20")
@pytest.mark.parametrize("ue8m0", [False, True])
def test_quantize_has_the_bits_of_the_cuda_kernel(gen: torch.Generator, ue8m0: bool) -> None:
    """Also where these differ from the reference: for zeros, which lose their sign, and rows with infinity."""
    x = h.random_tokens(gen, 24, 256) * torch.exp2(torch.randint(-126, 9, (24, 256), generator=gen))
    x[:, ::7] = -0.0
    x[0], x[1, 3], x[2, 130], x[3, 9], x[4, 200] = -0.0, float("nan"), float("inf"), -float("inf"), 3e38
    expected, actual = cuda_and_triton(ops.per_token_group_quant_fp8, x.bfloat16(), ue8m0=ue8m0)
    assert expected[0].isnan().sum() == 3 * 128
    h.assert_same_numbers(actual, expected)


@pytest.mark.skipif(not can_compile(), reason="the emulator needs an x86-64 with a g++ that knows C++20")
@pytest.mark.parametrize(
    ("activation", "ue8m0"), [(SILU, False), (SILU, True), *((activation, False) for activation in h.MODIFIED)]
)
def test_silu_mul_quant_matches_cuda_for_extreme_gates(
    gen: torch.Generator, activation: Activation, ue8m0: bool
) -> None:
    """Below -87.3, 1 / (1 + e^-x) is no normal number; whether it is zero decides the sign of a code."""
    gate = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).view(1, 512, 128)
    gate = gate[:, (gate[0].abs() >= 64).all(-1)]
    gate_up = torch.cat([gate, h.random_tokens(gen, *gate.shape).bfloat16()], -1)
    counts = torch.tensor([gate.shape[1]], dtype=torch.int32)
    expected, actual = cuda_and_triton(ops.silu_mul_quant_fp8, gate_up, counts, ue8m0, activation)
    h.assert_same_numbers(actual, expected)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_silu_mul_quant_of_counted_rows(gen: torch.Generator, ue8m0: bool) -> None:
    gate_up, counts = h.random_tokens(gen, 2, 11, 512), torch.tensor([11, 2], dtype=torch.int32)
    (expected_q, expected_scales), (q, scales), _ = both(ops.silu_mul_quant_fp8, gate_up, counts, ue8m0)
    for g, count in enumerate(counts.tolist()):
        assert torch.equal(scales[g, :count], expected_scales[g, :count])
        assert torch.equal(codes(q)[g, :count], codes(expected_q)[g, :count])
        assert h.untouched(q[g, count:])


def test_interpreting_leaves_the_compiler_as_it_was(gen: torch.Generator) -> None:
    key = catalog.quantize_key("sm_89", ue8m0=False)
    before = compile_kernel(key).cubin
    both(ops.per_token_group_quant_fp8, h.random_tokens(gen, 4, 256))
    assert compile_kernel(key).cubin == before
