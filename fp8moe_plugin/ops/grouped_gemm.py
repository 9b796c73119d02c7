"""Grouped block-scaled FP8 GEMMs: rows of many experts, each against its own weights."""

import torch

from fp8moe_plugin.jit.launcher import launch, multiprocessors, tensor_map
from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.ops.checks import check_activations, check_int, check_tensor, check_values, check_weights
from fp8moe_plugin.ops.gemm import Quantized, gemm_reference
from fp8moe_plugin.ops.quantize import empty_scales
from fp8moe_plugin.ops.route import Tiles, tiles_of_counts, tiles_of_indices
from fp8moe_plugin.plan import (
    DECODE_BLOCK_M,
    PREFILL_BLOCK_M,
    KernelKey,
    Output,
    dense_block_m,
    dense_block_n,
    grouped_gemm_key,
    masked_block_m,
    swap_ab_key,
)

# Rows of a TMA load; the kernels say why.
PREFILL_BOX_M = 64
DECODE_BOX_M, DECODE_BOX_N = 8, 128


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
    if uses_sm90(out):
        launch_gemm(a, b, out, None, tiles_of_indices(m_indices, b[0].shape[0], PREFILL_BLOCK_M))
        return out
    for group in range(b[0].shape[0]):
        rows = (m_indices == group).nonzero().flatten()
        if rows.numel():
            out[rows] = gemm_reference(
                (a[0].view(torch.uint8)[rows].view(a[0].dtype), a[1][rows]), (b[0][group], b[1][group])
            ).to(out.dtype)
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
    check_tensor("b", b[0], dtype=b[0].dtype, shape=(groups, None, k))
    check_tensor("out", out, dtype=torch.bfloat16, shape=(groups, max_m, b[0].shape[1]), device=a[0].device)
    check_tensor("masked_m", masked_m, dtype=torch.int32, shape=(groups,), device=a[0].device)
    check_values("masked_m", masked_m, 0, max_m)
    check_int("expected_m", expected_m)
    if groups * max_m == 0:
        return out
    if uses_sm90(out):
        launch_gemm(a, b, out, None, tiles_of_counts(masked_m, max_m, masked_block_m(expected_m)))
        return out
    for group, count in enumerate(masked_m.clamp(0, max_m).tolist()):
        rows = gemm_reference((a[0][group, :count], a[1][group, :count]), (b[0][group], b[1][group]))
        out[group, :count] = rows.to(out.dtype)
    return out


def launch_gemm(a: Quantized, b: Quantized, out: torch.Tensor, c: torch.Tensor | None, tiles: Tiles | None) -> None:
    """Launch the GEMM of these row tiles (None: dense); `a` is `[M, K]` or `[G, max_m, K]`, its scales any strides."""
    (q, scales), (weights, weight_scales) = a, b
    rows, k, n = q.numel() // q.shape[-1], q.shape[-1], weights.shape[-2]
    sms = multiprocessors(out.device.index)
    key = gemm_key(tiles, rows, n, out.dtype, c is not None, sms)
    swap_ab = key.source == "grouped_gemm_swap_ab"
    box_m, box_n = (DECODE_BOX_M, DECODE_BOX_N) if swap_ab else (PREFILL_BOX_M, dict(key.defines)["BLOCK_N"])
    maps = [
        tensor_map(q.data_ptr(), rows, k, box_m, 128, 1),
        tensor_map(weights.data_ptr(), weights.numel() // k, k, box_n, 128, 1),
    ]
    if not swap_ab:
        maps.append(tensor_map(out.data_ptr(), rows, n, 64, 64, 2))
    table, num_tiles = (tiles.table, tiles.num_tiles) if tiles else (None, None)
    results = (out,) if swap_ab else (out, c)
    args = (*maps, *_k_major(q, scales), weight_scales, *results, table, num_tiles, rows, n, k)
    launch(key, sms, args, out.device)


def gemm_key(tiles: Tiles | None, rows: int, n: int, dtype: torch.dtype, has_addend: bool, sms: int) -> KernelKey:
    plain = dtype == torch.bfloat16 and not has_addend
    block_m = tiles.block_m if tiles else dense_block_m(rows, plain)
    if block_m == DECODE_BLOCK_M:
        return swap_ab_key()
    output = Output.BF16 if plain else Output.BF16_DIRECT if dtype == torch.bfloat16 else Output.F32_DIRECT
    return grouped_gemm_key(output, 256 if tiles else dense_block_n(rows, n, sms))


def _k_major(q: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The scales as the kernels copy them; their strides by group and k block, where rows count on over all groups."""
    row, k_block = scales.stride()[-2:]
    group = scales.stride(0) - q.shape[1] if q.dim() == 3 else 0
    last = sum((size - 1) * stride for size, stride in zip(scales.shape, scales.stride(), strict=True))
    room = scales.untyped_storage().nbytes() // scales.element_size() - scales.storage_offset()
    in_steps_of_16_bytes = scales.data_ptr() % 16 == group % 4 == k_block % 4 == 0 and last // 4 * 4 + 4 <= room
    if row == 1 and in_steps_of_16_bytes and max(abs(group), k_block) < 2**31:
        return scales, group, k_block
    copy = empty_scales(q.numel() // q.shape[-1], scales.shape[-1], scales.device)
    copy.view(scales.shape).copy_(scales)
    return copy, 0, copy.stride(1)
