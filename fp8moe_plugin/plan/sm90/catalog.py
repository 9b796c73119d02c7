"""Every kernel of csrc, with its macros.

Keys contain neither a model's shape nor the number of tokens: a few dozen kernels serve every checkpoint.
"""

import functools
from dataclasses import replace

from fp8moe_plugin.checkpoint.shapes import MAX_LOCAL_EXPERTS
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.plan.keys import KIB, KernelKey
from fp8moe_plugin.plan.parameters import K_GROUPS
from fp8moe_plugin.plan.sm90.constants import FEW_ROWS_TILE, PAIRS_PER_CHUNK, SMALL_BATCH_K_BLOCKS, Layout
from fp8moe_plugin.plan.spec import LayerSpec, Output

# The macros by which csrc/formats/weights.cuh selects the format of weights; without one it selects block FP8.
WEIGHT_MACROS: dict[WeightFormat, tuple[tuple[str, int], ...]] = {
    FP8_BLOCK: (),
    FP8_CHANNEL: (("FP8_CHANNEL", 1),),
    PACKED_MXFP4: (("MXFP4", 1),),
}
# Formats that kernels decode. Those for many rows do so in shared memory; they do not gather, keep weights from tile to
# tile or compute batched experts.
PACKED_FORMATS = (PACKED_MXFP4,)
SMEM_BYTES = 227 * KIB  # limit per block; kernels with one block per SM have as many stages as fit
MULTIPROCESSOR_SMEM_BYTES = 228 * KIB  # per SM; each block takes 1 KiB more than it requests
DENSE_FEW_TILE_ROWS = (8, 16, 32)  # padded rows of dense_gemm_few_rows
DENSE_TILE_ROWS, DENSE_TILE_N = (64, 128), (16, 32, 64, 96, 112, 128, 144, 160, 176, 192)  # per tile of dense_gemm
DENSE_CLUSTER = 2  # blocks of dense_gemm_many_rows that share weights
DENSE_CLUSTER_TILE_N = (144, 176, 192, 256)  # columns per tile of dense_gemm_many_rows
GROUPED_TILE_N = (128, 256)  # columns per tile of grouped_gemm
SMALL_BATCH_TOKENS = (8, 16)  # padded token counts of the small-batch kernels
# Pipeline stages of gate_up_small_batch and down_small_batch, by padded token count and blocks per cluster of the
# former, and the shared memory that they need. An SM has room for a block of each.
SMALL_BATCH_STAGES = {(8, 8): (6, 6), (16, 8): (5, 5), (16, 4): (4, 6)}
SMALL_BATCH_KIB = {(8, 8): (113, 111), (16, 8): (113, 103), (16, 4): (97, 121)}
# The same for packed MXFP4, where a stage holds a whole K block, and an SM has no room for two blocks of the latter.
PACKED_SMALL_BATCH_STAGES = {(8, 8): (5, 10), (16, 8): (4, 8), (16, 4): (4, 8)}
PACKED_SMALL_BATCH_KIB = {(8, 8): (102, 116), (16, 8): (102, 114), (16, 4): (102, 114)}
SMALL_BATCH_HIDDEN = SMALL_BATCH_K_BLOCKS * GROUP * max(cluster for _, cluster in SMALL_BATCH_STAGES)
MAX_RANKS = 8  # of an expert-parallel group with windows
MAX_PUSHED_GROUPS = 256  # groups of 128 channels of a token, in push_tokens
MQA_HEADS = (32, 64)  # of an indexer
MQA_NEXT_N = (1, 2, 3, 4)  # tokens of a request in one step of decode


# ---- routing and quantization --------------------------------------------------------------------------------------


@functools.cache
def router_gemm_key() -> KernelKey:
    return KernelKey("router_gemm", (), 512)


@functools.cache
def choose_experts_key() -> KernelKey:
    return KernelKey("choose_experts", (), 128)


@functools.cache
def count_experts_key() -> KernelKey:
    return KernelKey("count_experts", (), PAIRS_PER_CHUNK)


@functools.cache
def route_key() -> KernelKey:
    counts_of_warps = PAIRS_PER_CHUNK // 32 * MAX_LOCAL_EXPERTS
    return KernelKey("route", (), PAIRS_PER_CHUNK, counts_of_warps)


@functools.cache
def tiles_of_counts_key() -> KernelKey:
    return KernelKey("tiles_of_counts", (), 1024)


@functools.cache
def tiles_of_ends_key() -> KernelKey:
    return KernelKey("tiles_of_ends", (), 1024)


@functools.cache
def tiles_of_indices_key() -> KernelKey:
    return KernelKey("tiles_of_indices", (), 1024)


@functools.cache
def quantize_key(ue8m0: bool, layout: Layout) -> KernelKey:
    return KernelKey("quantize", (("UE8M0", int(ue8m0)), ("LAYOUT", int(layout))), 256)


