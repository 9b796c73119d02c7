"""Launch a GEMM on the GPU: dense, contiguous or masked, which to the kernels are lists of row tiles."""

import torch

from fp8moe_plugin.jit.launcher import Argument, TensorMap, launch, multiprocessors, tensor_map
from fp8moe_plugin.ops.quantize import Quantized, empty_scales
from fp8moe_plugin.ops.route import Tiles
from fp8moe_plugin.plan import TAIL_ROWS, KernelKey, Output, dense_key, gate_up_key, grouped_key
from fp8moe_plugin.shapes import GROUP

# Rows of a TMA load: of a warpgroup's part of a tile; of one swizzle atom, so that as many are loaded as there are.
PREFILL_BOX_M = 64
DECODE_BOX_M, DECODE_BOX_N = 8, 128


def launch_gemm(
    a: Quantized,
    b: Quantized,
    out: torch.Tensor,
    c: torch.Tensor | None,
    tiles: Tiles | None,
    after_gate_up: bool = False,
) -> None:
    """Launch the GEMM of these row tiles (None: dense); `a` is `[M, K]` or `[G, max_m, K]`, its scales any strides.

    `after_gate_up`: `a` is what `launch_gate_up`, the launch before this one, has made of the same tiles. Tiles with
    `ready` let this one start where that one leaves multiprocessors idle, and wait for rows of `a` tile by tile; `out`
    must not overlap with what that one reads.
    """
    rows, n = a[0].numel() // a[0].shape[-1], b[0].shape[-2]
    key = grouped_key(tiles.block_m) if tiles else dense_key(rows, n, _output(out, c), _sms(out))
    a_scales = _k_major(*a)
    scales = (*a_scales, b[1])
    if key.source == "grouped_gemm_swap_ab":
        args = (_map(a[0], DECODE_BOX_M), _map(b[0], DECODE_BOX_N), *scales, out)
        return _launch(key, args, tiles, rows, b[0])
    a_maps = _prefill_maps(a[0])
    out_map = _map(out, PREFILL_BOX_M) if _output(out, c) == Output.BF16 else a_maps[0]  # the others do without
    maps = (*a_maps, _map(b[0], dict(key.defines)["BLOCK_N"]), out_map)
    ready = None
    if tiles and after_gate_up and a_scales[0] is a[1]:  # else scales were copied in between
        ready = tiles.ready
    _launch(key, (*maps, *scales, None, None, out, c, None, ready), tiles, rows, b[0], early=ready is not None)


def launch_gate_up(
    a: Quantized, w13: Quantized, out: Quantized, tiles: Tiles, ue8m0: bool, a_rows: torch.Tensor | None
) -> None:
    """Launch the first GEMM of the experts with its activation, over tiles of `PREFILL_BLOCK_M` rows.

    `a` is `[M, H]` or `[G, max_m, H]`, `out` e4m3 `[M, I]` or `[G, max_m, I]` with scales from `empty_scales`. With
    `a_rows` int32 `[M]` row i of the tiles is row `a_rows[i]` of `a`, which is `[T, H]` with row-major scales.
    """
    (q, scales), (a_values, a_scales) = out, a
    maps = (*_prefill_maps(a_values), _map(w13[0], GROUP), _map(q, PREFILL_BOX_M))
    operands: tuple[Argument, ...]
    if a_rows is None:
        operands = (*_k_major(a_values, a_scales), w13[1], None, None)
    else:
        operands = (a_scales, 0, 0, w13[1], a_values, a_rows)
    key = gate_up_key(ue8m0, gather=a_rows is not None)
    rows = q.numel() // q.shape[-1]
    _launch(key, (*maps, *operands, q, None, scales, tiles.ready), tiles, rows, w13[0])


def _launch(
    key: KernelKey, args: tuple[Argument, ...], tiles: Tiles | None, rows: int, b: torch.Tensor, early: bool = False
) -> None:
    """Launch a GEMM kernel: its operands and results, then what all of them take last."""
    table, num_tiles = (tiles.table, tiles.num_tiles) if tiles else (None, None)
    launch(key, _sms(b), (*args, table, num_tiles, rows, *b.shape[-2:]), b.device, early)


def _map(matrix: torch.Tensor, box_rows: int) -> TensorMap:
    """A map of all rows of `matrix`, `[.., columns]`; a box is 128 bytes wide."""
    columns, size = matrix.shape[-1], matrix.element_size()
    return tensor_map(matrix.data_ptr(), matrix.numel() // columns, columns, box_rows, 128 // size, size)


def _prefill_maps(a: torch.Tensor) -> tuple[TensorMap, TensorMap]:
    """In boxes for whole tiles, and in narrow ones for tails and where K is short."""
    return _map(a, PREFILL_BOX_M), _map(a, TAIL_ROWS)


def _sms(tensor: torch.Tensor) -> int:
    return multiprocessors(tensor.device.index)


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
    if (row == 1 or q.shape[-2] == 1) and in_steps_of_16_bytes and max(abs(group), k_block) < 2**31:
        return scales, group, k_block
    copy = empty_scales(q.numel() // q.shape[-1], scales.shape[-1], scales.device)
    copy.view(scales.shape).copy_(scales)
    return copy, 0, copy.stride(1)
