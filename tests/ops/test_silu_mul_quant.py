import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.formats.activation import SILU
from fp8moe_plugin.ops import reference, silu_mul_quant_fp8
from tests import helpers as h


def all_rows(gate_up: torch.Tensor) -> torch.Tensor:
    return torch.full((gate_up.shape[0],), gate_up.shape[1], dtype=torch.int32, device=gate_up.device)


@given(
    counts=st.lists(h.row_counts, min_size=1, max_size=4),
    width=st.sampled_from((128, 256, 768)),
    ue8m0=st.booleans(),
    seed=h.seeds,
)
def test_only_counted_rows_are_written(device, counts, width, ue8m0, seed):
    max_m = max(counts) + 1
    gate_up = h.random_tokens(h.seeded(seed, device), len(counts), max_m, 2 * width)
    q, scales = silu_mul_quant_fp8(gate_up, torch.tensor(counts, dtype=torch.int32, device=device), ue8m0)
    for g, count in enumerate(counts):
        h.assert_quantized((q[g, :count], scales[g, :count]), h.swiglu(gate_up[g, :count]), ue8m0, slack=h.SWIGLU_SLACK)
        assert h.untouched(q[g, count:])
        assert h.untouched(scales[g, count:])


@given(rows=h.row_counts, ue8m0=st.booleans(), seed=h.seeds)
def test_the_codes_are_those_of_the_reference(device, rows, ue8m0, seed):
    gate_up = h.random_tokens(h.seeded(seed, device), 1, rows, 1024)
    actual = h.dequantize_tokens(*silu_mul_quant_fp8(gate_up, all_rows(gate_up), ue8m0))
    expected = h.dequantize_tokens(*reference.silu_mul_quant(gate_up.cpu(), ue8m0))
    assert h.relative_l2(actual.cpu(), expected) <= 2e-3


def test_zero_rows_become_exact_zeros_with_finite_scales(device):
    gate_up = h.random_tokens(h.seeded(0, device), 1, 3, 512)
    gate_up[0, 1] = 0
    q, scales = silu_mul_quant_fp8(gate_up, all_rows(gate_up))
    assert (q[0, 1].float() == 0).all()
    assert (scales[0, 1].isfinite() & (scales[0, 1] > 0)).all()


def test_large_gates_of_both_signs_stay_finite(device):
    gate_up = h.random_tokens(h.seeded(0, device), 1, 2, 512)
    gate_up[0, 0, :256], gate_up[0, 1, :256] = 1e4, -1e4
    h.assert_quantized(silu_mul_quant_fp8(gate_up, all_rows(gate_up)), h.swiglu(gate_up), slack=h.SWIGLU_SLACK)


@pytest.mark.parametrize("activation", h.MODIFIED, ids=lambda activation: activation.kind)
def test_a_modified_swiglu_is_that_of_float64(device, activation):
    gate_up = h.random_tokens(h.seeded(0, device), 1, 40, 512)
    expected = h.swiglu(gate_up, activation)
    h.assert_quantized(
        silu_mul_quant_fp8(gate_up, all_rows(gate_up), False, activation), expected, slack=h.MODIFIED_SLACK
    )
    sums = reference.activated(*gate_up.float().chunk(2, -1), activation).double()
    assert ((sums - expected).abs() <= h.MODIFIED_SLACK * expected.abs()).all()
    for change in ({"limit": 1e9}, {"alpha": 1.0}, {"beta": 0.0}):  # limit, alpha and beta matter
        other = h.swiglu(gate_up, changed := activation._replace(**change))
        assert changed == activation or (other != expected).float().mean() > 0.2


@pytest.mark.parametrize("activation", [SILU, *h.MODIFIED], ids=str)
@pytest.mark.parametrize("column", [44, 300])  # of the gate, and of up
def test_nan_stays_in_its_row(device, activation, column):
    gate_up = h.random_tokens(h.seeded(0, device), 1, 5, 512)
    broken = gate_up.clone()
    broken[0, 2, column] = float("nan")
    q, scales = silu_mul_quant_fp8(gate_up, all_rows(gate_up), False, activation)
    broken_q, broken_scales = silu_mul_quant_fp8(broken, all_rows(gate_up), False, activation)
    for row in (0, 1, 3, 4):
        assert h.same_bits(broken_q[0, row], q[0, row])
        assert h.same_bits(broken_scales[0, row], scales[0, row])
    assert h.dequantize_tokens(broken_q, broken_scales)[0, 2, 44].isnan()
