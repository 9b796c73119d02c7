"""Constants of the heuristics. Each comment becomes a section of docs/tuning.md by `python -m benchmarks.tables`.

They affect the speed of a step and, where they split a sum over K, its low-order bits; never what is computed. The
first sentence of a comment says what a constant decides. Numbers in brackets are records in docs/experiments.
"""

# The most rows per expert, on average, for which a step or a masked or psum GEMM runs the kernels for few rows, which
# stream the weights, instead of those for many rows.
# Measured: layers with 32 and 40 rows per expert take 0.95 to 1.00 of the time of the kernels for many rows, with 48
# 0.98 to 1.01, with 64 1.07 to 1.28, as many experts then have more than 64 rows and load their weights twice ([073]).
# Measure again: when the loads of either kind of tile change, or for channels other than 256, 768 and 2048.
FEW_ROWS_PER_EXPERT = 40

# The most rows that a caller of batched experts may expect for the same, if `FEW_ROWS_PER_EXPERT` is not less.
# Measured: with up to 28 rows they take 0.74 to 1.00 of the time of the kernels for many rows, with 32 and 40 in
# DeepEP's layout of scales 0.97 to 1.06 ([129]).
# Measure again: with `FEW_ROWS_PER_EXPERT`, or if the scales of a row are next to each other: 0.88 to 1.01 there.
BATCHED_FEW_ROWS = 28

# The most rows per expert, on average, for which a step of experts in packed MXFP4 runs the kernels for few rows with
# tiles of 64 rows. Those for many decode weights once for up to 256. Of batched experts, the rows that are expected.
# Measured: layers of four shapes take 0.97 to 0.99 of the time with wide tiles with 56 rows per expert, 1.00 to 1.03
# with 60, 1.06 to 1.09 with 64; experts of 512 and 256 channels, without them, 0.94 and 0.97 with 60 ([153]).
# Measure again: when either change, and `MXFP4_ROWS_PER_EXPERT` with it; on an H100; batched experts.
PACKED_FEW_ROWS_PER_EXPERT = 60

# The same for the kernels for few rows with wide tiles, which hold 120 rows. If that is 0, no step has wide tiles.
# Measured: layers of three shapes take 0.84 and 0.85 of the time of the kernels for many rows with 72 to 75 rows per
# expert, 0.87 to 0.89 with 80 to 85, 0.94 to 0.97 with 96, 1.00 to 1.04 with 104 to 108 ([150]).
# Measure again: with `PACKED_FEW_ROWS_PER_EXPERT`; on an H100, which takes them from 57 rows on.
PACKED_WIDE_ROWS_PER_EXPERT = 100

# The fewest intermediate channels of an expert with which its steps have wide tiles.
# Measured: with 72, 84 and 96 rows per expert 0.91, 0.93 and 1.00 of the time with 1024 channels, 0.95, 0.98 and 1.05
# with 512, 1.02, 1.04 and 1.10 with 256 ([150]).
# Measure again: with `PACKED_WIDE_ROWS_PER_EXPERT`.
PACKED_WIDE_FROM = 1024

# The most rows per expert, on average, for which `fp8moe-warmup explain` takes experts in MXFP4 to be faster packed
# than in block FP8, by GPU; experts of `PACKED_WIDE_FROM` channels. No plan depends on it.
# Measured: on an H200, packed layers of three shapes take 0.77 to 0.95 of the time in block FP8 with 53 to 80 rows per
# expert, with 84 and 85 0.97 and 0.96, with 96 1.03 ([152]). On an H100 0.81 to 0.93 with 85 and 96, gpt-oss's 1.02
# with 128 ([098]).
# Measure again: with `PACKED_WIDE_ROWS_PER_EXPERT`; between 96 and 128 rows on an H100.
MXFP4_ROWS_PER_EXPERT = {"H200": 88, "H100": 96}

# The same for experts of fewer channels.
# Measured: on an H200, those of an eighth of DeepSeek-V4-Flash's channels take 0.86 with 48 rows per expert, 0.99 with
# 60 and 1.09 with 72 ([152]); on an H100 0.93 with 96 ([098]).
# Measure again: as `MXFP4_ROWS_PER_EXPERT`.
MXFP4_ROWS_PER_NARROW_EXPERT = {"H200": 60, "H100": 96}

# The most intermediate channels of an expert for which GEMM 1 gathers its tokens from those of the step, instead of
# reading a permuted copy. The kernels for few rows gather, but see `PACKED_COPIES_FROM`.
# Measured: GEMM 1 and quantize together gain 18% at TP8 (256 channels) with 4096 tokens and 4% at Qwen3 (768); a
# layer at EP1 (2048) gains 1% after a pause and loses 1.5% in steady state ([009]).
# Measure again: when the scales of several K blocks are copied at once, or for a model with 1024 to 2048 channels.
GATHER_UP_TO = 1024

