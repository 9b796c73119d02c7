import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.ops import m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked
from tests import helpers as h

K = 384
widths = st.sampled_from((64, 136, 576))
expected_ms = st.sampled_from((16, 200))  # swap-AB tiles, and tiles of 128 rows
depths = st.sampled_from((128, K, 896, 1024))  # from 896 on, the kernels distribute tiles in another way


def contiguous(a: h.Quantized, b: h.Quantized, indices: torch.Tensor) -> torch.Tensor:
    out = h.poisoned(a[0].shape[0], b[0].shape[1], dtype=torch.bfloat16, device=a[0].device)
    assert m_grouped_fp8_gemm_nt_contiguous(a, b, out, indices) is out
    return out


def masked(a: h.Quantized, b: h.Quantized, counts: torch.Tensor, expected_m: int = 16) -> torch.Tensor:
    out = h.poisoned(*a[0].shape[:2], b[0].shape[1], dtype=torch.bfloat16, device=a[0].device)
    assert m_grouped_fp8_gemm_nt_masked(a, b, out, counts, expected_m) is out
    return out


def random_masked(gen: torch.Generator, counts: list[int], max_m: int, n: int = 136, k: int = K):
    a, b = h.random_quantized(gen, len(counts), max_m, k), h.random_weights(gen, len(counts), n, k)
    return a, b, torch.tensor(counts, dtype=torch.int32, device=gen.device)


