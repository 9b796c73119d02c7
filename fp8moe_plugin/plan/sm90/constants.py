"""Constants that Python and the kernels share: every kernel is compiled with them as macros.

A constant becomes a macro of the same name; an enum member is prefixed with its enum: `Output.BF16` is OUTPUT_BF16.
"""

from enum import IntEnum

from fp8moe_plugin.checkpoint.shapes import MAX_LOCAL_EXPERTS
from fp8moe_plugin.plan.spec import Output

# ---- rows ----------------------------------------------------------------------------------------------------------

MANY_ROWS_TILE = 128  # rows per tile of the kernels for many rows per expert, without the tail
TAIL_ROWS = 16  # most rows of the tail of such a tile
FEW_ROWS_TILE = 64  # rows per tile of the kernels for few rows per expert
WIDE_FEW_ROWS_TILE = 120  # the same of wide tiles of packed weights
PAIRS_PER_CHUNK = 1024  # (token, expert) pairs per block of route, one per thread
NUM_TILES_LENGTH = 5  # elements of num_tiles: the number of tiles, and two pairs of counters for claiming tiles
TOKENS_PER_WARP, FEW_TOKENS_PER_WARP = 8, 2  # in quantize
ROWS_PER_WARP = 8  # in silu_mul_quant
SCALE_TILE_ROWS, SCALE_TILE_K = 64, 32  # rows and K blocks that a block of transpose_scales copies at once

# ---- boxes of TMA loads and stores -----------------------------------------------------------------------------------

SWIZZLE_ROWS = 8  # rows of a swizzle atom: the finest unit in which rows can be loaded
BOX_ROWS = 64  # rows that a math warpgroup multiplies, in the kernels for many rows
FEW_ROWS_TALL_BOX = 32  # rows of a tall box of grouped_gemm_few_rows; the rest of a tile comes in SWIZZLE_ROWS
FEW_ROWS_TILE_N = 128  # columns per tile of grouped_gemm_few_rows
WIDE_FEW_ROWS_TILE_N = 256  # the same, in wide tiles
DENSE_FEW_ROWS_TILE_N = 64  # columns per tile of dense_gemm_few_rows

# ---- limits ----------------------------------------------------------------------------------------------------------

MAX_CLUSTER_SPLITS = 8  # blocks per cluster, which share a tile by splitting K
MAX_GATE_UP_SPLITS = 8  # blocks of gate_up_few_rows that share a tile by splitting K
MAX_ROUTER_EXPERTS = 512  # experts of a router, in choose_experts
MAX_ROUTER_TOPK = 32  # experts that choose_experts chooses for a token, one per lane
SMALL_BATCH_PAIRS = 176  # (token, expert) pairs in a small batch
SMALL_BATCH_K_BLOCKS = 8  # K blocks per block of gate_up_small_batch

# ---- logits of an indexer --------------------------------------------------------------------------------------------

MQA_TILE_ROWS = 64  # KV rows of a tile, and of a page
MQA_COLUMNS = 256  # heads of all tokens of a tile of mqa_logits
MQA_SPLIT_ROWS = 256  # KV rows per split, the unit in which paged_mqa_metadata assigns work


class Layout(IntEnum):
    """How quantize writes tokens and their scales."""

    K_MAJOR = 0  # scales K-major
    ROW_MAJOR = 1  # scales row-major
    PERMUTED = 2  # a copy of the token for each of its experts; scales K-major


MACROS: dict[str, int] = {
    "MAX_LOCAL_EXPERTS": MAX_LOCAL_EXPERTS,
    **{name: value for name, value in globals().items() if name.isupper() and isinstance(value, int)},
    **{f"{kind.__name__.upper()}_{member.name}": int(member) for kind in (Output, Layout) for member in kind},
}
