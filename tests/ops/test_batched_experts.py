import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.ops import batched_experts, m_grouped_fp8_gemm_nt_masked, silu_mul_quant_fp8
from tests import helpers as h

HIDDEN, INTERMEDIATE = 384, 256


def random_call(gen: torch.Generator, counts: list[int], max_m: int) -> tuple[torch.Tensor, ...]:
    layer = h.random_layer(gen, len(counts), HIDDEN, INTERMEDIATE)
    tokens = h.random_quantized(gen, len(counts), max_m, HIDDEN)
    return *tokens, *layer, torch.tensor(counts, dtype=torch.int32, device=gen.device)


def run(*call: torch.Tensor, expected_m: int = 16) -> torch.Tensor:
    out = h.poisoned(*call[0].shape, dtype=torch.bfloat16, device=call[0].device)
    assert batched_experts(*call, expected_m=expected_m, out=out) is out
    return out


def rows_that_count(counts: torch.Tensor, max_m: int) -> torch.Tensor:
    return torch.arange(max_m, device=counts.device) < counts[:, None]


@given(counts=st.lists(h.row_counts, min_size=1, max_size=4), expected_m=st.sampled_from((16, 200)), seed=h.seeds)
def test_counted_rows_are_accurate_and_others_unwritten(device, counts, expected_m, seed):
    max_m = max(counts) + 1
    call = random_call(h.seeded(seed, device), counts, max_m)
    q, scales, *layer, masked_m = call
    out = run(*call, expected_m=expected_m)
    here = rows_that_count(masked_m, max_m)
    gate_up = h.product((q, scales), layer[:2])
    expected = h.swiglu(gate_up) @ h.dequantize_weights(*layer[2:]).mT
    assert h.untouched(out[~here])
    if here.sum() >= 32:  # with fewer tokens, the error of e4m3 alone may exceed the bound
        assert h.relative_l2(out[here], expected[here]) <= 0.05


def test_the_experts_point_where_unquantized_math_does(device):
    call = random_call(h.seeded(0, device), [200, 129], 200)
    q, scales, *layer, masked_m = call
    here = rows_that_count(masked_m, 200)
    gate_up = h.product((q, scales), layer[:2])
    expected = h.swiglu(gate_up) @ h.dequantize_weights(*layer[2:]).mT
    assert h.cosine(run(*call)[here], expected[here]) >= 0.999


def test_each_stage_rounds_like_the_reference(device):
    counts = [129, 0, 64, 1]
    call = random_call(h.seeded(0, device), counts, 130)
    q, scales, w13, w13_scale, w2, w2_scale, masked_m = call
    here = rows_that_count(masked_m, 130)
    gate_up = torch.empty(4, 130, 2 * INTERMEDIATE, dtype=torch.bfloat16, device=device)
    m_grouped_fp8_gemm_nt_masked((q, scales), (w13, w13_scale), gate_up, masked_m, 16)
    h.assert_rounded(gate_up[here], h.product((q, scales), (w13, w13_scale))[here])
    mid = silu_mul_quant_fp8(gate_up, masked_m)
    h.assert_quantized((h.bits(mid[0])[here].view(h.FP8), mid[1][here]), h.swiglu(gate_up[here]), slack=h.SWIGLU_SLACK)
    down = torch.empty_like(q, dtype=torch.bfloat16)
    m_grouped_fp8_gemm_nt_masked(mid, (w2, w2_scale), down, masked_m, 16)
    h.assert_rounded(down[here], h.product(mid, (w2, w2_scale))[here])
    assert h.relative_l2(run(*call)[here], down[here]) <= 1e-2


@given(counts=st.lists(h.row_counts, min_size=1, max_size=4), seed=h.seeds)
def test_expected_m_does_not_change_the_result(device, counts, seed):
    max_m = max(*counts, 1)
    call = random_call(h.seeded(seed, device), counts, max_m)
    first, *others = (run(*call, expected_m=expected_m) for expected_m in (1, 16, max_m))
    assert all(h.same_bits(first, other) for other in others)


def test_counts_are_clamped_to_the_rows_there_are(device):
    *call, _ = random_call(h.seeded(0, device), [0, 0, 0], 65)
    wild = torch.tensor([-4, 65, 1000], dtype=torch.int32, device=device)
    assert h.same_bits(run(*call, wild), run(*call, wild.clamp(0, 65)))


@pytest.mark.parametrize("expected_m", [16, 200])
def test_rows_past_count_and_scale_layout_are_ignored(device, expected_m):
    q, scales, *rest = random_call(h.seeded(0, device), [3, 0, 64, 129], 130)
    clean = run(q, scales.contiguous(), *rest, expected_m=expected_m)
    assert h.same_bits(run(q, h.column_major(scales), *rest, expected_m=expected_m), clean)
    past = ~rows_that_count(rest[-1], 130)
    h.bits(q)[past] = -1
    scales[past] = float("nan")
    assert h.same_bits(run(q, scales, *rest, expected_m=expected_m), clean)


def test_nan_in_one_row_stays_in_that_row(device):
    q, *rest = random_call(h.seeded(0, device), [65, 130], 130)
    clean = run(q, *rest)
    h.bits(q)[1, 70, 5] = -1
    broken = run(q, *rest)
    assert broken[1, 70].isnan().all()
    broken[1, 70] = clean[1, 70]
    assert h.same_bits(broken, clean)


@pytest.mark.parametrize("max_m", [0, 5])
def test_no_token_anywhere(device, max_m):
    assert h.untouched(run(*random_call(h.seeded(0, device), [0, 0, 0], max_m)))


def test_two_runs_agree_bitwise(device):
    call = random_call(h.seeded(0, device), [3, 0, 64, 129], 130)
    assert h.same_bits(run(*call), run(*call))
