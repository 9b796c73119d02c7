import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.ops import fp8_gemm_nt
from fp8moe_plugin.plan.sm90.catalog import dense_gemm_key, grouped_gemm_key
from fp8moe_plugin.plan.sm90.dense import plan_dense
from fp8moe_plugin.plan.spec import Output
from tests import helpers as h

dtypes = st.sampled_from((torch.bfloat16, torch.float32))


def gemm(a: h.Quantized, b: h.Quantized, dtype=torch.bfloat16, c=None) -> torch.Tensor:
    out = h.poisoned(a[0].shape[0], b[0].shape[0], dtype=dtype, device=a[0].device)
    assert fp8_gemm_nt(a, b, out, c) is out
    return out


@given(
    rows=h.row_counts,
    n=st.sampled_from((8, 64, 128, 136, 256, 576)),
    k=st.sampled_from((128, 256, 640)),
    dtype=dtypes,
    add=st.booleans(),
    seed=h.seeds,
)
def test_the_product_is_that_of_the_dequantized_operands(device, rows, n, k, dtype, add, seed):
    gen = h.seeded(seed, device)
    a, b = h.random_quantized(gen, rows, k), h.random_weights(gen, n, k)
    c = h.random_tokens(gen, rows, n).to(dtype) if add else None
    expected = h.product(a, b)
    h.assert_rounded(gemm(a, b, dtype, c), expected if c is None else expected + c.double())


def test_widths_that_end_inside_a_block(device):
    gen = h.seeded(0, device)
    a, b = h.random_quantized(gen, 129, 512), h.random_weights(gen, 2112, 512)
    h.assert_rounded(gemm(a, b), h.product(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(300, 4096, 7168), (1025, 2112, 7168), (64, 7168, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_model_shapes(shape, dtype):
    m, n, k = shape
    gen = torch.Generator("cuda").manual_seed(0)
    a, b = h.random_quantized(gen, m, k), h.random_weights(gen, n, k)
    h.assert_rounded(gemm(a, b, dtype), h.product(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tails_in_tiles_of_both_widths(dtype, add):
    gen, keys = torch.Generator("cuda").manual_seed(0), set()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    output = Output.F32_DIRECT if dtype == torch.float32 else Output.BF16_DIRECT if add else Output.BF16
    for n in (136, 24576):
        b = h.random_weights(gen, n, 384)
        for rows in (386, 400, 401, 432, 433):
            a = h.random_quantized(gen, rows, 384)
            c = h.random_tokens(gen, rows, n).to(dtype) if add else None
            expected = h.product(a, b)
            h.assert_rounded(gemm(a, b, dtype, c), expected if c is None else expected + c.double())
            keys.add(plan_dense(rows, n, 384, output, sms).kernel)
    first = dense_gemm_key(64) if output == Output.BF16 else grouped_gemm_key(output, 128)
    assert keys == {first, grouped_gemm_key(output, 256)}


@given(rows=h.row_counts, n=st.sampled_from((64, 576)), seed=h.seeds)
def test_the_layout_of_the_scales_does_not_matter(device, rows, n, seed):
    gen = h.seeded(seed, device)
    (q, scales), b = h.random_quantized(gen, rows, 640), h.random_weights(gen, n, 640)
    padded = torch.nn.functional.pad(scales, (1, 2))[:, 1:-2]
    layouts = (scales.contiguous(), h.column_major(scales), padded)
    first, *others = (gemm((q, layout), b) for layout in layouts)
    assert all(h.same_bits(first, other) for other in others)


@given(rows=st.sampled_from((1, 65, 129)), dtype=dtypes, seed=h.seeds)
def test_a_row_depends_on_no_other_row(device, rows, dtype, seed):
    gen = h.seeded(seed, device)
    (q, scales), b = h.random_quantized(gen, rows, 384), h.random_weights(gen, 136, 384)
    other_q, other_scales = h.random_quantized(gen, rows, 384)
    row = seed % rows
    h.bits(other_q)[row] = h.bits(q)[row]
    other_scales[row] = scales[row]
    assert h.same_bits(gemm((other_q, other_scales), b, dtype)[row], gemm((q, scales), b, dtype)[row])


@pytest.mark.parametrize("where", ["values", "scales"])
def test_nan_in_one_row_stays_in_that_row(device, where):
    gen = h.seeded(0, device)
    (q, scales), b = h.random_quantized(gen, 65, 256), h.random_weights(gen, 136, 256)
    clean = gemm((q, scales), b)
    if where == "values":
        h.bits(q)[30, 7] = -1
    else:
        scales[30, 1] = float("nan")
    broken = gemm((q, scales), b)
    others = torch.arange(65, device=device) != 30
    assert broken[30].isnan().all()
    assert h.same_bits(broken[others], clean[others])


def test_outliers_keep_every_row_accurate(device):
    gen = h.seeded(0, device)
    x = h.random_tokens(gen, 65, 512)
    x[::3, ::50] *= 1e4
    a, b = h.per_token_group_quant_fp8(x), h.random_weights(gen, 256, 512)
    h.assert_rounded(gemm(a, b), h.product(a, b))


def test_zero_rows_give_exact_zeros(device):
    gen = h.seeded(0, device)
    x = h.random_tokens(gen, 65, 256)
    x[64] = 0
    assert (gemm(h.per_token_group_quant_fp8(x), h.random_weights(gen, 136, 256))[64] == 0).all()


def test_two_runs_agree_bitwise(device):
    gen = h.seeded(0, device)
    a, b = h.random_quantized(gen, 200, 640), h.random_weights(gen, 576, 640)
    assert h.same_bits(gemm(a, b), gemm(a, b))