# The smallest product of the rows per expert, on average, and intermediate channels for which GEMM 1 of experts in
# packed MXFP4 reads a permuted copy in the kernels for few rows, too.
# Measured: layers of seven shapes take 0.99 to 1.07 of the time with gathered tokens up to 12 thousand, 0.96 to 1.00
# with 24 and 33 thousand, 0.94 to 0.97 with 48 thousand and 0.91 to 0.96 from 65 thousand on ([127]).
# Measure again: between 13 and 23 thousand, on an H100, or when either way of loading tokens changes.
PACKED_COPIES_FROM = 2**14

# The fewest intermediate channels with which GEMM 2 starts early (PDL), before GEMM 1 ends, for any number of rows.
# Measured: Qwen3 (768 channels) gains 1 to 2%, EP1 (2048) 0 to 1%; TP8 (256) loses 1 to 4% with many rows ([011]).
# Measure again: when the claim of a tile gets cheaper, or for 384 to 640 channels, which were not measured.
EARLY_FROM = 768

# The average rows per expert below which GEMM 2 starts early for narrow experts, too, and from which on it may keep
# weights (`KEEP_B_UP_TO`).
# Measured: TP8 with 128 rows per expert (4096 tokens) 725 to 677 us when it starts early and takes its tiles from the
# counter; with 256 rows it loses 1%. Runs of tiles that keep weights lose 1% at 128 rows and gain from 256 on ([011],
# [012]).
# Measure again: together with `EARLY_FROM` and `KEEP_B_UP_TO`; nothing between 128 and 256 rows was measured.
EARLY_BELOW = 192

# The most intermediate channels for which GEMM 2 keeps weights in shared memory for runs of row tiles of the same
# columns, if experts have `EARLY_BELOW` rows or more.
# Measured: 1 to 3% of a layer at 256 channels after a pause, 3 to 4% sustained; 6 to 8% at 128 channels with 16384
# tokens. Runs of 4 tiles; runs of 8 are slower everywhere ([012]).
# Measure again: when shared memory or the stages of GEMM 2 change; 384 channels were not measured.
KEEP_B_UP_TO = 256

# The most bytes of expert weights that a step may be expected to read to run the small-batch kernels.
# Measured: 3 to 16 tokens of whole layers of five models, 0.9 to 5.6 GB, take 0.95 to 1.01 of the time with the other
# kernels ([120]). On an H100 `fp8moe-warmup tune` kept 768 MiB twice, as no other value gained 1% ([091], [107]).
# Measure again: for steps that are expected to read more, weights with a scale for each row, or `FP8MOE_EP=push`.
SMALL_BATCH_BYTES = 2**33

# The same for up to eight tokens of experts in packed MXFP4.
# Measured: steps that read 320 MB take 0.98 and 1.00 of the time with the other kernels, six tokens of gpt-oss, 331 MB,
# 1.02, eight of V4-Flash, 640 MB, 1.09 and 1.14, two to eight of smaller layers 0.52 to 0.97 ([153]).
# Measure again: when kernels for few rows of packed MXFP4 change.
PACKED_SMALL_BATCH_BYTES = 5 * 2**26

# The same for nine to sixteen tokens, where it is less.
# Measured: nine and twelve tokens of an eighth of DeepSeek-V4-Flash's channels, 90 and 120 MB, take 0.82 and 0.93 of
# the time with the other kernels, sixteen, 160 MB, 1.02; twelve of a rank of V4-Pro, 420 MB, 1.14 ([115]).
# Measure again: on an H100.
PACKED_WIDE_BATCH_BYTES = 2**27

# The fewest K blocks per block of gate_up_small_batch in a batch of 9 to 16 tokens.
# Measured: Qwen3 (hidden 2048) with clusters of eight, two K blocks per block, was slower than five launches at 12
# and 16 tokens; with clusters of four, four K blocks, it is faster ([021], [022]).
# Measure again: for a model with a hidden size below 2048.
MIN_K_BLOCKS = 4

# How many SMs gate_up_small_batch leaves idle, because the GPCs do not divide evenly into clusters of eight.
# Measured: an H200 has room for 15 clusters of eight; the 16th waits: 22 us instead of 17.9, 95 instead of 82 ([021]).
# Measure again: on any other GPU; `cuOccupancyMaxActiveClusters` gives the number.
SPARE_MULTIPROCESSORS = 8

