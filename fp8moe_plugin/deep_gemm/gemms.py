"""DeepGEMM's FP8 GEMMs. Names with `fp8_fp4` are aliases, because all operands are FP8 here."""

import torch

from fp8moe_plugin import ops
from fp8moe_plugin.deep_gemm.process import get_mk_alignment_for_contiguous_layout
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.ops.checks import FP8, check_tensor, check_writable, two_parts
from fp8moe_plugin.ops.gemm_checks import check_out, check_rows
from fp8moe_plugin.ops.operands import Quantized
from fp8moe_plugin.ops.option_checks import check_flag, check_ints
from fp8moe_plugin.quoting import any_of

Granularity = tuple[int, int]
BLOCKS = (1, GROUP, GROUP)  # one row of A, 128 rows of B, 128 channels share a scale
ROWS = (1, 1, GROUP)  # one row of A or of B: gradients of weights
Recipe = tuple[int, int, int] | None


def fp8_gemm_nt(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Granularity | None = None,
    recipe_b: Granularity | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`d = a @ b.T (+ c)` by `ops.fp8_gemm_nt`, for a `[M, K]`, b `[N, K]`.

    Args:
        recipe: rows of A, rows of B and channels that share a scale; the default is (1, 128, 128). With (1, 1, 128),
            for gradients of weights, c is required and may be d; both are float32, and N is a multiple of 16.
        recipe_a, recipe_b: rows and channels that share a scale, for A and for B, instead of `recipe`.
        compiled_dims: ignored: no kernel is compiled for a shape.
        disable_ue8m0_cast: ignored, as by DeepGEMM on Hopper GPUs: scales stay float32.
    Raises:
        InvalidInputError: a recipe without kernel; wrong dtype, shape, stride or device.
    """
    if _checked_recipe(recipe, recipe_a, recipe_b, (BLOCKS, ROWS)) == ROWS:
        _add_gradient(a, b, d, c)
    else:
        ops.fp8_gemm_nt(a, b, d, c)


def fp8_gemm_nn(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Granularity | None = None,
    recipe_b: Granularity | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` of b `[K, N]` and its scales `[K/128, N/128]`; K still has to be contiguous in memory."""
    fp8_gemm_nt(a, _transposed("b", b), d, c, recipe, recipe_a, recipe_b)


def fp8_gemm_tn(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Granularity | None = None,
    recipe_b: Granularity | None = None,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nn` of a `[K, M]` and its scales `[K/128, M]`; K still has to be contiguous in memory."""
    fp8_gemm_nt(_transposed("a", a), _transposed("b", b), d, c, recipe, recipe_a, recipe_b)


def fp8_gemm_tt(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Granularity | None = None,
    recipe_b: Granularity | None = None,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` of a `[K, M]` and its scales `[K/128, M]`; K still has to be contiguous in memory."""
    fp8_gemm_nt(_transposed("a", a), b, d, c, recipe, recipe_a, recipe_b)


def fp8_gemm_nt_skip_head_mid(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    head_splits: tuple[int, int, int],
    recipe: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` to heads with a gap. Unlike in DeepGEMM, the result is copied once.

    Args:
        d: bfloat16 or float32 `[M, heads * (left + mid + right)]`; the `mid` columns of each head are not written.
        head_splits: left, mid, right; N is `heads * (left + right)`.
    Raises:
        InvalidInputError: as `fp8_gemm_nt`, or sizes that do not fit.
    """
    _checked_recipe(recipe, None, None)
    (m, n), what = _sizes(a, b), "Pass the columns left of the gap, of the gap, and right of it."
    left, mid, right = check_ints("head_splits", head_splits, (3,), what)
    given = left + right
    if min(left, mid, right) < 0 or not given or n % given:
        raise InvalidInputError(
            f"head_splits is {(left, mid, right)}, but b has {n} rows, which are no heads of {left} + {right}. {what}"
        )
    heads = n // given
    check_tensor("d", d, dtype=(torch.bfloat16, torch.float32), shape=(m, heads * (given + mid)))
    product = torch.empty((m, n), dtype=d.dtype, device=d.device)
    ops.fp8_gemm_nt(a, b, product)
    out, parts = d.unflatten(1, (heads, given + mid)), product.unflatten(1, (heads, given))
    out[..., :left] = parts[..., :left]
    out[..., left + mid :] = parts[..., left:]


def m_grouped_fp8_gemm_nt_contiguous(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe = None,
    recipe_a: Granularity | None = None,
    recipe_b: Granularity | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """`d[i] = a[i] @ b[g].T` for the rows i of group g, by `ops.m_grouped_fp8_gemm_nt_contiguous` or `.._psum`.

    Args:
        recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast: see `fp8_gemm_nt`.
        grouped_layout: int32 `[M]`, the group of each row, -1 for zeros. Or, with `use_psum_layout`, `[G]`, the end of
            each group; the next begins at a multiple of `get_mk_alignment_for_contiguous_layout()`.
        use_psum_layout: rows between groups are not written.
        ensure_zero_padding: ignored, as by DeepGEMM on Hopper GPUs.
        expected_m_for_psum_layout: rows of a group on average; may change the speed, never the result.
    Raises:
        InvalidInputError: as `fp8_gemm_nt`, or options that exclude each other.
    """
    _checked_recipe(recipe, recipe_a, recipe_b)
    check_flag("use_psum_layout", use_psum_layout)
    expected_m = expected_m_for_psum_layout
    if use_psum_layout:
        if expected_m is None:
            expected_m = _length("a", a) // max(1, _length("b", b))
        alignment = get_mk_alignment_for_contiguous_layout()
        ops.m_grouped_fp8_gemm_nt_psum(a, b, d, grouped_layout, expected_m, alignment)
        return
    if expected_m is not None:
        raise InvalidInputError("expected_m_for_psum_layout is given without use_psum_layout. Leave it out.")
    ops.m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout)


def m_grouped_fp8_gemm_nn_contiguous(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe = None,
    recipe_a: Granularity | None = None,
    recipe_b: Granularity | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """`m_grouped_fp8_gemm_nt_contiguous` of b `[G, K, N]` and scales `[G, K/128, N/128]`, K contiguous in memory."""
    b = _transposed("b", b)
    m_grouped_fp8_gemm_nt_contiguous(
        a, b, d, grouped_layout, recipe, recipe_a, recipe_b, use_psum_layout=use_psum_layout
    )


def m_grouped_fp8_gemm_nt_masked(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Recipe = None,
    recipe_a: Granularity | None = None,
    recipe_b: Granularity | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`ops.m_grouped_fp8_gemm_nt_masked`; for the other arguments and errors see `fp8_gemm_nt`."""
    _checked_recipe(recipe, recipe_a, recipe_b)
    ops.m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, expected_m)


def _checked_recipe(
    recipe: Recipe, recipe_a: Granularity | None, recipe_b: Granularity | None, taken: tuple[Recipe, ...] = (BLOCKS,)
) -> tuple[int, int, int]:
    """Returns the rows of A, rows of B and channels that share a scale.

    Raises:
        InvalidInputError: no kernel supports them, or the arguments exclude each other.
    """
    if (recipe_a is None) != (recipe_b is None) or (recipe is not None and recipe_a is not None):
        raise InvalidInputError(
            f"recipe is {recipe}, recipe_a {recipe_a}, recipe_b {recipe_b}. Pass either the first, or both others."
        )
    if recipe_a is not None and recipe_b is not None:
        what = "Pass rows and channels that share a scale."
        recipe_a = check_ints("recipe_a", recipe_a, (2,), what)
        recipe_b = check_ints("recipe_b", recipe_b, (2,), what)
        if recipe_a[1] != recipe_b[1]:
            raise InvalidInputError(f"recipe_a is {recipe_a}, recipe_b {recipe_b}. Pass the same channels in both.")
        recipe = (recipe_a[0], recipe_b[0], recipe_a[1])
    if recipe is None:
        return BLOCKS
    found: tuple[int, int, int] = check_ints(
        "recipe", recipe, (3,), "Pass rows of A, rows of B and channels that share a scale."
    )
    if found not in taken:
        raise InvalidInputError(f"the recipe is {found}, needs {any_of(taken)}. Quantize the operands so.")
    return found


def _add_gradient(a: Quantized, b: Quantized, d: torch.Tensor, c: torch.Tensor | None) -> None:
    """Compute `d = c + a @ b.T`, where each row of a and b has its own scales. Strided operands are copied first."""
    (x, x_scales), (y, y_scales) = two_parts("a", a), two_parts("b", b)
    check_rows("a", x, x_scales, 2, empty_k=True)
    check_tensor("b", y, dtype=FP8, shape=(None, x.shape[1]), device=x.device, contiguous=False)
    check_rows("b", y, y_scales, 2, empty_k=True)
    check_out("d", d, (len(x), len(y)), torch.float32, x.device)
    check_writable("d", d)
    if c is None:
        raise InvalidInputError(f"c is None, but recipe {ROWS} adds to it. Pass d to add to what it holds, or zeros.")
    check_out("c", c, (len(x), len(y)), torch.float32, x.device)
    if x.shape[1] == 0:
        d.copy_(c)
        return
    apart = not (d.is_contiguous() and c.is_contiguous())
    addend = c.clone(memory_format=torch.contiguous_format) if apart else c
    result, k = addend if apart else d, ceil_div(x.shape[1], GROUP) * GROUP
    ks = x.new_full((1,), k, dtype=torch.int32)
    flat = (_whole_blocks(x), x_scales), (_whole_blocks(y), y_scales)
    ops.k_grouped_fp8_gemm_nt_contiguous(*flat, result[None], [k], ks, addend[None])
    if apart:
        d.copy_(result)


def _whole_blocks(q: torch.Tensor) -> torch.Tensor:
    """Returns contiguous `[rows, K]`, zero-padded to a multiple of 128 channels."""
    missing = -q.shape[1] % GROUP
    return torch.nn.functional.pad(q.view(torch.uint8), (0, missing)).view(FP8) if missing else q.contiguous()


def _transposed(name: str, pair: Quantized) -> Quantized:
    parts = two_parts(name, pair)
    for part in parts:
        if not isinstance(part, torch.Tensor) or part.dim() < 2:
            raise InvalidInputError(f"{name} holds no matrices. Pass (values, scales), each with 2 dimensions or more.")
    return parts[0].mT, parts[1].mT


def _length(name: str, pair: Quantized) -> int:
    """Returns the first dimension of the values."""
    values = two_parts(name, pair)[0]
    check_tensor(name, values, dtype=FP8, contiguous=False)
    return len(values)


def _sizes(a: Quantized, b: Quantized) -> tuple[int, int]:
    """Returns (M, N). Raises InvalidInputError if the operands are not matrices."""
    (x, _), (y, _) = two_parts("a", a), two_parts("b", b)
    for name, part in (("a", x), ("b", y)):
        check_tensor(name, part, dtype=FP8, shape=(None, None), contiguous=False)
    return x.shape[0], y.shape[0]


fp8_fp4_gemm_nt = fp8_gemm_nt
fp8_fp4_gemm_nn = fp8_gemm_nn
fp8_fp4_gemm_tn = fp8_gemm_tn
fp8_fp4_gemm_tt = fp8_gemm_tt
m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
m_grouped_fp8_fp4_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
