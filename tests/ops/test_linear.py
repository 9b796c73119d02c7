import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.ops import fp8_linear, reference
from fp8moe_plugin.plan.tuning import LONG_K
from tests import helpers as h


@given(
    rows=h.row_counts,
    n=st.sampled_from((64, 136, 576)),
    ue8m0=st.booleans(),
    seed=h.seeds,
)
def test_it_is_the_product_of_the_quantized_tokens(device, rows, n, ue8m0, seed):
    gen = h.seeded(seed, device)
    x, weight = h.random_tokens(gen, rows, 384), h.random_weights(gen, n, 384)
    plain = fp8_linear(x, *weight, ue8m0=ue8m0)
    h.assert_rounded(plain, h.product(reference.quantize(x, ue8m0), weight))
    bias = h.random_tokens(gen, n)
    biased = fp8_linear(x, *weight, bias, ue8m0).double()
    assert (biased - plain.double() - bias.double()).abs().le(2**-7 * (plain.double().abs() + bias.abs())).all()


@given(rows=st.sampled_from((129, 200)), seed=h.seeds)
def test_it_is_close_to_the_unquantized_layer(device, rows, seed):
    gen = h.seeded(seed, device)
    x, weight = h.random_tokens(gen, rows, 640), h.random_weights(gen, 576, 640)
    expected = x.double() @ h.dequantize_weights(*weight).T
    actual = fp8_linear(x, *weight)
    assert h.cosine(actual, expected) >= 0.999
    assert h.relative_l2(actual, expected) <= 0.05


@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256), (2, 3, 256), (1, 256)])
def test_leading_dimensions_are_kept(device, shape):
    gen = h.seeded(0, device)
    x, weight = h.random_tokens(gen, *shape), h.random_weights(gen, 64, 256)
    out = fp8_linear(x, *weight)
    assert out.shape == (*shape[:-1], 64)
    assert h.same_bits(out.view(-1, 64), fp8_linear(x.view(-1, 256), *weight))


def test_zero_rows_give_exact_zeros_and_nan_stays_in_its_row(device):
    gen = h.seeded(0, device)
    x, weight = h.random_tokens(gen, 9, 256), h.random_weights(gen, 64, 256)
    x[3] = 0
    clean = fp8_linear(x, *weight)
    x[5, 200] = float("nan")
    broken = fp8_linear(x, *weight)
    others = torch.arange(9, device=device) != 5
    assert (clean[3] == 0).all()
    assert broken[5].isnan().all()
    assert h.same_bits(broken[others], clean[others])


@pytest.mark.parametrize("rows", [5, 32])
def test_more_columns_than_the_gpu_has_blocks_for(device, rows):
    gen = h.seeded(0, device)
    x, weight = h.random_tokens(gen, rows, 1664), h.random_weights(gen, 40008 if device.type == "cuda" else 4008, 1664)
    h.assert_rounded(fp8_linear(x, *weight), h.product(reference.quantize(x), weight))


@pytest.mark.parametrize("rows", [1, 20, 200, 3000])
@pytest.mark.parametrize(("n", "k"), [(72, 256), (1544, 384), (136, LONG_K)])
def test_a_scale_for_each_row(device, rows, n, k):
    gen = h.seeded(0, device)
    x, weight = h.random_tokens(gen, rows, k), h.random_weights(gen, n, k, weights=FP8_CHANNEL)
    h.assert_rounded(fp8_linear(x, *weight), h.product(reference.quantize(x), weight))
