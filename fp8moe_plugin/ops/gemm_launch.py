"""Launch a GEMM on the GPU: dense, contiguous or masked, which to the kernels are lists of row tiles."""

from typing import NamedTuple

import torch

from fp8moe_plugin.checkpoint.shapes import GROUP, ceil_div
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launcher import Launch, launch, multiprocessors, tensor_map
from fp8moe_plugin.ops.quantize import Quantized, empty_scales
from fp8moe_plugin.ops.route import Tiles
from fp8moe_plugin.plan import (
    DENSE_BLOCK_N,
    DENSE_SPLITS,
    L2_FETCH,
    PREFILL_BLOCK_M,
    STREAMED_L2_FETCH,
    TAIL_ROWS,
    KernelKey,
    Output,
    columns_at_once,
    dense_key,
    dense_tile,
    dense_width,
    gate_up_few_rows_key,
    gate_up_key,
    grouped_key,
    tile_counters,
    whole_rows_l2_fetch,
)

# Rows of a TMA load: of a warpgroup's part of a tile; of one swizzle atom, so that as many are loaded as there are.
PREFILL_BOX_M, SWIZZLE_ROWS = 64, 8
DECODE_BOX_N = 128


class Rows(NamedTuple):
    """Where e4m3 `[rows, k]` is and its scales, with the strides of these by group and by k block, in elements."""

    values: int
    rows: int
    k: int
    scales: int
    scale_group: int
    scale_k_block: int

    @classmethod
    def of(cls, values: torch.Tensor, scales: tuple[torch.Tensor, int, int]) -> "Rows":
        """Rows of `[.., k]` with scales from `_k_major`, which must not be freed before the launch."""
        k = values.shape[-1]
        return cls(values.data_ptr(), values.numel() // k, k, scales[0].data_ptr(), *scales[1:])


class Weights(NamedTuple):
    """Where e4m3 `[experts, n, k]` is and its scales; a dense one is of one expert."""

    values: int
    experts: int
    n: int
    k: int
    scales: int

    @classmethod
    def of(cls, b: Quantized) -> "Weights":
        *experts, n, k = b[0].shape
        return cls(b[0].data_ptr(), experts[0] if experts else 1, n, k, b[1].data_ptr())


class TileAddresses(NamedTuple):
    """Where `Tiles` are, 0 for none of these: without a table the GEMM is dense; and their `keep_b`."""

    table: int = 0
    num_tiles: int = 0
    ready: int = 0
    keep_b: bool = False

    @classmethod
    def of(cls, tiles: Tiles | None) -> "TileAddresses":
        if tiles is None:
            return cls()
        ready = 0 if tiles.ready is None else tiles.ready.data_ptr()
        return cls(tiles.table.data_ptr(), tiles.num_tiles.data_ptr(), ready, tiles.keep_b)


class LayerAddresses(NamedTuple):
    """Where the tensors of a call of `fused_moe` are, and its scratch; 0 for no expert map."""

    hidden_states: int
    w13: int
    w13_scale: int
    w2: int
    w2_scale: int
    topk_weights: int
    topk_ids: int
    expert_map: int
    out: int
    scratch: int


def launch_gemm(
    a: Quantized,
    b: Quantized,
    out: torch.Tensor,
    c: torch.Tensor | None,
    tiles: Tiles | None,
    after_a: bool = False,
) -> None:
    """Launch the GEMM of these row tiles (None: dense); `a` is `[M, K]` or `[G, max_m, K]`, its scales any strides.

    `after_a`: the launch before this one has made `a`. For a dense one that is `quantize_matrix`, beside which it may
    start to load weights; else `launch_gate_up` of the same tiles. Tiles with `ready` let this one start where that one
    leaves multiprocessors idle, and wait for rows of `a` tile by tile; `out` must not overlap with what that one reads.
    """
    scales, device_index = _k_major(*a), out.get_device()
    follows = after_a and scales[0] is a[1]  # else scales were copied in between
    rows, weights = Rows.of(a[0], scales), Weights.of(b)
    if tiles:
        addresses = TileAddresses.of(tiles)
        launch(*grouped_launch(rows, weights, out.data_ptr(), tiles.block_m, addresses, device_index, follows))
        return
    output = _output(out, c)
    key = dense_key(rows.rows, weights.n, rows.k, output, multiprocessors(device_index))
    if key.source == "dense_gemm_few_rows":
        _launch_dense_few_rows(key, rows, weights, out, follows)
        return
    if key.source == "dense_gemm":
        _launch_dense(key, rows, weights, out, follows)
        return
    addend = 0 if c is None else c.data_ptr()
    launch(*_wide(key, rows, weights, out.data_ptr(), addend, output, TileAddresses(), device_index, early=False))


def _launch_dense(key: KernelKey, a: Rows, b: Weights, out: torch.Tensor, early: bool) -> None:
    """`launch_gemm` of up to a few hundred rows."""
    sms = multiprocessors(out.get_device())
    block_m, block_n = dense_tile(a.rows, b.n, b.k, sms)
    tiles = ceil_div(a.rows, block_m) * ceil_div(b.n, block_n)
    tail = ceil_div(a.rows % block_m, SWIZZLE_ROWS) * SWIZZLE_ROWS or block_m
    maps = (_map(a, block_m), _map(a, tail), _weight_map(b, block_n, whole_rows_l2_fetch(b.k)))
    args = (*maps, a.scales, a.scale_k_block, b.scales, out.data_ptr(), a.rows, b.n, b.k, block_n)
    launch(key, min(tiles, sms), args, out.get_device(), early)


def _launch_dense_few_rows(key: KernelKey, a: Rows, b: Weights, out: torch.Tensor, early: bool) -> None:
    """`launch_gemm` of few rows and few columns."""
    width = dense_width(a.rows)
    maps = (_map(a, width), _weight_map(b, DENSE_BLOCK_N, STREAMED_L2_FETCH))
    args = (*maps, a.scales, a.scale_k_block, b.scales, out.data_ptr(), a.rows, b.n, b.k, width, DENSE_SPLITS)
    launch(key, ceil_div(b.n, DENSE_BLOCK_N) * DENSE_SPLITS, args, out.get_device(), early, DENSE_SPLITS)


def grouped_launch(
    a: Rows,
    b: Weights,
    out: int,
    block_m: int,
    tiles: TileAddresses,
    device_index: int,
    after_gate_up: bool,
    counters: int = 0,
) -> Launch:
    """What `launch_gemm` launches for grouped rows, to bfloat16 `[rows, n]` at `out`.

    `counters`, for tiles of `DECODE_BLOCK_M`: how many `tiles.ready` has of each row tile, 0 where nothing tells there.
    """
    key = grouped_key(block_m, tiles.keep_b)
    if block_m != PREFILL_BLOCK_M:
        return _few_rows(key, a, b, out, tiles, device_index, after_gate_up, counters)
    return _wide(key, a, b, out, 0, Output.BF16, tiles, device_index, after_gate_up and bool(tiles.ready))


def launch_gate_up(
    a: Quantized, w13: Quantized, out: Quantized, tiles: Tiles, ue8m0: bool, a_rows: torch.Tensor | None
) -> None:
    """Launch the first GEMM of the experts with its activation.

    `a` is `[M, H]` or `[G, max_m, H]`, `out` e4m3 `[M, I]` or `[G, max_m, I]` with scales from `empty_scales`. With
    `a_rows` int32 `[M]` row i of the tiles is row `a_rows[i]` of `a`, which is `[T, H]` with row-major scales; tiles of
    `DECODE_BLOCK_M` need that, or raise `InvalidInputError`.
    """
    scales = _k_major(*a) if a_rows is None else (a[1], 0, 0)
    inner = Rows.of(out[0], (out[1], 0, 0))
    gathered = 0 if a_rows is None else a_rows.data_ptr()
    addresses = TileAddresses.of(tiles)
    rows, weights, device_index = Rows.of(a[0], scales), Weights.of(w13), out[0].get_device()
    if tiles.block_m == PREFILL_BLOCK_M:
        launch(*gate_up_launch(rows, gathered, weights, inner, addresses, ue8m0, device_index))
    elif a_rows is None:
        raise InvalidInputError("tiles of DECODE_BLOCK_M need `a_rows`, the tokens that their rows are.")
    else:
        uncounted, unsplit = addresses._replace(ready=0), (0, 1)
        launch(*gate_up_few_rows_launch(rows, gathered, weights, inner, uncounted, unsplit, ue8m0, device_index))


def gate_up_launch(
    a: Rows, a_rows: int, w13: Weights, out: Rows, tiles: TileAddresses, ue8m0: bool, device_index: int
) -> Launch:
    """What `launch_gate_up` launches; `a_rows` 0 for none. The strides of `out` are those of `empty_scales`."""
    maps = (_map(a, PREFILL_BOX_M), _map(a, TAIL_ROWS), _weight_map(w13, GROUP, L2_FETCH), _map(out, PREFILL_BOX_M))
    gathered = (a.values, a_rows) if a_rows else (0, 0)
    operands = (a.scales, a.scale_group, a.scale_k_block, w13.scales, *gathered)
    results = (out.values, out.scales, tiles.ready, tiles.table, tiles.num_tiles)
    key = gate_up_key(ue8m0, gather=bool(a_rows))
    args = (*maps, *operands, *results, out.rows, w13.n, w13.k)
    return Launch(key, multiprocessors(device_index), args, device_index)


def gate_up_few_rows_launch(
    a: Rows,
    a_rows: int,
    w13: Weights,
    out: Rows,
    tiles: TileAddresses,
    split: tuple[int, int],
    ue8m0: bool,
    device_index: int,
    early: bool = False,
) -> Launch:
    """What `launch_gate_up` launches for tiles of `DECODE_BLOCK_M`; into `tiles.ready` it tells what is done.

    Args:
        split: where the parts of a tile leave their sums, and how many they are; more than one need `tiles.ready`.
        early: right behind `quantize_tokens`, whose end it awaits.
    """
    partial, splits = split
    results = (out.values, out.scales, partial if splits > 1 else 0, tiles.ready, tiles.table, tiles.num_tiles)
    operands = (_gate_up_map(w13), a.values, a.scales, w13.scales, a_rows)
    args = (*operands, *results, out.rows, out.k, w13.k, splits, tile_counters(out.k, splits))
    return Launch(gate_up_few_rows_key(ue8m0), multiprocessors(device_index), args, device_index, early)


def _wide(
    key: KernelKey,
    a: Rows,
    b: Weights,
    out: int,
    c: int,
    output: Output,
    tiles: TileAddresses,
    device_index: int,
    early: bool,
) -> Launch:
    a_map = _map(a, PREFILL_BOX_M)
    # Other outputs than bfloat16 without addend are written without a map.
    out_map = matrix_map(out, a.rows, b.n, PREFILL_BOX_M, 2) if output == Output.BF16 else a_map
    maps = (a_map, _map(a, TAIL_ROWS), _weight_map(b, dict(key.defines)["BLOCK_N"], L2_FETCH), out_map)
    operands = (a.scales, a.scale_group, a.scale_k_block, b.scales)
    results = (out, c, tiles.ready if early else 0, tiles.table, tiles.num_tiles)
    args = (*maps, *operands, *results, a.rows, b.n, b.k)
    return Launch(key, multiprocessors(device_index), args, device_index, early)


def _few_rows(
    key: KernelKey,
    a: Rows,
    b: Weights,
    out: int,
    tiles: TileAddresses,
    device_index: int,
    early: bool,
    counters: int,
) -> Launch:
    scales = (a.scales, a.scale_group, a.scale_k_block, b.scales)
    maps = (_map(a, SWIZZLE_ROWS), _weight_map(b, DECODE_BOX_N, STREAMED_L2_FETCH))
    pair_of_counters = int(early)  # the GEMM before may still use the first pair
    results = (out, tiles.table, tiles.num_tiles)
    run = columns_at_once(a.rows, b.experts, b.n, b.k)
    told = (tiles.ready, counters) if counters else (0, 0)
    args = (*maps, *scales, *results, a.rows, b.n, b.k, pair_of_counters, run, *told)
    return Launch(key, multiprocessors(device_index), args, device_index, early)


def _map(a: Rows, box_rows: int) -> bytes:
    return matrix_map(a.values, a.rows, a.k, box_rows)


def _weight_map(b: Weights, box_rows: int, l2_fetch: int) -> bytes:
    return matrix_map(b.values, b.experts * b.n, b.k, box_rows, l2_fetch=l2_fetch)


def matrix_map(
    address: int, rows: int, columns: int, box_rows: int, element_size: int = 1, l2_fetch: int = L2_FETCH
) -> bytes:
    box = (128 // element_size, box_rows)
    return tensor_map(address, (columns, rows), (columns * element_size,), box, element_size, l2_fetch)


def _gate_up_map(w13: Weights) -> bytes:
    """Of `[E, 2I, K]` as [K, 8, 2, ..]: a box is 8 rows of the gate, the same 8 of the other half, and 15 such on."""
    half = w13.n // 2
    sizes = (w13.k, 8, 2, (w13.experts * w13.n - half) // 8)
    strides, box = (w13.k, half * w13.k, 8 * w13.k), (128, 8, 2, GROUP // 8)
    return tensor_map(w13.values, sizes, strides, box, 1, whole_rows_l2_fetch(w13.k))


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
