"""Every kernel there is, and what each is compiled with.

No shape of a model and no number of tokens is in a key: a handful of kernels serves every checkpoint.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from fp8moe_plugin.checkpoint.shapes import GROUP, MAX_LOCAL_EXPERTS, ceil_div
from fp8moe_plugin.plan.parameters import ARGUMENTS
from fp8moe_plugin.plan.tiles import FEW_ROWS_TILE, MANY_ROWS_TILE, PAIRS_PER_CHUNK, TAIL_ROWS

HOPPER = (9, 0)  # the only compute capability with the instructions of the kernels
SMEM_BYTES = 227 * 1024  # of a block, at most
SMEM_ALIGNMENT = 1024
MULTIPROCESSOR_SMEM_BYTES = 228 * 1024  # shared by its blocks, each of which takes 1 KiB more than it asks for
CLUSTER_SPLITS = 8  # most blocks of a cluster that share a tile's K: kMostSplits of csrc/pipeline/cluster_sum.cuh
MAX_SPLITS = 8  # parts of K of a tile of gate_up_few_rows, at most: kMaxSplits of csrc/pipeline/split_k.cuh
DENSE_WIDTHS, DENSE_FEW_ROWS_TILE_N = (8, 16, 32), 64  # padded rows and columns of a tile of dense_gemm_few_rows
DENSE_TILE_M, DENSE_TILE_N = (64, 128), (16, 32, 64, 96, 112, 128, 144, 192)  # rows and columns of one of dense_gemm
GROUPED_TILE_N = (128, 256)  # columns of a tile of grouped_gemm
SMALL_BATCH_WIDTHS = (8, 16)  # padded token counts of the small-batch kernels
SMALL_BATCH_PAIRS = 176  # (token, expert) pairs of a small batch, at most: kMaxPairs of csrc/routing/expert_list.cuh
SMALL_BATCH_STEPS = 8  # of 128 K, of a block, at most: kMostSteps of csrc/gate_up_small_batch.cu
# Pipeline stages of gate_up_small_batch and down_small_batch, by width and blocks of a cluster of the former. A
# multiprocessor has room for a block of each.
SMALL_BATCH_STAGES = {(8, 8): (6, 6), (16, 8): (5, 5), (16, 4): (4, 6)}
SMALL_BATCH_HIDDEN = SMALL_BATCH_STEPS * GROUP * max(cluster for _, cluster in SMALL_BATCH_STAGES)
EXPERT_LIST_BYTES = SMALL_BATCH_PAIRS * 2 + 4  # ExpertList of csrc/routing/expert_list.cuh
SCALE_SLACK = 4  # ActivationScales::kSlack of csrc/pipeline/tile_queue.cuh


@dataclass(frozen=True)
class KernelKey:
    """One kernel to compile: `csrc/<source>.cu`, whose entry point is named `<source>` too.

    It is compiled with the macros `defines`, THREADS and SMEM_BYTES, and launched with the latter two.
    """

    source: str
    defines: tuple[tuple[str, int], ...] = ()
    threads: int = 128
    smem_bytes: int = 0

    @property
    def arguments(self) -> Callable[..., tuple[bytes | int, ...]]:
        """Makes the arguments of a launch from their names; raises TypeError for a missing or an unknown one."""
        return ARGUMENTS[self.source]

    def __str__(self) -> str:
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.defines)])


class Output(IntEnum):
    """How grouped_gemm writes its result; the values are those of the macros in csrc/grouped_gemm.cu."""

    BF16 = 0
    BF16_DIRECT = 1
    F32_DIRECT = 2


class Layout(IntEnum):
    """How quantized tokens are written; the values are those of the macros in csrc/quantize.cu."""

    K_MAJOR = 0
    ROW_MAJOR = 1
    PERMUTED = 2


# ---- routing and quantization --------------------------------------------------------------------------------------


@functools.cache
def count_experts_key() -> KernelKey:
    return KernelKey("count_experts", (), PAIRS_PER_CHUNK)


@functools.cache
def route_key() -> KernelKey:
    counts_per_warp = PAIRS_PER_CHUNK // 32 * MAX_LOCAL_EXPERTS
    return KernelKey("route", (), PAIRS_PER_CHUNK, counts_per_warp)


@functools.cache
def tiles_of_counts_key() -> KernelKey:
    return KernelKey("tiles_of_counts", (), 1024)


@functools.cache
def tiles_of_indices_key() -> KernelKey:
    return KernelKey("tiles_of_indices", (), 1024)


@functools.cache
def quantize_key(ue8m0: bool, layout: Layout) -> KernelKey:
    return KernelKey("quantize", (("UE8M0", int(ue8m0)), ("LAYOUT", int(layout))), 256)


@functools.cache
def silu_mul_quant_key(ue8m0: bool) -> KernelKey:
    return KernelKey("silu_mul_quant", (("UE8M0", int(ue8m0)),), 256)


@functools.cache
def combine_key() -> KernelKey:
    return KernelKey("combine", (), 128)


# ---- GEMMs of experts ----------------------------------------------------------------------------------------------


@functools.cache
def gate_up_key(ue8m0: bool, gather: bool) -> KernelKey:
    """GEMM 1 of the experts with its activation and the quantization of the result, for many rows an expert.

    With `gather` it looks up the tokens of an expert among those of the step; else they are consecutive rows.
    """
    defines = (("GATHER", int(gather)), ("STAGES", 4), ("UE8M0", int(ue8m0)))
    largest_magnitudes = 2 * 128 * 4  # in two buffers
    complete_tiles = 2 * 32 * 4  # lists of two warpgroups, kListed tiles each
    epilogue = (MANY_ROWS_TILE + TAIL_ROWS) * 128 + largest_magnitudes + complete_tiles + 16 * gather
    return KernelKey("gate_up", defines, 384, _grouped_gemm_smem(256, 4, epilogue))


@functools.cache
def gate_up_few_rows_key(ue8m0: bool) -> KernelKey:
    """`gate_up_key` for few rows an expert; it always gathers its tokens."""
    stages = 5
    operands = stages * (2 * GROUP + FEW_ROWS_TILE) * 128
    staging = FEW_ROWS_TILE * GROUP
    largest_magnitudes = 8 * FEW_ROWS_TILE // 2 * 4  # of eight warps
    scales_and_barriers = stages * (FEW_ROWS_TILE * 4 + 2 * 4 + 16 + 16)
    tile_and_flag = 16 + 16
    smem = _align(operands + staging + largest_magnitudes + scales_and_barriers + tile_and_flag)
    return KernelKey("gate_up_few_rows", (("STAGES", stages), ("UE8M0", int(ue8m0))), 384, smem)


@functools.cache
def gate_up_small_batch_key(ue8m0: bool, width: int, cluster: int) -> KernelKey:
    """GEMM 1 of the experts of up to `width` tokens, including their routing and quantization."""
    stages, _ = SMALL_BATCH_STAGES[width, cluster]
    finished, steps = width // cluster, SMALL_BATCH_STEPS
    operands = stages * GROUP * 128 + steps * width * 128
    received = width * 2 * GROUP * 4
    scales_and_barriers = steps * width * 4 + stages * (2 * 4 + 16) + 4 + finished * 8 + 8
    smem = _align(operands + received + scales_and_barriers + EXPERT_LIST_BYTES)
    defines = (("CLUSTER", cluster), ("STAGES", stages), ("TOKENS", width), ("UE8M0", int(ue8m0)))
    return KernelKey("gate_up_small_batch", defines, 32 * (8 + 1 + finished), smem)


@functools.cache
def grouped_gemm_key(output: Output, block_n: int = 256, keep_b: bool = False) -> KernelKey:
    """GEMM of many rows a group, or of one group; `keep_b`: see `plan.keeps_b`."""
    stages = 3 if block_n == 256 else 5
    kept = (("KEEP_B", 1),) if keep_b else ()
    defines = (("BLOCK_N", block_n), *kept, ("OUTPUT", int(output)), ("STAGES", stages))
    staging = (MANY_ROWS_TILE + TAIL_ROWS) * block_n * 2
    return KernelKey("grouped_gemm", defines, 384, _grouped_gemm_smem(block_n, stages, staging))


@functools.cache
def grouped_gemm_few_rows_key() -> KernelKey:
    """GEMM of few rows a group."""
    stages = 8
    operands = stages * (128 + FEW_ROWS_TILE) * 128
    staging = FEW_ROWS_TILE * 128 * 2
    scales_and_barriers = stages * ((FEW_ROWS_TILE + SCALE_SLACK) * 4 + 4 + 16 + 16)
    smem = _align(operands + staging + scales_and_barriers)
    return KernelKey("grouped_gemm_few_rows", (("STAGES", stages),), 384, smem)


@functools.cache
def down_small_batch_key(width: int, cluster: int) -> KernelKey:
    """GEMM 2 of the experts of up to `width` tokens, including the weighted sum of each token's experts.

    Args:
        cluster: blocks of a cluster of GEMM 1, which runs on the same multiprocessors.
    """
    _, stages = SMALL_BATCH_STAGES[width, cluster]
    operands = stages * (GROUP + width) * 128
    parts = (width + CLUSTER_SPLITS - 1) * GROUP * 4
    scales_and_barriers = stages * (width * 4 + 4 + 16) + 4 + 8
    smem = _align(operands + parts + scales_and_barriers + EXPERT_LIST_BYTES)
    return KernelKey("down_small_batch", (("STAGES", stages), ("TOKENS", width)), 320, smem)


# ---- dense GEMMs ---------------------------------------------------------------------------------------------------


@functools.cache
def dense_gemm_key(tile_m: int) -> KernelKey:
    """Dense GEMM of up to a few hundred rows, in tiles of `tile_m`; it has as many stages as fit."""
    return KernelKey("dense_gemm", (("BLOCK_M", tile_m),), tile_m * 2 + 128, SMEM_BYTES)


@functools.cache
def dense_gemm_few_rows_key() -> KernelKey:
    """Dense GEMM of few rows and few columns; it has as many stages as fit."""
    return KernelKey("dense_gemm_few_rows", (), 192, SMEM_BYTES)


def _grouped_gemm_smem(block_n: int, stages: int, epilogue: int) -> int:
    rows = MANY_ROWS_TILE + TAIL_ROWS
    operands = stages * (rows + block_n) * 128
    scales_and_barriers = stages * ((rows + SCALE_SLACK) * 4 + block_n // 128 * 4 + 16 + 16)
    return _align(operands + epilogue + scales_and_barriers)


def _align(size: int) -> int:
    return ceil_div(size, SMEM_ALIGNMENT) * SMEM_ALIGNMENT