@functools.cache
def permute_key() -> KernelKey:
    """Copy of tokens that arrive quantized, in place of their quantization with `Layout.PERMUTED`."""
    return KernelKey("quantize", (("LAYOUT", int(Layout.PERMUTED)), ("QUANTIZED", 1)), 256)


@functools.cache
def silu_mul_quant_key(ue8m0: bool, activation: Activation) -> KernelKey:
    return KernelKey("silu_mul_quant", _activation_macros(activation, ue8m0), 256)


@functools.cache
def transpose_scales_key() -> KernelKey:
    """Copy of scales to the layout that the kernels read, for GEMMs that are called as ops with another layout."""
    return KernelKey("transpose_scales", (), 256)


@functools.cache
def pack_mxfp4_key() -> KernelKey:
    """Packing of experts in MXFP4 while they are loaded."""
    return KernelKey("pack_mxfp4", (), 256)


@functools.cache
def combine_key() -> KernelKey:
    return KernelKey("combine", (), 128)


@functools.cache
def push_tokens_key(ue8m0: bool, quantize: bool) -> KernelKey:
    most = ("MAX_RANKS", MAX_RANKS), ("MAX_GROUPS", MAX_PUSHED_GROUPS)
    return KernelKey("push_tokens", (("UE8M0", int(ue8m0)), ("QUANTIZE", int(quantize)), *most), 512)


@functools.cache
def push_sums_key() -> KernelKey:
    return KernelKey("push_sums", (("MAX_RANKS", MAX_RANKS),), 128)


@functools.cache
def add_sums_key() -> KernelKey:
    return KernelKey("add_sums", (("MAX_RANKS", MAX_RANKS),), 128)


@functools.cache
def add_rows_key() -> KernelKey:
    return KernelKey("add_rows", (("MAX_RANKS", MAX_RANKS),), 128)


def _activation_macros(activation: Activation, ue8m0: bool) -> tuple[tuple[str, int], ...]:
    """Returns the macros of kernels with an activation and the quantization of its result."""
    return ("MODIFIED_SWIGLU", activation.variant), ("UE8M0", int(ue8m0))


# ---- GEMMs of experts ----------------------------------------------------------------------------------------------


def _gate_up_macros(spec: LayerSpec) -> tuple[tuple[str, int], ...]:
    """Returns the macros of GEMM 1 of the experts."""
    return *_activation_macros(spec.activation, spec.ue8m0), *_weight_macros(spec.weights, spec.bias)


def _weight_macros(weights: WeightFormat, bias: bool) -> tuple[tuple[str, int], ...]:
    """Returns the macros for what weights are; BIAS is one only if there is a bias."""
    return *WEIGHT_MACROS[weights], *((("BIAS", 1),) if bias else ())


def _tile_macros(tile_rows: int) -> tuple[tuple[str, int], ...]:
    """Returns the macro of kernels for few rows with wide tiles."""
    return (("TILE_TOKENS", tile_rows),) if tile_rows != FEW_ROWS_TILE else ()


def _decoding_macros(weights: WeightFormat) -> tuple[tuple[str, int], ...]:
    """Returns the macros of kernels for many rows, which decode packed weights in shared memory."""
    return (("DECODED", 1),) if weights in PACKED_FORMATS else ()


def many_rows_threads(weights: WeightFormat) -> int:
    """Returns the threads of kernels for many rows: two warpgroups multiply, one loads, and one decodes if needed."""
    return 512 if weights in PACKED_FORMATS else 384


def cluster_of(key: KernelKey) -> int:
    """Returns the blocks per cluster of a kernel for many rows: two where weights are decoded, which they split."""
    return 2 if "DECODED" in dict(key.defines) else 1


def gate_up_key(spec: LayerSpec, gather: bool) -> KernelKey:
    """GEMM 1 of the experts with its activation and the quantization of the result, for many rows per expert.

    With `gather` it gathers each expert's rows from the step's tokens; else its operand has consecutive rows.
    """
    macros = *_gate_up_macros(spec), *_decoding_macros(spec.weights)
    return KernelKey("gate_up", (("GATHER", int(gather)), *macros), many_rows_threads(spec.weights), SMEM_BYTES)


def gate_up_few_rows_key(spec: LayerSpec, tile_rows: int = FEW_ROWS_TILE) -> KernelKey:
    """`gate_up_key` for few rows per expert; its arguments say whether it gathers."""
    # Decoding needs more warps, or in wide tiles more registers.
    math_warpgroups = 4 if spec.weights is PACKED_MXFP4 and tile_rows == FEW_ROWS_TILE else 2
    macros = *_gate_up_macros(spec), *_tile_macros(tile_rows)
    return KernelKey("gate_up_few_rows", macros, 128 * (math_warpgroups + 1), SMEM_BYTES)


