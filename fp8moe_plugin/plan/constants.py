"""What Python and the kernels must agree on: every kernel is compiled with these constants as macros.

A constant becomes a macro of its name, and a member of an enum one of both names: `Output.BF16` is OUTPUT_BF16.
"""

from enum import IntEnum

from fp8moe_plugin.checkpoint.shapes import MAX_LOCAL_EXPERTS

# ---- rows ----------------------------------------------------------------------------------------------------------

MANY_ROWS_TILE = 128  # rows of a tile of the kernels for many rows per expert, without its tail
TAIL_ROWS = 16  # rows that such a tile may have in addition
FEW_ROWS_TILE = 64  # rows of a tile of the kernels for few rows per expert
PAIRS_PER_CHUNK = 1024  # (token, expert) pairs of a block of route, one per thread
NUM_TILES_LENGTH = 5  # of int32 num_tiles: the number of tiles, and two pairs of counters with which GEMMs claim them
TOKENS_PER_WARP = 8  # of quantize
ROWS_PER_WARP = 8  # of silu_mul_quant

# ---- boxes of TMA loads and stores -----------------------------------------------------------------------------------

SWIZZLE_ROWS = 8  # rows of a swizzle atom: the finest unit in which rows can be loaded
BOX_ROWS = 64  # rows of tokens that a warpgroup multiplies, in the kernels for many rows
FEW_ROWS_TILE_N = 128  # columns of a tile of grouped_gemm_few_rows
DENSE_FEW_ROWS_TILE_N = 64  # columns of a tile of dense_gemm_few_rows

# ---- limits ----------------------------------------------------------------------------------------------------------

CLUSTER_SPLITS = 8  # blocks of a cluster that split the K of a tile
MAX_SPLITS = 8  # blocks of gate_up_few_rows that split the K of a tile
SMALL_BATCH_PAIRS = 176  # (token, expert) pairs of a small batch
SMALL_BATCH_STEPS = 8  # steps of 128 K of a block of gate_up_small_batch


class Output(IntEnum):
    """How grouped_gemm writes its result."""

    BF16 = 0  # staged in shared memory, stored by TMA
    BF16_DIRECT = 1  # from registers, with an optional addend
    F32_DIRECT = 2  # the same in float32


class Layout(IntEnum):
    """How quantize writes tokens and their scales."""

    K_MAJOR = 0  # scales K-major
    ROW_MAJOR = 1  # scales row-major
    PERMUTED = 2  # a copy of the token for each of its experts; scales K-major


MACROS: dict[str, int] = {
    "MAX_LOCAL_EXPERTS": MAX_LOCAL_EXPERTS,
    **{name: value for name, value in globals().items() if name.isupper()},
    **{f"{kind.__name__.upper()}_{member.name}": int(member) for kind in (Output, Layout) for member in kind},
}