# The most tiles per cluster for which gate_up_small_batch uses all SMs nevertheless, some shared by two clusters.
# Measured: with few tiles each, sharing costs less than another wave of tiles ([021]). The value was not varied.
# Measure again: with `SPARE_MULTIPROCESSORS`.
TILES_PER_CLUSTER = 3

# The fewest blocks of down_small_batch, by padded token count, and hence how many share 128 channels by splitting K.
# Measured: the second GEMM takes memory bandwidth from the first. Qwen3 with 8 tokens is fastest with clusters of 4
# (61.7 us; 8: 66.3), with 16 tokens with 5 (95 to 98 us; 4: 100, 6: 99); TP8 with clusters of 2 instead of 4 ([025]).
# Measure again: when the stages of either small-batch kernel change (`SMALL_BATCH_STAGES`).
DOWN_BLOCKS = {8: 64, 16: 80}

# The fewest blocks of down_small_batch of packed MXFP4, for any number of tokens.
# Measured: one token of DeepSeek-V4-Flash takes 0.96 of its time before with clusters of two and 0.84 with three, one
# and two of gpt-oss 0.94 and 0.96 with three, 0.88 and 0.88 with four. Of 115 or 128 blocks, in clusters of five or
# four, the last wait until others have ended: up to 1.25 ([115]).
# Measure again: with `DOWN_BLOCKS`.
PACKED_DOWN_BLOCKS = 80

# How many stages of weights each block of gate_up_small_batch starts to load before down_small_batch starts (PDL),
# which then takes bandwidth for its own; 0: it starts at once. A stage has as many bytes as the format and the kernel's
# number of tokens say.
# Measured: of the time with 0 stages, one token of four models takes 0.92 to 1.00, 2 to 16 tokens 0.97 to 1.00, but two
# of GLM-4.6 under TP4 1.02. 8 stages gain less on average, 16 and 32 lose up to 1.05 and 1.12 ([123]).
# Measure again: when the stages of either small-batch kernel change (`SMALL_BATCH_STAGES`); weights with a scale for
# each row, and biases, which were not measured.
STAGES_BEFORE_DOWN = 4

# As STAGES_BEFORE_DOWN, for packed MXFP4, in batches of more than `PACKED_UNDELAYED_TILES` tiles per cluster.
# Measured: 13 layers with 4.6 to 51 tiles per cluster take 0.91 to 1.00 of the time, 0.976 on average. 4 stages 0.95 to
# 1.00, 16 0.97 to 1.03, 32 1.02 to 1.33 ([123]).
# Measure again: with `STAGES_BEFORE_DOWN`.
PACKED_STAGES_BEFORE_DOWN = 8

# The most tiles per cluster of gate_up_small_batch, as expected of the rank's experts, for which down_small_batch of
# packed MXFP4 starts at once: it has little time to load its weights beside the first GEMM then.
# Measured: with 8 stages, six layers with 1 to 3 tiles per cluster take 1.01 to 1.10 of the time, layers with 4.6
# and 6 tiles 1.00 and 0.91 to 0.98 ([123]). None of them had experts on other ranks.
# Measure again: with `PACKED_STAGES_BEFORE_DOWN`.
PACKED_UNDELAYED_TILES = 4

# The largest dense layer, in tokens, for which a warp of quantize takes two tokens instead of eight.
# Measured: 5120x2048 and 7168x2048 with 32 to 256 tokens take 0.2 to 0.7 us less, most shapes with 8,192 1.5 to 3%
# more ([070]).
# Measure again: for GPUs with other numbers of SMs.
QUANTIZE_FEW_TOKENS = 256

# The most bytes of a rank's window, in which tokens of other ranks arrive under expert parallelism (FP8MOE_EP=push);
# steps of more tokens use the engine's all-to-all.
# Measured: the value was not varied. 8 ranks of DeepSeek-V3 have room for 6,000 tokens of each rank. On 4 ranks, steps
# of 4,096 tokens of each take 0.73 and 0.78 of the time with NCCL ([081]).
# Measure again: for steps of more than 4,096 tokens of each rank, or on 8 ranks.
EP_WINDOW_BYTES = 2**30

# The fewest ranks of a group with windows (FP8MOE_EP=push) in which GEMM 2 for many rows stores each row into the
# window of its token's rank, in place of one sum of each rank.
# Measured: on 4 H200 a layer takes 0.90 to 0.98 of the time (`PUSHED_ROWS_PER_EXPERT`). On 2, with 4,096 tokens of each
# rank, one of DeepSeek-V4-Flash takes 0.99 and one of DeepSeek-V3 1.03 ([088]).
# Measure again: on 3 and on 8 GPUs.
PUSHED_ROWS_RANKS_FROM = 4

