"""DeepGEMM's names for the GEMMs: what they call, and in which layouts."""

import inspect

import pytest
import torch

from fp8moe_plugin import deep_gemm, ops
from tests import helpers as h
from tests.k_grouped import gradients
from tests.ops.test_layouts import operands, spread

M, N, K, GROUPS = 20, 264, 256, 3
RECIPES = [
    {},
    {"recipe": (1, 128, 128)},
    {"recipe_a": (1, 128), "recipe_b": (128, 128), "compiled_dims": "mnk", "disable_ue8m0_cast": True},
]


@pytest.fixture
def gen(device: torch.device) -> torch.Generator:
    return h.seeded(0, device)


def transposed(pair: h.Quantized) -> h.Quantized:
    return pair[0].mT, pair[1].mT


@pytest.mark.parametrize("options", RECIPES, ids=str)
@pytest.mark.parametrize("name", ["fp8_gemm", "fp8_fp4_gemm"])
def test_dense_gemms_of_every_order(gen, device, name, options):
    a, b = h.random_quantized(gen, M, K), h.random_weights(gen, N, K)
    expected = h.product(a, b)
    operands = {"nt": (a, b), "nn": (a, transposed(b)), "tn": (transposed(a), transposed(b)), "tt": (transposed(a), b)}
    for order, pair in operands.items():
        out = h.poisoned(M, N, dtype=torch.bfloat16, device=device)
        assert getattr(deep_gemm, f"{name}_{order}")(*pair, out, **options) is None
        h.assert_rounded(out, expected)


def test_an_addend(gen, device):
    a, b = h.random_quantized(gen, M, K), h.random_weights(gen, N, K)
    c = torch.randn(M, N, generator=gen, device=device)
    out = torch.empty_like(c)
    deep_gemm.fp8_gemm_nt(a, b, out, c=c)
    h.assert_rounded(out, h.product(a, b) + c.double())


@pytest.mark.parametrize("options", [{"recipe": (1, 1, 128)}, {"recipe_a": (1, 128), "recipe_b": (1, 128)}], ids=str)
def test_scales_of_rows_in_both_operands(gen, device, options):
    call = gradients(gen, M, N - 8, [K])
    a, b = ((values.view(-1, K), scales) for values, scales in (call.a, call.b))
    apart, in_place = h.poisoned(*call.c.shape, dtype=torch.float32, device=device), call.c.clone()
    for d, c in ((apart, call.c), (in_place, in_place)):
        assert deep_gemm.fp8_gemm_nt(a, b, d[0], c=c[0], **options) is None
        call.assert_right(d)


@pytest.mark.parametrize("where", ["apart", "in place"])
@pytest.mark.parametrize("layout", ["contiguous", "pitched"])
@pytest.mark.parametrize("k", [16, 144, 384, 576])
def test_gradients_of_any_k_and_layout(gen, device, k, layout, where):
    (x, x_scales), (y, y_scales) = (operands(gen, rows, k=k, weights=False) for rows in (70, 144))
    addend = torch.randn(70, 144, generator=gen, device=device)
    wide = h.poisoned(70, 160, dtype=torch.float32, device=device)
    d = wide[:, :144] if layout == "pitched" else torch.empty_like(addend)
    if layout == "pitched":
        x, y, x_scales = spread(x), spread(y), h.column_major(x_scales)
    c = addend
    if where == "in place":
        c = d.copy_(addend)
    deep_gemm.fp8_gemm_nt((x, x_scales), (y, y_scales), d, c=c, recipe=(1, 1, 128))
    rows = (v.double() * s.double().repeat_interleave(h.GROUP, -1)[:, :k] for v, s in ((x, x_scales), (y, y_scales)))
    product = torch.matmul(next(rows), next(rows).T)
    h.assert_rounded(d, product + addend.double())
    assert layout == "contiguous" or h.untouched(wide[:, 144:])


def test_a_gradient_of_no_tokens(gen, device):
    a, b = ((torch.empty(n, 0, dtype=h.FP8, device=device), torch.empty(n, 0, device=device)) for n in (M, 32))
    c, d = torch.randn(M, 32, generator=gen, device=device), h.poisoned(M, 32, dtype=torch.float32, device=device)
    deep_gemm.fp8_gemm_nt(a, b, d, c=c, recipe=(1, 1, 128))
    assert torch.equal(d, c)


@pytest.mark.parametrize("splits", [(64, 8, 24), (88, 0, 0), (0, 16, 8)], ids=str)
def test_a_gap_in_each_head_is_left_alone(gen, device, splits):
    left, mid, right = splits
    heads = N // (left + right)
    a, b = h.random_quantized(gen, M, K), h.random_weights(gen, N, K)
    out = h.poisoned(M, heads * sum(splits), dtype=torch.bfloat16, device=device)
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, out, splits)
    parts = out.view(M, heads, sum(splits))
    written = torch.cat([parts[..., :left], parts[..., left + mid :]], -1).flatten(1)
    h.assert_rounded(written, h.product(a, b))
    assert h.untouched(parts[..., left : left + mid].contiguous())


