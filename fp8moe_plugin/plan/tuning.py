"""Constants of the heuristics: each was measured, and docs/tuning.md says how and when to measure it again.

They change the speed of a step and, where they divide a sum over K, its last bits; never what is computed.
"""

# Rows an expert gets on average up to which a step runs the kernels for few rows.  docs/tuning.md#FEW_ROWS_PER_EXPERT
FEW_ROWS_PER_EXPERT = 24

# Intermediate channels of an expert up to which GEMM 1 gathers tokens instead of reading a copy of them for each
# expert.  docs/tuning.md#GATHER_UP_TO
GATHER_UP_TO = 1024

# GEMM 2 starts while GEMM 1 ends where experts have at least this many intermediate channels, or fewer than this many
# rows on average.  docs/tuning.md#EARLY_FROM, docs/tuning.md#EARLY_BELOW
EARLY_FROM = 768
EARLY_BELOW = 192

# Intermediate channels of an expert up to which GEMM 2 keeps weights in shared memory from tile to tile, if experts
# have EARLY_BELOW rows or more.  docs/tuning.md#KEEP_B_UP_TO
KEEP_B_UP_TO = 256

# Bytes of expert weights that a step is expected to read up to which the small-batch kernels may run it.
# docs/tuning.md#SMALL_BATCH_BYTES
SMALL_BATCH_BYTES = 3 * 2**28

# Fewest K blocks (of 128 channels) per block of gate_up_small_batch for 9 to 16 tokens.
# docs/tuning.md#MIN_K_BLOCKS
MIN_K_BLOCKS = 4

# Multiprocessors that gate_up_small_batch leaves idle where its clusters would not fit the parts of the GPU evenly.
# docs/tuning.md#SPARE_MULTIPROCESSORS
SPARE_MULTIPROCESSORS = 8

# Tiles per cluster of gate_up_small_batch up to which it takes all multiprocessors nevertheless.
# docs/tuning.md#TILES_PER_CLUSTER
TILES_PER_CLUSTER = 3

# Fewest blocks of down_small_batch, by padded token count.  docs/tuning.md#DOWN_BLOCKS
DOWN_BLOCKS = {8: 64, 16: 80}

# Multiprocessors of an H100 or H200, where only the speed depends on their number.  docs/tuning.md#MULTIPROCESSORS
MULTIPROCESSORS = 132

# Bytes of partial sums up to which blocks of gate_up_few_rows share a tile by splitting K.  docs/tuning.md#SPLIT_BYTES
SPLIT_BYTES = 2**23

# K blocks over which a block of grouped_gemm_few_rows amortises the setup of a tile, by taking several columns of tiles
# at once.  docs/tuning.md#K_BLOCKS_PER_SETUP
K_BLOCKS_PER_SETUP = 8

# Channels of K from which a row of weights is long: dense GEMMs of few rows split K, and blocks that read whole rows
# fetch 256 bytes at a time.  docs/tuning.md#LONG_K
LONG_K = 4096

# Blocks that share a tile of dense_gemm_few_rows by splitting K: a cluster.  docs/tuning.md#DENSE_SPLITS
DENSE_SPLITS = 3

# Rows up to which dense_gemm runs a dense layer of any width.  docs/tuning.md#DENSE_ROWS
DENSE_ROWS = 384

# Results that dense_gemm stores in the time in which it loads 128 K of a row.  docs/tuning.md#DENSE_STORE
DENSE_STORE = 16

# Bytes of weights that stay in L2 from one tile of dense_gemm to the next.  docs/tuning.md#L2_BYTES
L2_BYTES = 2**25

# Bytes that L2 fetches from memory for 128 bytes of a row: of operands that several blocks read, and of weights that
# are read once, where the neighbouring 128 bytes, which another block wants, arrive in time anyway.
# docs/tuning.md#L2_FETCH, docs/tuning.md#STREAMED_L2_FETCH
L2_FETCH = 256
STREAMED_L2_FETCH = 128