# The most rows per expert, on average, for which GEMM 2 pushes rows. Windows have room for them.
# Measured: on 4 H200, layers of DeepSeek-V4-Flash with 48, 96, 192 and 384 rows per expert take 0.94, 0.90, 0.94 and
# 0.97 of their time with sums, those of DeepSeek-V3 with 64, 128, 256 and 512 rows 0.97, 0.95, 0.98 and 1.01 ([094]).
# Measure again: on 8 GPUs; between 384 and 512 rows; for experts of up to `GATHER_UP_TO` channels, formats other than
# block FP8, and biases, which keep sums.
PUSHED_ROWS_PER_EXPERT = 400

# The SMs for which splits of K, and the tiles of dense layers on a machine without a GPU, are planned.
# Measured: the number of an H100 SXM and of an H200.
# Measure again: for a GPU with another number, such as an H20 with 78 SMs: splits of K and dense tiles.
MULTIPROCESSORS = 132

# The most bytes of partial sums for which blocks of gate_up_few_rows share a tile by splitting K.
# Measured: with 8 tokens of TP8, where all SMs have tiles, 1, 2 and 4 splits take 94, 98 and 100 us; the sums of 8
# splits cost 2 us with all reads in flight ([020]).
# Measure again: no tested model on up to 8 ranks reaches a split; measure on 16 to 64 expert-parallel ranks first.
SPLIT_BYTES = 2**23

# The K blocks over which a block of grouped_gemm_few_rows amortises the setup of a tile, by taking several column
# tiles of one row tile at once.
# Measured: GEMM 2 at K 256 ran at 3.1 TB/s because computing a tile took as long as its loads. TP8 with 64 tokens 332
# to 310 us, with 512 tokens 417 to 384 us ([020]); 1, 2 and 4 at once for Qwen3: within 1% ([028]).
# Measure again: when the producer's work per tile changes.
K_BLOCKS_PER_SETUP = 8

# The number of channels from which K is long: dense GEMMs with few rows and few columns then split K
# (dense_gemm_few_rows), and blocks that read whole rows of weights have L2 fetch 256 bytes.
# Measured: 2112x7168 takes 12 to 22% less time with K split, 24576x1536 and 32768x512 lose except at one row ([031]).
# 256 bytes of L2 fetch take 36864x7168 with 32 rows from 78.4 to 77.2 us and are slower at short K ([030]).
# Measure again: for dense layers with K from 2048 to 7168, where nothing was measured in between.
LONG_K = 4096

# The blocks per cluster of dense_gemm_few_rows, which share a tile by splitting K.
# Measured: 2112x7168 with one row / 64 rows, 1, 2, 3, 4, 6 blocks: 13.2 / 19.3, 8.2 / 12.4, 7.4 / 10.4, 8.7 / 10.5,
# 8.7 / 10.2 us ([031]).
# Measure again: for other numbers of columns that meet the condition, up to 2816.
DENSE_SPLITS = 3

# The most rows for which dense_gemm runs any dense layer; with more, it runs if its largest tiles fit one wave, or if
# its waves take less time than those of other kernels (`DENSE_COST`).
# Measured: from 512 rows on, tiles of 256 columns (grouped_gemm) win unless one wave suffices: 2112x7168 with 512
# rows 30.6 to 20.4 us, 4096x7168 with 512 rows 32.8 to 29.3 us ([030]).
# Measure again: when grouped_gemm or dense_gemm change; 384 to 512 rows were not measured in between.
DENSE_ROWS = 384

# How many results dense_gemm is assumed to store in the time in which it loads one K block of a row, in the cost
# model that chooses its tile.
# Measured: fitted so that the model chooses the fastest of the tiles that were timed for five shapes with 1 to 256
# rows; `tests/plan/test_dense.py` pins these choices ([030]).
# Measure again: when the epilogue of dense_gemm changes.
DENSE_STORE = 16

# The columns per tile of dense_gemm that are chosen only for more than `DENSE_ROWS` rows, with 128 rows per tile. The
# choices for fewer rows stay those that were measured.
# Measured: nothing with these widths and up to 384 rows.
# Measure again: 7168 and 36864 columns with 257 to 384 rows, where the model of `DENSE_STORE` prefers 176 columns to
# 192 by 5%.
DENSE_MANY_ROWS_TILE_N = (160, 176)

# The most rows for which dense_gemm is chosen by its waves.
# Measured: each wave of dense_gemm reads all rows from memory if they do not stay in L2. With 8192 rows of 2112x7168,
# 1.05 MB per K block, tiles of 192 columns take 2% longer than the model says ([048]); with 16,384 rows the waves
# would read 3.6 TB/s.
# Measure again: when dense_gemm divides row tiles into groups, as grouped_gemm does.
DENSE_WAVE_ROWS = 8192

