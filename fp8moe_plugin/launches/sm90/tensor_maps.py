"""The TMA descriptors of the kernels' operands."""

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.jit.launch import Address, Chunks, TensorMap
from fp8moe_plugin.launches.operands import Rows, Weights
from fp8moe_plugin.plan.tuning import L2_FETCH, LONG_K, STREAMED_L2_FETCH


def matrix_map(
    address: Address, rows: int, columns: int, box_rows: int, *, element_size: int = 1, l2_fetch: int = L2_FETCH
) -> TensorMap:
    """Returns the map of a contiguous `[rows, columns]` matrix, in boxes of `box_rows` rows of 128 bytes."""
    box = (128 // element_size, box_rows)
    return TensorMap(address, (columns, rows), (columns * element_size,), box, element_size, l2_fetch)


def whole_rows_l2_fetch(k: int) -> int:
    """Returns the L2 fetch size for weights whose rows a block reads from end to end.

    With a long K, the block soon reads the next 128 bytes of the row, too.
    """
    return L2_FETCH if k >= LONG_K else STREAMED_L2_FETCH


def rows_map(a: Rows, box_rows: int) -> TensorMap:
    columns, pitch = a.extent or (a.k, a.k)
    return TensorMap(a.values, (columns, a.rows), (pitch,), (128, box_rows), 1, L2_FETCH)


def _chunks(b: Weights) -> Chunks:
    return Chunks(b.values, b.k // GROUP + b.further_steps, b.further_steps)


def _gate_up_chunks(w13: Weights) -> Chunks:
    return _chunks(w13)._replace(groups=w13.n // (2 * GROUP))


def weights_map(b: Weights, box_rows: int, l2_fetch: int) -> TensorMap | Chunks:
    if b.format is PACKED_MXFP4:
        return _chunks(b)
    columns, pitch = b.extent or (b.k, b.k)
    sizes, box = (b.nbytes(columns), b.experts * b.n), (b.nbytes(GROUP), box_rows)
    return TensorMap(b.values, sizes, (b.nbytes(pitch),), box, 1, l2_fetch)


def halves_map(w13: Weights) -> TensorMap | Chunks:
    """Returns the map of `[E, 2I, K]` in boxes of 128 rows of either half. Chunks have rows of both."""
    return _gate_up_chunks(w13) if w13.format is PACKED_MXFP4 else weights_map(w13, GROUP, L2_FETCH)


def gate_up_map(w13: Weights) -> TensorMap | Chunks:
    """Returns the map of `[E, 2I, K]` with dimensions `[K, 8, 2, ..]`.

    A box alternates between 8 rows of the gate half and the same 8 rows of the up half, 16 times. Chunks do anyway.
    """
    if w13.format is PACKED_MXFP4:
        return _gate_up_chunks(w13)
    half, row = w13.n // 2, w13.nbytes(w13.k)
    sizes = (row, 8, 2, (w13.experts * w13.n - half) // 8)
    strides, box = (row, half * row, 8 * row), (w13.nbytes(GROUP), 8, 2, GROUP // 8)
    return TensorMap(w13.values, sizes, strides, box, 1, whole_rows_l2_fetch(w13.k))


def octets_map(address: Address, rows: int, k: int, box_rows: int) -> TensorMap:
    """Returns the map of e4m3 `[rows, k]` whose boxes reorder each 16 rows: the eight even ones, then the odd ones.

    These rows are the columns of wgmma's sums. A thread holds two columns of each eight, so that its four columns are
    consecutive rows in memory. The last dimension counts units of 16 rows.
    """
    sizes, strides = (k, 8, 2, rows // 16), (2 * k, k, 16 * k)
    return TensorMap(address, sizes, strides, (128, 8, 2, box_rows // 16), 1, L2_FETCH)


def interleaved_map(w13: Weights) -> TensorMap | Chunks:
    """Returns the map of all rows in boxes of 64, reordered to match the layout of wgmma's sums.

    A thread holds two of the 64 rows, 8 apart. Together with its two rows of the other box, these are four consecutive
    rows in memory. Box i begins at row 2i of the third dimension. Chunks have an order of their own.
    """
    if w13.format is PACKED_MXFP4:
        return _gate_up_chunks(w13)
    rows, row = w13.experts * w13.n, w13.nbytes(w13.k)
    sizes, strides, box = (row, 8, 4, rows // 32), (4 * row, row, 32 * row), (w13.nbytes(GROUP), 8, 2, 4)
    return TensorMap(w13.values, sizes, strides, box, 1, STREAMED_L2_FETCH)