def _small_batch_memory(spec: LayerSpec, padded_tokens: int, cluster: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the stages of both small-batch kernels, and the KiB of shared memory of each."""
    packed = spec.weights is PACKED_MXFP4
    stages = PACKED_SMALL_BATCH_STAGES if packed else SMALL_BATCH_STAGES
    kib = PACKED_SMALL_BATCH_KIB if packed else SMALL_BATCH_KIB
    return stages[padded_tokens, cluster], kib[padded_tokens, cluster]


def gate_up_small_batch_key(spec: LayerSpec, padded_tokens: int, cluster: int) -> KernelKey:
    """GEMM 1 of the experts of up to `padded_tokens` tokens, including their routing and quantization."""
    (stages, _), (kib, _) = _small_batch_memory(spec, padded_tokens, cluster)
    sizes = (("CLUSTER", cluster), ("STAGES", stages), ("TOKENS", padded_tokens))
    warps = 8 + 1 + padded_tokens // cluster  # math, loads, and one per token that a block finishes
    return KernelKey("gate_up_small_batch", (*sizes, *_gate_up_macros(spec)), 32 * warps, kib * KIB)


@functools.cache
def grouped_gemm_key(
    output: Output, block_n: int = 256, keep_b: bool = False, weights: WeightFormat = FP8_BLOCK, bias: bool = False
) -> KernelKey:
    """GEMM with many rows per group, or with one group; `keep_b`: see `sm90.grouped.keeps_b`."""
    macros = *_weight_macros(weights, bias), *_decoding_macros(weights)
    defines = (("BLOCK_N", block_n), ("KEEP_B", int(keep_b)), ("OUTPUT", int(output)), *macros)
    return KernelKey("grouped_gemm", defines, many_rows_threads(weights), SMEM_BYTES)


def pushed(gemm: KernelKey) -> KernelKey:
    """Returns the variant of the kernel of GEMM 2 for many rows that stores rows in the windows of their ranks."""
    return replace(gemm, defines=(*gemm.defines, ("PUSHED", 1), ("MAX_RANKS", MAX_RANKS)))


@functools.cache
def grouped_gemm_few_rows_key(
    weights: WeightFormat = FP8_BLOCK, bias: bool = False, tile_rows: int = FEW_ROWS_TILE
) -> KernelKey:
    """GEMM with few rows per group. It leaves shared memory for blocks of combine, which starts early (PDL)."""
    kib = 212 // blocks_of_few_rows(weights, tile_rows) - 1
    macros = *_weight_macros(weights, bias), *_tile_macros(tile_rows)
    return KernelKey("grouped_gemm_few_rows", macros, 384, kib * KIB)


def blocks_of_few_rows(weights: WeightFormat, tile_rows: int = FEW_ROWS_TILE) -> int:
    """Returns how many blocks of grouped_gemm_few_rows an SM has room for. Those of wide tiles are twice as large."""
    return 2 if weights is PACKED_MXFP4 and tile_rows == FEW_ROWS_TILE else 1


def down_small_batch_key(spec: LayerSpec, padded_tokens: int, cluster: int) -> KernelKey:
    """GEMM 2 of the experts of up to `padded_tokens` tokens, including the weighted sum of each token's experts.

    Args:
        cluster: blocks per cluster of GEMM 1, which runs concurrently on the same SMs.
    """
    (_, stages), (_, kib) = _small_batch_memory(spec, padded_tokens, cluster)
    defines = (("STAGES", stages), ("TOKENS", padded_tokens), *_weight_macros(spec.weights, spec.bias))
    math_warps = 16 if spec.weights is PACKED_MXFP4 else 8  # decoding takes more
    return KernelKey("down_small_batch", defines, 32 * (math_warps + 2), kib * KIB)


# ---- dense GEMMs ---------------------------------------------------------------------------------------------------


@functools.cache
def dense_gemm_key(tile_rows: int) -> KernelKey:
    """Dense GEMM in tiles of `tile_rows` rows; the plan chooses their columns."""
    return KernelKey("dense_gemm", (("BLOCK_M", tile_rows),), tile_rows * 2 + 128, SMEM_BYTES)


@functools.cache
def dense_gemm_many_rows_key(tile_n: int) -> KernelKey:
    """Dense GEMM with many rows in tiles of 128 rows and `tile_n` columns."""
    defines = (("CLUSTER", DENSE_CLUSTER), ("TILE_N", tile_n))
    return KernelKey("dense_gemm_many_rows", defines, 384, SMEM_BYTES)


@functools.cache
def dense_gemm_few_rows_key() -> KernelKey:
    """Dense GEMM with few rows and few columns."""
    return KernelKey("dense_gemm_few_rows", (), 192, SMEM_BYTES)


def dense_variant(key: KernelKey, weights: WeightFormat, biased: bool = False) -> KernelKey:
    """Returns the variant of a dense GEMM's kernel for weights in this format, where `biased` with a bias."""
    return replace(key, defines=(*key.defines, *_weight_macros(weights, biased)))


# ---- gradients of weights --------------------------------------------------------------------------------------------


@functools.cache
def k_grouped_gemm_key() -> KernelKey:
    """GEMMs of groups that differ in K, up to `K_GROUPS` groups per launch; it has as many stages as fit."""
    return KernelKey("k_grouped_gemm", (("GROUPS", K_GROUPS),), 384, SMEM_BYTES)
