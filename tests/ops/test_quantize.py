import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.ops import per_token_group_quant_fp8, reference
from fp8moe_plugin.ops.quantize import quantize_tokens
from fp8moe_plugin.plan.tuning import QUANTIZE_FEW_TOKENS
from tests import helpers as h
from tests.steps import quantize_rows

widths = st.sampled_from((128, 256, 640, 2048))


@given(rows=h.row_counts, k=widths, ue8m0=st.booleans(), seed=h.seeds)
def test_each_value_is_the_nearest_code_under_the_tightest_scale(device, rows, k, ue8m0, seed):
    x = h.random_tokens(h.seeded(seed, device), rows, k)
    h.assert_quantized(per_token_group_quant_fp8(x, ue8m0=ue8m0), x, ue8m0)


@given(rows=h.row_counts, ue8m0=st.booleans(), seed=h.seeds)
def test_the_codes_are_those_of_the_reference(device, rows, ue8m0, seed):
    x = h.random_tokens(h.seeded(seed, device), rows, 640)
    q, scales = per_token_group_quant_fp8(x, ue8m0=ue8m0)
    expected_q, expected_scales = reference.quantize(x.cpu(), ue8m0)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=1e-6, atol=0)
    actual, expected = h.dequantize_tokens(q, scales).cpu(), h.dequantize_tokens(expected_q, expected_scales)
    assert h.relative_l2(actual, expected) <= 2e-3


def test_few_tokens_have_the_bits_that_they_have_among_many(device):
    x = h.random_tokens(h.seeded(0, device), QUANTIZE_FEW_TOKENS + 5, 640)
    few, many = per_token_group_quant_fp8(x[:QUANTIZE_FEW_TOKENS]), per_token_group_quant_fp8(x)
    for own, other in zip(few, many, strict=True):
        assert h.same_bits(own.contiguous(), other[:QUANTIZE_FEW_TOKENS].contiguous())


@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_tokens_for_an_all_to_all_have_the_same_bits(device, tokens, ue8m0):
    x = h.random_tokens(h.seeded(0, device), tokens, 640)
    q, scales = quantize_tokens(x, ue8m0)
    assert scales.is_contiguous()
    h.assert_same_numbers((q, scales), per_token_group_quant_fp8(x, ue8m0=ue8m0))


def test_quantizing_dequantized_tokens_changes_nothing(device):
    q, scales = per_token_group_quant_fp8(h.random_tokens(h.seeded(0, device), 64, 640))
    again = per_token_group_quant_fp8(reference.dequantize_rows(q, scales).bfloat16())
    h.assert_same_numbers(again, (q, scales))


@given(seed=h.seeds, place=st.integers(0, 255))
def test_an_outlier_is_kept_and_coarsens_only_its_own_group(device, seed, place):
    x = h.random_tokens(h.seeded(seed, device), 5, 256)
    loud = x.clone()
    loud[2, place] = 1e4
    q, scales = per_token_group_quant_fp8(x)
    loud_q, loud_scales = per_token_group_quant_fp8(loud)
    h.assert_quantized((loud_q, loud_scales), loud)
    own = torch.zeros(5, 2, dtype=torch.bool, device=device)
    own[2, place // 128] = True
    assert torch.equal((loud_scales != scales), own)
    elsewhere = ~own.repeat_interleave(128, -1)
    assert torch.equal(h.bits(loud_q)[elsewhere], h.bits(q)[elsewhere])


@pytest.mark.parametrize("ue8m0", [False, True])
def test_zero_rows_become_exact_zeros_with_finite_scales(device, ue8m0):
    x = h.random_tokens(h.seeded(0, device), 9, 256)
    x[4] = 0
    q, scales = per_token_group_quant_fp8(x, ue8m0=ue8m0)
    assert (q[4].float() == 0).all()
    assert scales[4].isfinite().all()
    assert (scales[4] > 0).all()


@pytest.mark.parametrize("ue8m0", [False, True])
def test_nan_stays_in_its_group(device, ue8m0):
    x = h.random_tokens(h.seeded(0, device), 9, 256)
    broken = x.clone()
    broken[4, 130] = float("nan")
    q, scales = per_token_group_quant_fp8(x, ue8m0=ue8m0)
    broken_q, broken_scales = per_token_group_quant_fp8(broken, ue8m0=ue8m0)
    others = torch.arange(9, device=device) != 4
    assert torch.equal(h.bits(broken_q)[others], h.bits(q)[others])
    assert h.same_bits(broken_scales[others], scales[others])
    assert h.same_bits(broken_q[4, :128], q[4, :128])
    assert h.dequantize_tokens(broken_q, broken_scales)[4, 130].isnan()


@pytest.mark.parametrize("shape", [(0, 3, 128), (2, 3, 256), (2, 1, 3, 128), (384,)])
def test_leading_dimensions_are_kept(device, shape):
    x = h.random_tokens(h.seeded(0, device), *shape)
    h.assert_quantized(per_token_group_quant_fp8(x), x)


@given(tokens=h.row_counts, topk=st.integers(1, 8), ue8m0=st.booleans(), seed=h.seeds)
def test_quantize_writes_only_the_rows_of_each_token(device, tokens, topk, ue8m0, seed):
    gen = h.seeded(seed, device)
    x = h.random_tokens(gen, tokens, 256)
    slots = torch.randperm(tokens * topk, generator=gen, device=device).view(tokens, topk)
    slots = torch.where(slots % 3 == 0, -1, slots).int()
    q, scales = quantize_rows(x, slots, ue8m0)
    token_q, token_scales = per_token_group_quant_fp8(x, ue8m0=ue8m0)
    for j in range(topk):
        here = slots[:, j] >= 0
        rows = slots[here, j].long()
        assert torch.equal(h.bits(q)[rows], h.bits(token_q)[here])
        assert h.same_bits(scales[rows], token_scales[here])
    unnamed = torch.ones(tokens * topk, dtype=torch.bool, device=device)
    unnamed[slots[slots >= 0].long()] = False
    assert (h.bits(q)[unnamed] == -1).all()
    assert h.untouched(scales[unnamed])