# The fewest channels of K for which the kernel of many rows is chosen by its waves; with fewer it is grouped_gemm.
# Measured: K of 1536, 2048, 7168 and 16384. The shorter K is, the more the stores count, which the model leaves out:
# 32768x512 with 4096 rows takes 130.0 us in grouped_gemm, 130.1 in dense_gemm_many_rows with 256 columns, 134.5 with
# 192 ([058]).
# Measure again: when an epilogue changes, or for layers with K of 512 and 1024.
DENSE_WAVE_K = 1536

# How many columns are added to those of a tile to model the time of a wave of many rows.
# Measured: fitted to 33 times of dense_gemm with tiles of 112 to 192 columns and 10 of grouped_gemm, 1024 to 8192
# rows. With 1.06 for dense_gemm the ratio of both kernels is off by 6% on average (root mean square), at
# 2048x2112x7168, where dense_gemm wins, by 1 to 5% ([048]).
# Measure again: when the main loop of either kernel changes.
DENSE_WAVE_COLUMNS = 16

# How long a wave of dense_gemm takes in the model, as a multiple of one of grouped_gemm: 1.06, what its tiles take
# longer per column, and 8% for the error of the model.
# Measured: as `DENSE_WAVE_COLUMNS`. With the best of 112, 128, 144 and 192 columns dense_gemm takes 0.63 of
# grouped_gemm's time at 2048x2112x7168, and 0.99 to 1.12 at the eight other shapes that were measured; the model is
# too low by at most 5% there with 128 columns and more.
# Measure again: when either kernel changes.
DENSE_COST = 1.15

# How long a wave of dense_gemm_many_rows takes in the model, by the columns of its tiles, as a multiple of one of
# grouped_gemm.
# Measured: 256 columns take 0.91 to 1.0 of grouped_gemm's time at 14 shapes. Per column and wave, with the constant
# of `DENSE_WAVE_COLUMNS`, 192 columns take 0.85 to 1.03 of that of 256, 176 and 144 columns 0.98 to 1.15 of that of
# 192. With these factors the model chooses the fastest of all that were measured, or one within 0.5% ([058]);
# `tests/plan/test_dense.py` pins these choices.
# Measure again: when either kernel changes.
DENSE_CLUSTER_COST = {144: 0.985, 176: 0.985, 192: 0.945, 256: 0.96}

# The bytes of weights above which dense_gemm has as few row tiles as possible, because row tiles of the same columns
# do not run in lockstep and would read the weights again.
# Measured: 7168x16384 (117 MB) with 128 rows in 64x112 tiles: 38 us alone, but 49 us after the quantization; in
# 128x64 tiles 40 and 43 us ([030]). The value was not varied; of the measured shapes 4096x7168 (29 MB) is below it
# and 24576x1536 (38 MB) above. L2 has 50 MB.
# Measure again: on a GPU with another L2.
L2_BYTES = 2**25

# The tokens per rank from which on they are sent to other ranks in e4m3 with scales, instead of bfloat16, through an
# all-gather. The largest number of a rank counts, because all ranks have to choose alike.
# Measured: on 4 H200 over NCCL, DeepSeek-V4-Flash's layer with its all-gather and reduce-scatter takes 85.6, 267, 409,
# 482, 592 and 2187 us in bfloat16 with 1, 8, 32, 128, 512 and 4096 tokens per rank, and 95.4, 274, 409, 476, 562 and
# 1888 us in e4m3 ([081]). On 8 it took 340 and 347 us with 128, when gathered tokens were quantized twice.
# Measure again: on 8 GPUs with 128 and 256 tokens.
QUANTIZED_TOKENS = 256

# How many bytes L2 fetches from memory when it misses on a row of a box, for operands that several blocks read.
# Measured: prefill prefers 256 bytes: TP8 with 8192 tokens 1137 us, 1154 us with 128; GEMM 1 of EP1 loses 1% with 128
# ([024], [002]).
# Measure again: on a GPU with another memory.
L2_FETCH = 256

# How many bytes L2 fetches for a row of a box of weights that are read once. Another block fetches the neighbouring 128
# bytes in time anyway.
# Measured: 4.16 to 4.58 TB/s for GEMM 2 of EP1, 1 to 4% of a layer up to 16 tokens; no promotion and 64 bytes behave
# alike ([024]).
# Measure again: on a GPU with another memory.
STREAMED_L2_FETCH = 128
