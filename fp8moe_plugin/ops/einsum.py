"""A batch of FP8 products with DeepGEMM's name: DeepSeek-V4 projects the output of each group of heads by itself."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.ops.checks import CheckedOnce, check_shape, check_writable, two_parts
from fp8moe_plugin.ops.gemm import fp8_gemm_nt
from fp8moe_plugin.ops.gemm_checks import check_blocks, check_out, check_rows
from fp8moe_plugin.ops.grouped_gemm import m_grouped_fp8_gemm_nt_masked
from fp8moe_plugin.ops.operands import Quantized
from fp8moe_plugin.ops.option_checks import check_ints
from fp8moe_plugin.quoting import shown

EQUATION = "bhr,hdr->bhd"
BLOCKS = (1, GROUP, GROUP)  # one row of A, 128 rows of B, 128 channels share a scale


def fp8_einsum(
    expr: str,
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    c: None = None,
    recipe: tuple[int, int, int] = BLOCKS,
) -> torch.Tensor:
    """Returns `d`, with `d[t, g] = a[t, g] @ b[g].T` for each group g. Captures in a CUDA graph.

    With several groups, `d` is written through a copy, because the kernels write the rows of a group one after another.

    Args:
        expr: "bhr,hdr->bhd", the only equation of DeepGEMM's that has kernels here.
        a: e4m3 `[T, G, K]` and float32 scales `[T, G, ceil(K/128)]`; K a multiple of 16. Read in place if the rows of a
            group follow each other in memory, and its scales are K-major; else copied.
        b: e4m3 `[G, N, K]` and float32 scales `[G, ceil(N/128), ceil(K/128)]`; N a multiple of 8.
        d: bfloat16 `[T, G, N]`.
        c: None: no kernel adds to `d`.
        recipe: (1, 128, 128), the rows of a, rows of b and channels that share a scale.
    Raises:
        InvalidInputError: another equation or recipe, an addend; wrong dtype, shape, stride or device.
    """
    if expr != EQUATION:
        raise InvalidInputError(f"expr is {shown(expr)}, needs {EQUATION!r}. Permute the operands, or use another op.")
    if check_ints("recipe", recipe, (3,), "Pass rows of a, rows of b and channels that share a scale.") != BLOCKS:
        raise InvalidInputError(f"the recipe is {recipe}, needs {BLOCKS}. Quantize the operands so.")
    if c is not None:
        raise InvalidInputError("c is given, but no kernel adds to d here. Leave it out, and add it to d afterwards.")
    a, b = two_parts("a", a), two_parts("b", b)
    _check_once(*a, *b, d)
    tokens, groups, n = d.shape
    if groups == 1:
        fp8_gemm_nt((a[0][:, 0], a[1][:, 0]), (b[0][0], b[1][0]), d[:, 0])
    elif tokens:
        counts = torch.full((groups,), tokens, dtype=torch.int32, device=d.device)
        product = d.new_empty((groups, tokens, n))
        m_grouped_fp8_gemm_nt_masked((a[0].transpose(0, 1), a[1].transpose(0, 1)), b, product, counts, tokens)
        d.copy_(product.transpose(0, 1))
    return d


def _check(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, d: torch.Tensor) -> None:
    check_rows("a", a, a_scales, 3)
    check_blocks("b", b, b_scales, 3, a.shape[2], a.device)
    check_shape("b", b, (a.shape[1], None, None))
    check_out("d", d, (*a.shape[:2], b.shape[1]), torch.bfloat16, a.device)
    check_writable("d", d)


_check_once = CheckedOnce(_check)
