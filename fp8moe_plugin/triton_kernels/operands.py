"""Which part of a GEMM a program computes, and where its operands are."""

import triton
import triton.language as tl


@triton.jit
def tile_of_program(row_tiles, columns, group_m):
    """Row tile and column tile; consecutive programs share `group_m` row tiles, column by column."""
    program = tl.program_id(0)
    first = program // (group_m * columns) * group_m
    size = tl.minimum(row_tiles - first, group_m)
    within = program % (group_m * columns)
    return first + within % size, within // size


@triton.jit
def rows_of_tile(table, tile, m, grouped, BLOCK_M: tl.constexpr):
    """The expert of a tile, its rows and their end. Without a table all `m` rows are those of expert 0."""
    entry = table + 4 * tile
    begin = tl.where(grouped != 0, tl.load(entry + 1, grouped != 0, 0), tile * BLOCK_M)
    end = tl.where(grouped != 0, tl.load(entry + 2, grouped != 0, 0), m)
    rows = begin + tl.arange(0, BLOCK_M)
    return tl.load(entry, grouped != 0, 0), rows, end


@triton.jit
def sources(a_rows, rows, end, gathered):
    """The rows of the activations that a tile reads, of existing ones also where the tile has none.

    `gathered`: 1 if `a_rows` says which, else 0.
    """
    direct = tl.where(rows < end, rows, tl.min(rows, 0))
    return tl.where(gathered != 0, tl.load(a_rows + rows, rows < end * gathered, 0), direct).to(tl.int64)


@triton.jit
def empty_sums(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr):
    """Zeros for `add_product`."""
    if SWAP:
        return tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def scaled_columns(total, scales, SWAP: tl.constexpr):
    """`total` times the scale of each row of weights."""
    if SWAP:
        return total * scales[:, None]
    else:
        return total * scales[None, :]


@triton.jit
def plus_biases(total, bias_at, SWAP: tl.constexpr, BIAS: tl.constexpr):
    """`total`, with BIAS plus the bias of each row of weights."""
    if BIAS and SWAP:
        return total + tl.load(bias_at)[:, None]
    elif BIAS:
        return total + tl.load(bias_at)[None, :]
    else:
        return total


@triton.jit
def add_product(total, x, w, row_scales, w_scale, SWAP: tl.constexpr):
    """`total` with the scaled `x @ w.T` of a K block added.

    With SWAP both are transposed, which wastes less of a tensor core if there are few rows.
    """
    if SWAP:
        return total + tl.dot(w, tl.trans(x)) * (row_scales * w_scale)[None, :]
    else:
        return total + tl.dot(x, tl.trans(w)) * (row_scales * w_scale)[:, None]
