"""Constants of the heuristics of the Triton kernels, as those of plan/tuning.py."""

# The most rows per expert on average for which the Triton kernels have tiles of 16 rows, instead of 64.
# Measured: 16 rows per expert 467 us and 512 at TP8, 200 and 238 at Qwen3; 32 rows per expert 672 and 558, 264 and
# 230 ([057]).
# Measure again: `python -m benchmarks.layer.triton_backend --tiles`, on each kind of GPU.
TRITON_FEW_ROWS = 16

# The most rows per expert on average for which the Triton kernels for small batches serve a step. They read the
# weights of an expert for each of its rows.
# Measured: on an H200 5 to 8% faster than tiles of 16 rows with 4 tokens at TP8 and 2 at Qwen3, which are 0.125; 9 to
# 16% slower with twice as many ([063]).
# Measure again: as TRITON_FEW_ROWS.
TRITON_SMALL_BATCH = 0.125

# The programs per SM of a dense Triton GEMM of up to 16 rows, below which its tiles have 32 columns instead of 128.
# Measured: not yet.
# Measure again: when a dense layer is measured on Triton kernels.
TRITON_DENSE_SHARE = 0.75