def indices_of(runs: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    return torch.tensor([expert for expert, rows in runs for _ in range(rows)], dtype=torch.int32, device=device)


def assert_grouped(out: torch.Tensor, a: h.Quantized, b: h.Quantized, indices: torch.Tensor) -> None:
    """Rows of a group are its product; other rows are zeros."""
    for group in range(b[0].shape[0]):
        rows = indices == group
        h.assert_rounded(out[rows], h.dequantize_tokens(*a)[rows] @ h.dequantize_weights(b[0][group], b[1][group]).mT)
    assert (out[(indices < 0) | (indices >= b[0].shape[0])] == 0).all()


@given(
    groups=st.lists(h.row_counts, min_size=1, max_size=5),
    skipped=st.integers(0, 70),
    n=widths,
    k=depths,
    seed=h.seeds,
)
def test_groups_of_any_size_and_rows_of_none_are_zeros(device, groups, skipped, n, k, seed):
    gen = h.seeded(seed, device)
    indices = indices_of([*enumerate(groups), (-1, skipped)], device)
    a, b = h.random_quantized(gen, len(indices), k), h.random_weights(gen, len(groups), n, k)
    assert_grouped(contiguous(a, b, indices), a, b, indices)


@given(
    runs=st.lists(st.tuples(st.integers(-2, 5), st.sampled_from((1, 3, 64, 129))), min_size=1, max_size=6),
    seed=h.seeds,
)
def test_ids_in_any_order_repeated_or_out_of_range(device, runs, seed):
    gen = h.seeded(seed, device)
    indices = indices_of(runs, device)
    a, b = h.random_quantized(gen, len(indices), K), h.random_weights(gen, 4, 136, K)
    assert_grouped(contiguous(a, b, indices), a, b, indices)


@given(counts=st.lists(h.row_counts, min_size=1, max_size=5), n=widths, k=depths, expected_m=expected_ms, seed=h.seeds)
def test_rows_past_the_count_are_not_written(device, counts, n, k, expected_m, seed):
    max_m = max(counts) + 1
    a, b, masked_m = random_masked(h.seeded(seed, device), counts, max_m, n, k)
    out = masked(a, b, masked_m, expected_m)
    rows = torch.arange(max_m, device=device) < masked_m[:, None]
    for group in range(len(counts)):
        h.assert_rounded(out[group][rows[group]], h.product(a, b)[group][rows[group]])
    assert h.untouched(out[~rows])


@given(counts=st.lists(h.row_counts, min_size=1, max_size=5), seed=h.seeds)
def test_expected_m_does_not_change_the_result(device, counts, seed):
    max_m = max(*counts, 1)
    call = random_masked(h.seeded(seed, device), counts, max_m)
    first, *others = (masked(*call, expected_m) for expected_m in (1, 16, max_m))
    assert all(h.same_bits(first, other) for other in others)


def test_counts_are_clamped_to_the_rows_there_are(device):
    a, b, _ = random_masked(h.seeded(0, device), [0, 0, 0], 65)
    wild = torch.tensor([-4, 65, 1000], dtype=torch.int32, device=device)
    assert h.same_bits(masked(a, b, wild), masked(a, b, wild.clamp(0, 65)))


def test_what_lies_past_the_count_does_not_matter(device):
    (q, scales), b, masked_m = random_masked(h.seeded(0, device), [3, 0, 64, 129], 130)
    clean = masked((q, scales), b, masked_m)
    past = torch.arange(130, device=device) >= masked_m[:, None]
    h.bits(q)[past] = -1
    scales[past] = float("nan")
    assert h.same_bits(masked((q, scales), b, masked_m), clean)


@pytest.mark.parametrize("expected_m", [16, 200])
def test_the_layout_of_the_scales_does_not_matter(device, expected_m):
    gen = h.seeded(0, device)
    (q, scales), b, masked_m = random_masked(gen, [3, 0, 64, 129], 130)
    layouts = (scales.contiguous(), h.column_major(scales))
    first, second = (masked((q, layout), b, masked_m, expected_m) for layout in layouts)
    assert h.same_bits(first, second)
    indices = indices_of([(0, 3), (-1, 5), (3, 122)], device)
    first, second = (contiguous((q[1], layout[1]), b, indices) for layout in layouts)
    assert h.same_bits(first, second)


def test_both_layouts_agree_with_each_other(device):
    (q, scales), b, masked_m = random_masked(h.seeded(0, device), [130, 130, 130], 130)
    indices = indices_of([(0, 130), (1, 130), (2, 130)], device)
    flat = contiguous((q.flatten(0, 1), scales.flatten(0, 1)), b, indices)
    assert h.same_bits(masked((q, scales), b, masked_m, 130).flatten(0, 1), flat)


@given(rows=st.sampled_from((2, 65, 129)), seed=h.seeds)
def test_nan_in_one_row_stays_in_that_row(device, rows, seed):
    (q, scales), b, masked_m = random_masked(h.seeded(seed, device), [rows, rows], rows)
    indices = indices_of([(0, rows), (1, rows)], device)

    def both(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = contiguous((q.flatten(0, 1), scales.flatten(0, 1)), b, indices)
        return masked((q, scales), b, masked_m).flatten(0, 1), flat

    broken_q, row = q.clone(), seed % (2 * rows)
    h.bits(broken_q).view(2 * rows, K)[row, 200] = -1
    others = torch.arange(2 * rows, device=device) != row
    for broken, clean in zip(both(broken_q), both(q), strict=True):
        assert broken[row].isnan().all()
        assert h.same_bits(broken[others], clean[others])


def test_two_runs_agree_bitwise(device):
    call = random_masked(h.seeded(0, device), [3, 0, 64, 129], 130)
    assert h.same_bits(masked(*call), masked(*call))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 4096, 7168), (32, 7168, 2048), (32, 512, 7168), (32, 7168, 256)])
@pytest.mark.parametrize("rows", [4, 150])
def test_model_shapes(shape, rows):
    groups, n, k = shape
    gen = torch.Generator("cuda").manual_seed(0)
    sizes = torch.randint(0, 2 * rows, (groups,), generator=gen, device="cuda", dtype=torch.int32)
    a, b = h.random_quantized(gen, groups, 2 * rows, k), h.random_weights(gen, groups, n, k)
    by_count = masked(a, b, sizes, rows)
    here = torch.arange(2 * rows, device="cuda") < sizes[:, None]
    indices = torch.arange(groups, device="cuda", dtype=torch.int32)[:, None].expand_as(here)[here]
    by_index = contiguous((h.bits(a[0])[here].view(h.FP8), a[1][here]), b, indices)
    assert h.same_bits(by_count[here], by_index)
    assert_grouped(by_index, (h.bits(a[0])[here].view(h.FP8), a[1][here]), b, indices)
