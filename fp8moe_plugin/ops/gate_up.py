"""The first half of an expert: GEMM 1, SiLU(gate) * up, quantized again; in one kernel on the GPU."""

import torch

from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.ops.gemm_launch import launch_gate_up
from fp8moe_plugin.ops.grouped_gemm import grouped_gemm
from fp8moe_plugin.ops.quantize import Quantized, empty_quantized
from fp8moe_plugin.ops.route import Tiles
from fp8moe_plugin.ops.silu_mul_quant import silu_mul_quant_fp8
from fp8moe_plugin.ops.workspace import empty


def gate_up(
    a: Quantized,
    w13: Quantized,
    tiles: Tiles,
    counts: torch.Tensor,
    ue8m0: bool,
    tokens: torch.Tensor | None = None,
) -> Quantized:
    """`silu(gate) * up` with `gate, up = w13[expert of the tile] @ a[i]`, for rows that the tiles name.

    The sum of a product is rounded to bfloat16 before the activation, so that one kernel and three give the same bits.

    Args:
        a: e4m3 `[G, max_m, H]` and its scales; with `tokens` `[T, H]`, as `quantize_tokens` gives it.
        w13: e4m3 `[E, 2I, H]`, gate rows first, and its scales.
        counts: int32 `[G]`, the rows of each group that count.
        tokens: int32 `[max_m]`, the row of `a` that each row is, for one group; or None. Tiles of `DECODE_BLOCK_M` need
            it.
    Returns:
        e4m3 `[G, max_m, I]` and float32 scales `[G, max_m, I/128]`, K-major over all rows.
    """
    groups, max_m = a[0].shape[:2] if tokens is None else (1, tokens.shape[0])
    width = w13[0].shape[1]
    if uses_sm90(a[0]):
        q, scales = empty_quantized(groups * max_m, width // 2, a[0].device)
        out = q.view(groups, max_m, width // 2), scales.unflatten(0, (groups, max_m))
        launch_gate_up(a, w13, out, tiles, ue8m0, tokens)
        return out
    if tokens is not None:
        a = a[0][tokens.long()][None], a[1][tokens.long()][None]
    products = empty((groups, max_m, width), torch.bfloat16, a[0].device)
    grouped_gemm(a, w13, products, tiles)
    return silu_mul_quant_fp8(products, counts, ue8m0)