@pytest.mark.parametrize("options", RECIPES, ids=str)
def test_grouped_gemms(gen, device, options):
    a, b = h.random_quantized(gen, M, K), h.random_weights(gen, GROUPS, N, K)
    ids = torch.tensor([0] * 8 + [2] * 12, dtype=torch.int32, device=device)
    expected = ops.m_grouped_fp8_gemm_nt_contiguous(a, b, torch.empty(M, N, device=device).bfloat16(), ids)
    for name in ("fp8", "fp8_fp4"):
        for order, weights in (("nt", b), ("nn", transposed(b))):
            out = torch.zeros_like(expected)
            getattr(deep_gemm, f"m_grouped_{name}_gemm_{order}_contiguous")(a, weights, out, ids, **options)
            assert torch.equal(out, expected)


@pytest.mark.parametrize("hint", [None, 9, 200])
@pytest.mark.parametrize("order", ["nt", "nn"])
def test_groups_by_their_ends(gen, device, order, hint):
    """Of groups that begin at multiples of the alignment, which a caller may have set."""
    a, b = h.random_quantized(gen, 96, K), h.random_weights(gen, GROUPS, N, K)
    ends = torch.tensor([7, 32 + 32, 64 + 1], dtype=torch.int32, device=device)
    out = h.poisoned(96, N, dtype=torch.bfloat16, device=device)
    options = {"use_psum_layout": True, "ensure_zero_padding": False}
    if order == "nt":
        options["expected_m_for_psum_layout"] = hint
    deep_gemm.set_mk_alignment_for_contiguous_layout(32)
    try:
        call = getattr(deep_gemm, f"m_grouped_fp8_gemm_{order}_contiguous")
        call(a, transposed(b) if order == "nn" else b, out, ends, **options)
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(128)
    for group, end in enumerate(ends.tolist()):
        rows = slice(32 * group, end)
        h.assert_rounded(out[rows], h.product((a[0][rows], a[1][rows]), (b[0][group], b[1][group])))
        assert h.untouched(out[end : 32 * (group + 1)])


@pytest.mark.parametrize(
    "name", ["m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked"]
)
def test_counted_rows(gen, device, name):
    a, b = h.random_quantized(gen, GROUPS, M, K), h.random_weights(gen, GROUPS, N, K)
    counts = torch.tensor([3, 0, M], dtype=torch.int32, device=device)
    out = h.poisoned(GROUPS, M, N, dtype=torch.bfloat16, device=device)
    getattr(deep_gemm, name)(a, b, out, counts, 7)
    for group, count in enumerate(counts.tolist()):
        part = (a[0][group, :count], a[1][group, :count]), (b[0][group], b[1][group])
        h.assert_rounded(out[group, :count], h.product(*part))
        assert h.untouched(out[group, count:])


@pytest.mark.parametrize("layout", ["group by group", "token by token", "rows apart"])
@pytest.mark.parametrize("groups", [1, GROUPS])
@pytest.mark.parametrize("tokens", [0, 1, M + 1])
def test_a_batch_of_products(gen, device, tokens, groups, layout):
    """In the layout of vLLM's DeepSeek-V4, whose groups are outermost in memory, and in others."""
    (x, scales), b = h.random_quantized(gen, tokens, groups, K), h.random_weights(gen, groups, N, K)
    if layout == "group by group":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
        padded = torch.zeros(groups, K // h.GROUP, -(-tokens // 4) * 4, device=device)
        scales = padded[..., :tokens].permute(2, 0, 1).copy_(scales)
    wide = h.poisoned(tokens, groups, N + 8 * (layout == "rows apart"), dtype=torch.bfloat16, device=device)
    d = wide[..., :N]
    assert deep_gemm.fp8_einsum("bhr,hdr->bhd", (x, scales), b, d, recipe=(1, 128, 128)) is d
    for group in range(groups):
        h.assert_rounded(d[:, group], h.product((x[:, group], scales[:, group]), (b[0][group], b[1][group])))
    assert h.untouched(wide[..., N:].contiguous())


def test_every_name_is_there_once():
    assert sorted(set(deep_gemm.__all__)) == sorted(deep_gemm.__all__)
    assert all(hasattr(deep_gemm, name) for name in deep_gemm.__all__)
    for name in ("fp8_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata"):
        assert getattr(deep_gemm, name) is getattr(ops, name)


def test_the_older_name_of_the_paged_logits_has_no_dtype(monkeypatch):
    """DeepGEMM's `fp8_paged_mqa_logits` has `indices` where `fp8_fp4_paged_mqa_logits` has `logits_dtype`."""
    called = inspect.signature(ops.fp8_paged_mqa_logits)
    monkeypatch.setattr(ops, "fp8_paged_mqa_logits", lambda *args, **named: called.bind(*args, **named).arguments)
    given = deep_gemm.fp8_paged_mqa_logits("q", "kv", "weights", "lens", "table", "meta", 128, True, None)
    names = ("q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta")
    assert list(given.values()) == ["q", "kv", "weights", "lens", "table", "meta", 128, True, None]
    assert list(given) == [*names, "max_context_len", "clean_logits", "indices"]
