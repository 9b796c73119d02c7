"""Constants of the heuristics: each was measured, and docs/tuning.md says how and when to measure it again.

They affect the speed of a step and, where they split a sum over K, its low-order bits; never what is computed.
"""

# Most rows per expert on average for which steps and grouped GEMMs run the kernels for few rows.
# docs/tuning.md#FEW_ROWS_PER_EXPERT
FEW_ROWS_PER_EXPERT = 40

# Most intermediate channels of an expert for which GEMM 1 gathers tokens instead of reading a copy of them for each
# expert.  docs/tuning.md#GATHER_UP_TO
GATHER_UP_TO = 1024

# GEMM 2 starts early (PDL) if experts have at least EARLY_FROM intermediate channels, or fewer than EARLY_BELOW rows on
# average.  docs/tuning.md#EARLY_FROM, docs/tuning.md#EARLY_BELOW
EARLY_FROM = 768
EARLY_BELOW = 192

# Most intermediate channels of an expert for which GEMM 2 keeps weights in shared memory from tile to tile, if experts
# have EARLY_BELOW rows or more.  docs/tuning.md#KEEP_B_UP_TO
KEEP_B_UP_TO = 256

# Most bytes of expert weights that a step may be expected to read to run the small-batch kernels.
# docs/tuning.md#SMALL_BATCH_BYTES
SMALL_BATCH_BYTES = 3 * 2**28

# Fewest K blocks (of 128 channels) per block of gate_up_small_batch for 9 to 16 tokens.  docs/tuning.md#MIN_K_BLOCKS
MIN_K_BLOCKS = 4

# SMs that gate_up_small_batch leaves idle because the GPCs do not divide evenly into clusters.
# docs/tuning.md#SPARE_MULTIPROCESSORS
SPARE_MULTIPROCESSORS = 8

# Most tiles per cluster of gate_up_small_batch for which it uses all SMs nevertheless.
# docs/tuning.md#TILES_PER_CLUSTER
TILES_PER_CLUSTER = 3

# Fewest blocks of down_small_batch, by padded token count.  docs/tuning.md#DOWN_BLOCKS
DOWN_BLOCKS = {8: 64, 16: 80}

# Most tokens of a dense layer that quantize deals out by FEW_TOKENS_PER_WARP.  docs/tuning.md#QUANTIZE_FEW_TOKENS
QUANTIZE_FEW_TOKENS = 256

# SMs of an H100 SXM or H200, for choices in which their number affects only the speed.  docs/tuning.md#MULTIPROCESSORS
MULTIPROCESSORS = 132

# Most bytes of partial sums for which blocks of gate_up_few_rows share a tile by splitting K.
# docs/tuning.md#SPLIT_BYTES
SPLIT_BYTES = 2**23

# K blocks over which a block of grouped_gemm_few_rows amortises the setup of a tile, by taking several column tiles at
# once.  docs/tuning.md#K_BLOCKS_PER_SETUP
K_BLOCKS_PER_SETUP = 8

# Channels from which K is long: dense GEMMs of few rows split it, and blocks that read whole rows of weights have L2
# fetch 256 bytes.  docs/tuning.md#LONG_K
LONG_K = 4096

# Blocks per cluster of dense_gemm_few_rows, which share a tile by splitting K.  docs/tuning.md#DENSE_SPLITS
DENSE_SPLITS = 3

# Most rows for which dense_gemm runs any dense layer.  docs/tuning.md#DENSE_ROWS
DENSE_ROWS = 384

# Results that dense_gemm stores in the time in which it loads one K block of a row.  docs/tuning.md#DENSE_STORE
DENSE_STORE = 16

# Columns per tile of dense_gemm that are chosen only for more than DENSE_ROWS rows, with 128 rows per tile.
# docs/tuning.md#DENSE_MANY_ROWS_TILE_N
DENSE_MANY_ROWS_TILE_N = (160, 176)

# Most rows, and fewest channels of K, for which dense_gemm is chosen by its waves.  docs/tuning.md#DENSE_WAVE_ROWS,
# docs/tuning.md#DENSE_WAVE_K
DENSE_WAVE_ROWS = 8192
DENSE_WAVE_K = 1536

# Columns that are added to those of a tile to model the time of a wave.  docs/tuning.md#DENSE_WAVE_COLUMNS
DENSE_WAVE_COLUMNS = 16

# How many times the modelled time of dense_gemm must fit in that of grouped_gemm.  docs/tuning.md#DENSE_COST
DENSE_COST = 1.15

# How long a wave of dense_gemm_many_rows takes in the model, by columns per tile, as a multiple of one of grouped_gemm.
# docs/tuning.md#DENSE_CLUSTER_COST
DENSE_CLUSTER_COST = {144: 0.985, 176: 0.985, 192: 0.945, 256: 0.96}

# Bytes of weights that stay in L2 from one tile of dense_gemm to the next.  docs/tuning.md#L2_BYTES
L2_BYTES = 2**25

# Bytes that L2 fetches from memory for 128 bytes of a row: of operands that several blocks read, and of weights that
# are read once, whose neighbouring 128 bytes another block fetches in time anyway.
# docs/tuning.md#L2_FETCH, docs/tuning.md#STREAMED_L2_FETCH
L2_FETCH = 256
STREAMED_L2_FETCH = 128

# Most rows per expert on average for which the Triton kernels have tiles of 16 rows, instead of 64.
# docs/tuning.md#TRITON_FEW_ROWS
TRITON_FEW_ROWS = 16

# Rows per expert on average up to which the Triton kernels for small batches serve a step: they read the weights for
# each row.
# docs/tuning.md#TRITON_SMALL_BATCH
TRITON_SMALL_BATCH = 0.125

# Programs per multiprocessor below which the tiles of a dense Triton GEMM of few rows are narrow.
# docs/tuning.md#TRITON_DENSE_SHARE
TRITON_DENSE_SHARE = 0.75
