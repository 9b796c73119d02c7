"""Launch a GEMM on the GPU: dense, contiguous or masked, which to the kernels are lists of row tiles."""

import torch

from fp8moe_plugin.jit.launcher import Argument, TensorMap, launch, multiprocessors, tensor_map
from fp8moe_plugin.ops.quantize import Quantized, empty_scales
from fp8moe_plugin.ops.route import Tiles
from fp8moe_plugin.plan import KernelKey, Output, dense_key, gate_up_key, grouped_key
from fp8moe_plugin.shapes import GROUP

# Rows of a TMA load; the kernels say why.
PREFILL_BOX_M = 64
DECODE_BOX_M, DECODE_BOX_N = 8, 128


def launch_gemm(a: Quantized, b: Quantized, out: torch.Tensor, c: torch.Tensor | None, tiles: Tiles | None) -> None:
    """Launch the GEMM of these row tiles (None: dense); `a` is `[M, K]` or `[G, max_m, K]`, its scales any strides."""
    rows, n = a[0].numel() // a[0].shape[-1], b[0].shape[-2]
    sms = multiprocessors(out.device.index)
    key = grouped_key(tiles.block_m) if tiles else dense_key(rows, n, _output(out, c), sms)
    swap_ab = key.source == "grouped_gemm_swap_ab"
    box_m, box_n = (DECODE_BOX_M, DECODE_BOX_N) if swap_ab else (PREFILL_BOX_M, dict(key.defines)["BLOCK_N"])
    maps = () if swap_ab else (tensor_map(out.data_ptr(), rows, n, 64, 64, 2),)
    results = (out,) if swap_ab else (out, c, None)
    _launch(key, a, b, box_m, box_n, maps, results, tiles)


def launch_gate_up(a: Quantized, w13: Quantized, out: Quantized, tiles: Tiles, ue8m0: bool) -> None:
    """Launch the first GEMM of the experts with its activation, over tiles of `PREFILL_BLOCK_M` rows.

    `a` is `[M, H]` or `[G, max_m, H]`, `out` e4m3 `[M, I]` or `[G, max_m, I]` with scales from `empty_scales`.
    """
    q, scales = out
    maps = (tensor_map(q.data_ptr(), q.numel() // q.shape[-1], q.shape[-1], 64, 128, 1),)
    _launch(gate_up_key(ue8m0), a, w13, PREFILL_BOX_M, GROUP, maps, (q, None, scales), tiles)


def _launch(
    key: KernelKey,
    a: Quantized,
    b: Quantized,
    box_m: int,
    box_n: int,
    result_maps: tuple[TensorMap, ...],
    results: tuple[Argument, ...],
    tiles: Tiles | None,
) -> None:
    """Launch a GEMM kernel whose tiles of `a` and `b` come in boxes of so many rows."""
    (q, scales), (weights, weight_scales) = a, b
    rows, k, n = q.numel() // q.shape[-1], q.shape[-1], weights.shape[-2]
    a_map = tensor_map(q.data_ptr(), rows, k, box_m, 128, 1)
    b_map = tensor_map(weights.data_ptr(), weights.numel() // k, k, box_n, 128, 1)
    operands: tuple[Argument, ...] = (a_map, b_map, *result_maps, *_k_major(q, scales), weight_scales)
    table, num_tiles = (tiles.table, tiles.num_tiles) if tiles else (None, None)
    args: tuple[Argument, ...] = (*operands, *results, table, num_tiles, rows, n, k)
    launch(key, multiprocessors(q.device.index), args, q.device)


def _output(out: torch.Tensor, c: torch.Tensor | None) -> Output:
    if out.dtype != torch.bfloat16:
        return Output.F32_DIRECT
    return Output.BF16 if c is None else Output.BF16_DIRECT


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
