"""The GEMMs take every K that is a multiple of 16, and layouts with consecutive elements along K, and along N of D."""

from collections.abc import Callable

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.ops.operands import k_major, strided
from tests import helpers as h

TAILS = (16, 112, 144, 576, 2112)  # K: less than a block, and blocks with a rest
N = 264


def operands(gen: torch.Generator, *shape: int, k: int, weights: bool) -> h.Quantized:
    """Of any K: the first columns of wider ones."""
    wide = -(-k // h.GROUP) * h.GROUP
    q, scales = (h.random_weights if weights else h.random_quantized)(gen, *shape, wide)
    return h.bits(q)[..., :k].contiguous().view(h.FP8), scales


def spread(t: torch.Tensor, room: int = 48) -> torch.Tensor:
    """Returns the same values with rows further apart, and NaN between them."""
    wide = h.poisoned(*t.shape[:-1], t.shape[-1] + room, dtype=t.dtype, device=t.device)
    h.bits(wide)[..., : t.shape[-1]] = h.bits(t)
    return wide[..., : t.shape[-1]]


def product(a: h.Quantized, b: h.Quantized) -> torch.Tensor:
    """float64, of any K."""
    x = a[0].double() * a[1].double().repeat_interleave(h.GROUP, -1)[..., : a[0].shape[-1]]
    blocks = b[1].double().repeat_interleave(h.GROUP, -2).repeat_interleave(h.GROUP, -1)
    return x @ (b[0].double() * blocks[..., : b[0].shape[-2], : b[0].shape[-1]]).mT


def dense(a: h.Quantized, b: h.Quantized, out: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    return ops.fp8_gemm_nt(a, b, out, c)


@pytest.mark.parametrize("k", TAILS)
@pytest.mark.parametrize("m", [1, 9, 130])
def test_k_may_end_inside_a_block(device, m, k):
    gen = h.seeded(k, device)
    a, b = operands(gen, m, k=k, weights=False), operands(gen, N, k=k, weights=True)
    for dtype in (torch.bfloat16, torch.float32):
        h.assert_rounded(dense(a, b, h.poisoned(m, N, dtype=dtype, device=device)), product(a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_k_the_result_is_the_addend_or_zero(device, dtype):
    a = torch.empty(5, 0, dtype=h.FP8, device=device), torch.empty(5, 0, device=device)
    b = torch.empty(N, 0, dtype=h.FP8, device=device), torch.empty(3, 0, device=device)
    c = torch.randn(5, N, device=device).to(dtype)
    assert (dense(a, b, h.poisoned(5, N, dtype=dtype, device=device)) == 0).all()
    assert h.same_bits(dense(a, b, h.poisoned(5, N, dtype=dtype, device=device), c), c)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pitched": spread,
    "pitch of no 16 bytes": lambda t: spread(t, 4),
    "expanded": lambda t: t[:1].expand(t.shape),
    "one row": lambda t: spread(t)[3:4],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("which", ["a", "b"])
def test_rows_may_be_apart(device, which, layout):
    gen = h.seeded(0, device)
    (q, q_scales), (w, w_scales) = operands(gen, 70, k=400, weights=False), operands(gen, N, k=400, weights=True)
    if which == "a":
        q = layout(q)
        q_scales = q_scales[: len(q)]
    elif layout is LAYOUTS["one row"]:
        w, w_scales = spread(w)[3:11], w_scales[:1]
    else:
        w = layout(w)
    out = h.poisoned(len(q), len(w), dtype=torch.bfloat16, device=device)
    contiguous = (q.contiguous(), q_scales), (w.contiguous(), w_scales)
    assert h.same_bits(dense((q, q_scales), (w, w_scales), out), dense(*contiguous, torch.empty_like(out)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("add", ["nothing", "another", "itself"])
def test_rows_of_the_result_and_the_addend_may_be_apart(device, dtype, add):
    gen = h.seeded(0, device)
    a, b = operands(gen, 70, k=400, weights=False), operands(gen, N, k=400, weights=True)
    addend = torch.randn(70, N, generator=gen, device=device).to(dtype)
    out = h.poisoned(70, N + 24, dtype=dtype, device=device)
    inner = out[:, :N]
    if add == "itself":
        inner.copy_(addend)
    c = {"nothing": None, "another": spread(addend), "itself": inner}[add]
    expected = dense(a, b, torch.empty_like(addend), None if c is None else addend)
    assert dense(a, b, inner, c) is inner
    assert h.same_bits(inner, expected)
    assert h.untouched(out[:, N:])


def test_scales_of_weights_may_be_in_either_order(device):
    gen = h.seeded(0, device)
    a, (w, scales) = operands(gen, 70, k=400, weights=False), operands(gen, 3, N, k=400, weights=True)
    indices = torch.arange(3, dtype=torch.int32, device=device).repeat_interleave(torch.tensor([30, 0, 40]).to(device))
    out = torch.empty(2, 70, N, dtype=torch.bfloat16, device=device)
    for result, order in zip(out, (scales, h.column_major(scales)), strict=True):
        ops.m_grouped_fp8_gemm_nt_contiguous(a, (w, order), result, indices)
    assert h.same_bits(out[0], out[1])
    for result, order in zip(out, (scales[0], h.column_major(scales[0])), strict=True):
        dense(a, (w[0], order), result)
    assert h.same_bits(out[0], out[1])


@pytest.mark.parametrize("k", [144, 576])
def test_grouped_rows_of_any_k_and_distance(device, k):
    """By index, by count and by end, of rows and results that are apart."""
    gen = h.seeded(k, device)
    a, b = operands(gen, 3, 128, k=k, weights=False), operands(gen, 3, N, k=k, weights=True)
    counts = torch.tensor([100, 1, 70], dtype=torch.int32, device=device)
    here = torch.arange(128, device=device) < counts[:, None]
    flat = spread(a[0].flatten(0, 1)), a[1].flatten(0, 1)
    indices = torch.where(here, torch.arange(3, device=device)[:, None], -1).int().flatten()
    ends = torch.arange(0, 384, 128, dtype=torch.int32, device=device) + counts
    wide = [h.poisoned(3, 128, N + 8, dtype=torch.bfloat16, device=device) for _ in range(4)]
    by_index, by_count, by_few, by_end = (t[..., :N] for t in wide)
    ops.m_grouped_fp8_gemm_nt_contiguous(flat, b, by_index.flatten(0, 1), indices)
    ops.m_grouped_fp8_gemm_nt_masked((spread(a[0]), a[1]), b, by_count, counts, 128)
    ops.m_grouped_fp8_gemm_nt_masked((spread(a[0]), a[1]), b, by_few, counts, 16)
    ops.m_grouped_fp8_gemm_nt_psum(flat, b, by_end.flatten(0, 1), ends, 128)
    for out in (by_index, by_count, by_few, by_end):
        h.assert_rounded(out[here], product(a, b)[here])
    assert (by_index[~here] == 0).all()
    assert all(h.untouched(out[~here]) for out in (by_count, by_few, by_end))
    assert all(h.untouched(t[..., N:]) for t in wide)


@pytest.mark.parametrize("alignment", [1, 64, 128])
@pytest.mark.parametrize("expected_m", [16, 200])
def test_groups_that_end_where_they_are_said_to(device, alignment, expected_m):
    gen, sizes = h.seeded(0, device), [3, 0, 129, 64, 1]
    ends, rows = [], []
    for size in sizes:
        begin = -(-ends[-1] // alignment) * alignment if ends else 0
        rows.append(slice(begin, begin + size))
        ends.append(begin + size)
    a, b = operands(gen, ends[-1] + 7, k=384, weights=False), operands(gen, len(sizes), N, k=384, weights=True)
    out = h.poisoned(len(a[0]), N, dtype=torch.bfloat16, device=device)
    there = torch.zeros(len(out), dtype=torch.bool, device=device)
    limits = torch.tensor(ends, dtype=torch.int32, device=device)
    assert ops.m_grouped_fp8_gemm_nt_psum(a, b, out, limits, expected_m, alignment) is out
    for group, part in enumerate(rows):
        there[part] = True
        h.assert_rounded(out[part], product((a[0][part], a[1][part]), (b[0][group], b[1][group])))
    assert h.untouched(out[~there])


def test_ends_past_the_last_row_are_clamped(device):
    gen = h.seeded(0, device)
    a, b = operands(gen, 40, k=128, weights=False), operands(gen, 3, N, k=128, weights=True)
    out = torch.empty(2, 40, N, dtype=torch.bfloat16, device=device)
    for result, ends in zip(out, ([16, 1000, 2000], [16, 40, 40]), strict=True):
        limits = torch.tensor(ends, dtype=torch.int32, device=device)
        ops.m_grouped_fp8_gemm_nt_psum(a, b, result, limits, 16, 16)
    assert h.same_bits(out[0], out[1])


@pytest.mark.parametrize("op", ["dense", "contiguous", "masked", "psum", "batched"])
def test_scales_of_rows_may_be_in_either_order(device, op) -> None:
    """Where rows are counted, the scales of other rows are not needed."""
    gen = h.seeded(0, device)
    (q, in_order), b = operands(gen, 3, 200, k=640, weights=False), operands(gen, 3, N, k=640, weights=True)
    layer = h.random_layer(gen, 3, 640, 128)
    counts = torch.tensor([150, 1, 7], dtype=torch.int32, device=device)
    here = torch.arange(200, device=device) < counts[:, None]
    indices = torch.where(here, torch.arange(3, device=device)[:, None], -1).int().flatten()
    ends = torch.arange(0, 600, 200, dtype=torch.int32, device=device) + counts
    rows = in_order.contiguous()
    results = []
    for scales in (h.column_major(rows), rows, rows.masked_fill(~here[..., None], torch.nan)):
        out = torch.zeros(3, 200, 640 if op == "batched" else N, dtype=torch.bfloat16, device=device)
        flat, one = (q.flatten(0, 1), scales.flatten(0, 1)), (q[0, :150], scales[0, :150])
        match op:
            case "dense":
                ops.fp8_gemm_nt(one, (b[0][0], b[1][0]), out[0, :150])
            case "contiguous":
                ops.m_grouped_fp8_gemm_nt_contiguous(flat, b, out.flatten(0, 1), indices)
            case "masked":
                ops.m_grouped_fp8_gemm_nt_masked((q, scales), b, out, counts, 50)
            case "psum":
                ops.m_grouped_fp8_gemm_nt_psum(flat, b, out.flatten(0, 1), ends, 50, alignment=200)
            case "batched":
                ops.batched_experts(q, scales, *layer, counts, expected_m=50, out=out)
        results.append(out)
    assert results[0].any()
    assert all(h.same_bits(results[0], result) for result in results[1:])


def test_scales_of_k_blocks_that_are_far_apart_are_copied() -> None:
    """Their offsets do not fit into 32 bits."""
    for apart, in_place in ((2**28, True), (2**30 + 4, False)):
        memory = torch.empty(2 * apart + 8, device="meta")
        q = torch.empty(2, 384, dtype=h.FP8, device="meta")
        scales, _, k_block = k_major(q, memory.as_strided((2, 3), (1, apart)))
        assert (k_block == apart) == in_place
        assert (scales.untyped_storage().nbytes() > apart) == in_place


def test_scales_of_rows_that_are_far_apart_are_copied() -> None:
    memory = torch.empty(2**32, device="meta")
    for sizes, apart, expected in (
        ((4, 2, 2), (2, 2**27, 1), (2 - 2**28, 1, 2**27)),
        ((4, 2, 2), (2, 2**28, 1), (0, 1, 2)),
        ((4, 2, 2), (2, 1, 2**31), (0, 1, 2)),
        ((4, 1, 2), (2, 2**31, 1), (2, 1, 0)),
        ((1, 2, 2), (2**31, 2, 1), (-4, 1, 2)),
    ):
        assert strided(memory.as_strided(sizes, apart))[1:] == expected
