"""Grouped block-scaled FP8 GEMMs: rows of many experts, each against its own weights."""

import torch

from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.ops.checks import (
    check_activations,
    check_int,
    check_shape,
    check_tensor,
    check_values,
    check_weights,
)
from fp8moe_plugin.ops.gemm import gemm_reference
from fp8moe_plugin.ops.gemm_launch import launch_gemm
from fp8moe_plugin.ops.quantize import Quantized
from fp8moe_plugin.ops.route import Tiles, tiles_of_counts, tiles_of_indices
from fp8moe_plugin.plan import PREFILL_BLOCK_M, masked_block_m


def m_grouped_fp8_gemm_nt_contiguous(
    a: Quantized, b: Quantized, out: torch.Tensor, m_indices: torch.Tensor
) -> torch.Tensor:
    """`out[i] = a[i] @ b[m_indices[i]].T` for rows that come expert by expert; no alignment of the groups is needed.

    Args:
        a: e4m3 `[M, K]` and float32 scales `[M, K/128]` of any strides; K-major ones, as `per_token_group_quant_fp8`
            returns them, are read in place, others are copied first. K a multiple of 128.
        b: e4m3 `[G, N, K]` and float32 scales `[G, ceil(N/128), K/128]`; N a multiple of 8.
        out: bfloat16 `[M, N]`; rows with an index outside `[0, G)` are not written.
        m_indices: int32 `[M]` on the device; -1 skips the row. Each run of equal ids is tiled by itself.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    check_activations("a", a, dims=2)
    m, k = a[0].shape
    check_weights("b", b, 3, k, a[0].device)
    check_tensor("out", out, dtype=torch.bfloat16, shape=(m, b[0].shape[1]), device=a[0].device)
    check_tensor("m_indices", m_indices, dtype=torch.int32, shape=(m,), device=a[0].device)
    check_values("m_indices", m_indices, -1, b[0].shape[0] - 1)
    if m == 0:
        return out
    grouped_gemm(a, b, out, tiles_of_indices(m_indices, b[0].shape[0], PREFILL_BLOCK_M))
    return out


def m_grouped_fp8_gemm_nt_masked(
    a: Quantized, b: Quantized, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> torch.Tensor:
    """`out[g, i] = a[g, i] @ b[g].T` for `i < masked_m[g]`. The counts stay on the device: captures in a CUDA graph.

    Args:
        a: e4m3 `[G, max_m, K]` and float32 scales `[G, max_m, K/128]` of any strides, as for the contiguous layout; K a
            multiple of 128.
        b: e4m3 `[G, N, K]` and float32 scales `[G, ceil(N/128), K/128]`; N a multiple of 8.
        out: bfloat16 `[G, max_m, N]`; rows from `masked_m[g]` on are not written.
        masked_m: int32 `[G]` on the device; counts are clamped to `[0, max_m]`.
        expected_m: rows a group on average, as far as the host knows; may change the speed, never the result.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    check_activations("a", a, dims=3)
    groups, max_m, k = a[0].shape
    check_weights("b", b, 3, k, a[0].device)
    check_shape("b", b[0], (groups, None, k))
    check_tensor("out", out, dtype=torch.bfloat16, shape=(groups, max_m, b[0].shape[1]), device=a[0].device)
    check_tensor("masked_m", masked_m, dtype=torch.int32, shape=(groups,), device=a[0].device)
    check_values("masked_m", masked_m, 0, max_m)
    check_int("expected_m", expected_m)
    if groups * max_m == 0:
        return out
    grouped_gemm(a, b, out, tiles_of_counts(masked_m, max_m, masked_block_m(expected_m)))
    return out


def grouped_gemm(a: Quantized, b: Quantized, out: torch.Tensor, tiles: Tiles, after_gate_up: bool = False) -> None:
    """Write the rows of `out` that the tiles name, `out[i] = a[i] @ b[expert of the tile].T`; i over all groups.

    `after_gate_up`: `a` is the result of the `gate_up` over the same tiles that was launched just before. On a GPU,
    where the tiles have `ready`, this one starts while that one ends; `out` must not overlap with what that one reads.
    """
    if uses_sm90(out):
        launch_gemm(a, b, out, None, tiles, after_gate_up)
        return
    (q, scales), rows_out = (part.flatten(0, -2) for part in a), out.view(-1, out.shape[-1])
    for expert, begin, end, _ in tiles.table[: tiles.num_tiles[0]].unique(dim=0).tolist():
        rows = q[begin:end], scales[begin:end]
        rows_out[begin:end] = gemm_reference(rows, (b[0][expert], b[1][expert])).to(out.dtype)
