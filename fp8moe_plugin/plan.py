"""Which kernels there are, and which one a call takes. Pure Python: the runtime and any precompilation ask here.

No shape of a model and no number of tokens is in a key: a handful of kernels serves every checkpoint.

Where `settings.batch_invariant`, layers make each sum in one order, whatever the number of tokens: K is never divided,
and small batches have no kernels of their own. Kinds of tiles may change with the number of tokens as ever: a tensor
core rounds a product of weights and tokens as one of tokens and weights, which PTX does not promise and
tests/gpu/test_batch_invariance.py asks of every kind and width.
"""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from fp8moe_plugin.checkpoint.shapes import GROUP, MAX_LOCAL_EXPERTS, Experts, Model, ceil_div
from fp8moe_plugin.settings import batch_invariant

HOPPER = (9, 0)  # the only compute capability with the instructions of the kernels
SMEM_ALIGNMENT = 1024
PREFILL_BLOCK_M = 128  # tokens of a tile of grouped_gemm, without its tail
TAIL_ROWS = 16  # of a tile of PREFILL_BLOCK_M; kTailRows of csrc/tile_table.cuh
DECODE_BLOCK_M = 64  # tokens of a tile of grouped_gemm_few_rows; kOtherBlockM of csrc/tile_table.cuh
DECODE_ROWS = 24  # of an expert on average; see decode_tokens
GATHER_UP_TO = 1024  # channels of an expert; see gathers
EARLY_FROM, EARLY_BELOW = 768, 192  # channels of an expert, rows of an expert; see starts_early
KEEP_B_UP_TO = 256  # channels of an expert; see keeps_b
SMALL_BATCHES = (8, 16)  # tokens; see small_batch
SMALL_BATCH_BYTES = 3 * 2**28  # of weights; see small_batch
SMALL_BATCH_PAIRS = 176  # kMaxPairs of csrc/expert_list.cuh; 11 for each of 16 tokens
SMALL_BATCH_STEPS = 8  # of 128 K, of a block: kMostSteps of csrc/gate_up_small_batch.cu
# By width and blocks of a cluster of gate_up_small_batch: its stages and those of down_small_batch. A multiprocessor
# has room for a block of each.
SMALL_BATCH_STAGES = {(8, 8): (6, 6), (16, 8): (5, 5), (16, 4): (4, 6)}
SMALL_BATCH_HIDDEN = SMALL_BATCH_STEPS * GROUP * max(cluster for _, cluster in SMALL_BATCH_STAGES)
SPARE_MULTIPROCESSORS = 8  # see gate_up_clusters
CLUSTER_SPLITS = 8  # kMostSplits of csrc/cluster_sum.cuh
DOWN_BLOCKS = {8: 64, 16: 80}  # by width; see down_splits
PAIRS_PER_CHUNK = 1024  # (token, expert) pairs of a block of route, a thread each
LONG_K = 4096  # channels; see dense_streams and whole_rows_l2_fetch
DENSE_WIDTHS, DENSE_BLOCK_N = (8, 16, 32), 64  # rows and columns of a tile of dense_gemm_few_rows
DENSE_SPLITS = 3  # blocks of a cluster that share a tile of dense_gemm_few_rows, and divide K
SMEM_BYTES = 227 * 1024  # of a block, the most there is
DENSE_TILE_M, DENSE_TILE_N = (64, 128), (16, 32, 64, 96, 112, 128, 144, 192)  # of dense_gemm
DENSE_ROWS = 384  # see dense_key
DENSE_STORE = 16  # results that are stored in the time in which 128 K of a row are loaded; see dense_tile
L2_BYTES = 2**25  # of weights that stay in L2 for a while; see dense_tile
MULTIPROCESSORS = 132  # of an H100 or H200, where nothing but the speed depends on it
SPLIT_BYTES = 2**23  # see k_splits
MAX_SPLITS = 8  # kMaxSplits of csrc/split_k.cuh
STEPS_AT_ONCE = 8  # see columns_at_once
# What L2 fetches from memory for 128 bytes of a row, in tiles of prefill; and of weights that are read once, where the
# 128 bytes beside them, which another block wants, come in time by themselves (benchmarks/NOTES.md).
L2_FETCH, STREAMED_L2_FETCH = 256, 128
EXPERT_LIST = SMALL_BATCH_PAIRS * 2 + 4  # bytes of ExpertList of csrc/expert_list.cuh
PIECE = 256  # bytes; pieces of scratch begin at multiples of it, as torch's tensors at multiples of 512
SCALE_SLACK = 4  # ActivationScales::kSlack of csrc/tile_queue.cuh

# The parameters of each kernel in order: a tensor map (M), an address (P) or an int (i).
PARAMETERS = {
    "combine": "PPPPii",
    "count_experts": "PPPiiii",
    "dense_gemm": "MMMPiPPiiii",
    "dense_gemm_few_rows": "MMPiPPiiiii",
    "down_small_batch": "MMPPPPPPiiiiiiii",
    "gate_up": "MMMMPiiPPPPPPPPiii",
    "gate_up_small_batch": "MPPPPPPPPiiiiiii",
    "gate_up_few_rows": "MPPPPPPPPPPiiiii",
    "grouped_gemm": "MMMMPiiPPPPPPiii",
    "grouped_gemm_few_rows": "MMPiiPPPPiiiiiPi",
    "quantize": "PPPPiii",
    "route": "PPPPPPPPPiiiiiii",
    "silu_mul_quant": "PPPPii",
    "tiles_of_counts": "PPPPiii",
    "tiles_of_indices": "PPPPiii",
}


@dataclass(frozen=True)
class KernelKey:
    """One kernel to compile: `csrc/<source>.cu`, whose entry is named `<source>` too.

    It is compiled under the macros `defines`, and THREADS and SMEM_BYTES, with which it is launched.
    """

    source: str
    defines: tuple[tuple[str, int], ...] = ()
    threads: int = 128
    smem_bytes: int = 0

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


@functools.cache
def grouped_gemm_key(output: Output, block_n: int = 256, keep_b: bool = False) -> KernelKey:
    stages = 3 if block_n == 256 else 5
    kept = (("KEEP_B", 1),) if keep_b else ()
    defines = (("BLOCK_N", block_n), *kept, ("OUTPUT", int(output)), ("STAGES", stages))
    staging = (PREFILL_BLOCK_M + TAIL_ROWS) * block_n * 2
    return KernelKey("grouped_gemm", defines, 384, _grouped_gemm_smem(block_n, stages, staging))


@functools.cache
def gate_up_key(ue8m0: bool, gather: bool) -> KernelKey:
    """The first GEMM of an expert with its activation and the quantization of the result, for many rows an expert.

    With `gather` it finds the tokens of an expert among those of the step; else they follow one another.
    """
    defines = (("GATHER", int(gather)), ("STAGES", 4), ("UE8M0", int(ue8m0)))
    largest_magnitudes = 2 * 128 * 4  # in two buffers
    complete_tiles = 2 * 32 * 4  # lists of two warpgroups, kListed tiles long
    epilogue = (PREFILL_BLOCK_M + TAIL_ROWS) * 128 + largest_magnitudes + complete_tiles + 16 * gather
    return KernelKey("gate_up", defines, 384, _grouped_gemm_smem(256, 4, epilogue))


def _grouped_gemm_smem(block_n: int, stages: int, epilogue: int) -> int:
    rows = PREFILL_BLOCK_M + TAIL_ROWS
    operands = stages * (rows + block_n) * 128
    scales_and_barriers = stages * ((rows + SCALE_SLACK) * 4 + block_n // 128 * 4 + 16 + 16)
    return _align(operands + epilogue + scales_and_barriers)


@functools.cache
def grouped_gemm_few_rows_key() -> KernelKey:
    stages = 8
    operands = stages * (128 + DECODE_BLOCK_M) * 128
    staging = DECODE_BLOCK_M * 128 * 2
    scales_and_barriers = stages * ((DECODE_BLOCK_M + SCALE_SLACK) * 4 + 4 + 16 + 16)
    smem = _align(operands + staging + scales_and_barriers)
    return KernelKey("grouped_gemm_few_rows", (("STAGES", stages),), 384, smem)


@functools.cache
def dense_gemm_few_rows_key() -> KernelKey:
    """A dense GEMM of few rows and few columns; it has as many stages as there is room for."""
    return KernelKey("dense_gemm_few_rows", (), 192, SMEM_BYTES)


@functools.cache
def dense_gemm_key(block_m: int) -> KernelKey:
    """A dense GEMM of up to a few hundred rows, in tiles of `block_m`; it has as many stages as there is room for."""
    return KernelKey("dense_gemm", (("BLOCK_M", block_m),), block_m * 2 + 128, SMEM_BYTES)


@functools.cache
def gate_up_few_rows_key(ue8m0: bool) -> KernelKey:
    """The same for few rows an expert; it finds the tokens of an expert among those of the step."""
    stages = 5
    operands = stages * (2 * GROUP + DECODE_BLOCK_M) * 128
    staging = DECODE_BLOCK_M * GROUP
    largest_magnitudes = 8 * DECODE_BLOCK_M // 2 * 4  # of eight warps
    scales_and_barriers = stages * (DECODE_BLOCK_M * 4 + 2 * 4 + 16 + 16)
    tile_and_flag = 16 + 16
    smem = _align(operands + staging + largest_magnitudes + scales_and_barriers + tile_and_flag)
    return KernelKey("gate_up_few_rows", (("STAGES", stages), ("UE8M0", int(ue8m0))), 384, smem)


@functools.cache
def gate_up_small_batch_key(ue8m0: bool, width: int, cluster: int) -> KernelKey:
    """The first GEMM of the experts of up to `width` tokens, with their routing and quantization."""
    stages, _ = SMALL_BATCH_STAGES[width, cluster]
    finished, steps = width // cluster, SMALL_BATCH_STEPS
    operands = stages * GROUP * 128 + steps * width * 128
    received = width * 2 * GROUP * 4
    scales_and_barriers = steps * width * 4 + stages * (2 * 4 + 16) + 4 + finished * 8 + 8
    smem = _align(operands + received + scales_and_barriers + EXPERT_LIST)
    defines = (("CLUSTER", cluster), ("STAGES", stages), ("TOKENS", width), ("UE8M0", int(ue8m0)))
    return KernelKey("gate_up_small_batch", defines, 32 * (8 + 1 + finished), smem)


@functools.cache
def down_small_batch_key(width: int, cluster: int) -> KernelKey:
    """The second GEMM of the experts of up to `width` tokens, with the weighted sum of each token's.

    Args:
        cluster: blocks of a cluster of the first one, beside which it runs.
    """
    _, stages = SMALL_BATCH_STAGES[width, cluster]
    operands = stages * (GROUP + width) * 128
    parts = (width + CLUSTER_SPLITS - 1) * GROUP * 4
    scales_and_barriers = stages * (width * 4 + 4 + 16) + 4 + 8
    smem = _align(operands + parts + scales_and_barriers + EXPERT_LIST)
    defines = (("STAGES", stages), ("TOKENS", width))
    return KernelKey("down_small_batch", defines, 320, smem)


@functools.cache
def quantize_key(ue8m0: bool, layout: Layout) -> KernelKey:
    return KernelKey("quantize", (("UE8M0", int(ue8m0)), ("LAYOUT", int(layout))), 256)


@functools.cache
def silu_mul_quant_key(ue8m0: bool) -> KernelKey:
    return KernelKey("silu_mul_quant", (("UE8M0", int(ue8m0)),), 256)


@functools.cache
def combine_key() -> KernelKey:
    return KernelKey("combine", (), 128)


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
def tiles_of_indices_key() -> KernelKey:
    return KernelKey("tiles_of_indices", (), 1024)


def moe_kernels(ue8m0: bool, batched: bool) -> list[KernelKey]:
    """All that a mixture-of-experts layer launches; `batched`: its tokens come quantized and sorted."""
    gemms = [gate_up_key(ue8m0, gather=False), grouped_gemm_key(Output.BF16)]
    gemms.append(grouped_gemm_key(Output.BF16, keep_b=True))
    if batched:
        return [*gemms, tiles_of_counts_key()]
    gemms += [grouped_gemm_few_rows_key(), gate_up_few_rows_key(ue8m0)]
    gather = [gate_up_key(ue8m0, gather=True), quantize_key(ue8m0, Layout.ROW_MAJOR)]
    routing = [count_experts_key(), route_key(), combine_key()]
    gather += [gate_up_small_batch_key(ue8m0, *kind) for kind in SMALL_BATCH_STAGES]
    gather += [down_small_batch_key(*kind) for kind in SMALL_BATCH_STAGES]
    return [*gemms, *gather, quantize_key(ue8m0, Layout.PERMUTED), *routing]


def linear_kernels(ue8m0: bool) -> list[KernelKey]:
    """All that a dense layer launches."""
    few_rows = dense_gemm_few_rows_key(), *map(dense_gemm_key, DENSE_TILE_M)
    return [*few_rows, grouped_gemm_key(Output.BF16), quantize_key(ue8m0, Layout.K_MAJOR)]


def model_kernels(model: Model) -> dict[KernelKey, str]:
    """What serving a checkpoint launches, whichever way ranks share it and however many tokens come; and why."""
    topk = model.experts.topk
    few = decode_tokens(topk, model.experts.experts)
    why = {
        grouped_gemm_few_rows_key(): f"GEMMs of experts in steps of up to {few} tokens: decode",
        dense_gemm_few_rows_key(): f"dense GEMMs of few columns in steps of up to {DENSE_WIDTHS[-1]} tokens",
        dense_gemm_key(64): f"other dense GEMMs in steps of up to {DENSE_ROWS} tokens, or more where columns are few",
        dense_gemm_key(128): "the same in higher tiles",
        gate_up_few_rows_key(model.ue8m0): "the first GEMM of experts, activated and quantized, in these steps",
        gate_up_key(model.ue8m0, False): "the first GEMM of experts, activated and quantized, in longer steps: prefill",
        gate_up_key(model.ue8m0, True): "the same for narrow experts, which find their tokens among those of the step",
        grouped_gemm_key(Output.BF16): "the other GEMMs of longer steps",
        grouped_gemm_key(Output.BF16, keep_b=True): f"the second GEMM of experts of up to {KEEP_B_UP_TO} channels, in "
        f"steps of {EARLY_BELOW} or more tokens an expert",
        quantize_key(model.ue8m0, Layout.K_MAJOR): "activations of dense layers",
        quantize_key(model.ue8m0, Layout.PERMUTED): "activations of experts, written to the rows that the experts read",
        quantize_key(model.ue8m0, Layout.ROW_MAJOR): "those of decode and of narrow experts, once each",
        count_experts_key(): f"how many tokens an expert gets in steps of more than {PAIRS_PER_CHUNK // topk} tokens",
        route_key(): "rows of each expert and their tiles",
        tiles_of_counts_key(): "tiles of slabs, as DeepEP's low-latency mode hands them over",
        combine_key(): "the weighted sum of each token's rows",
    }
    for width, cluster in SMALL_BATCH_STAGES:
        first = gate_up_small_batch_key(model.ue8m0, width, cluster)
        why[first] = f"all up to the second GEMM of the experts of up to {width} tokens"
        why[down_small_batch_key(width, cluster)] = "that one with the weighted sum of each token's"
    layers = (moe_kernels(model.ue8m0, batched) for batched in (False, True))
    return {key: why[key] for key in dict.fromkeys([*linear_kernels(model.ue8m0), *itertools.chain(*layers)])}


def all_kernels() -> list[KernelKey]:
    """Every kernel there is: those of the layers, and those that only direct callers of the ops reach."""
    layers = [k for ue8m0 in (False, True) for k in (*moe_kernels(ue8m0, False), *moe_kernels(ue8m0, True))]
    outputs = (Output.BF16_DIRECT, Output.F32_DIRECT)
    dense = [grouped_gemm_key(output, block_n) for output in outputs for block_n in (128, 256)]
    silu = [silu_mul_quant_key(ue8m0) for ue8m0 in (False, True)]
    ops = [*linear_kernels(False), *linear_kernels(True), *dense, *silu, tiles_of_indices_key()]
    return list(dict.fromkeys([*layers, *ops]))


def decode_tokens(topk: int, global_experts: int) -> int:
    """The longest step for which an MoE layer takes the tiles that stream the weights.

    With 16 rows an expert they are up to 4% faster than those of prefill, with 32 up to 17% slower.
    """
    return DECODE_ROWS * global_experts // topk


def small_batch(tokens: int, topk: int, hidden: int, intermediate: int, local_experts: int, global_experts: int) -> int:
    """How wide the kernels of a small batch multiply the tokens of a step; 0: it is not small.

    Every tile multiplies all tokens, of which an expert has few: that costs nothing as long as weights are what takes
    the time, and saves the launches that sort the tokens. Where a rank is likely to read many weights, the other
    kernels stream them 3% faster; with more tokens the blocks of a cluster need longer parts of K than `hidden` of
    some models has for them.
    """
    pairs = tokens * topk
    fits = not batch_invariant() and pairs <= SMALL_BATCH_PAIRS and topk <= 32 and hidden <= SMALL_BATCH_HIDDEN
    if not fits or 3 * hidden * intermediate * pairs * local_experts / global_experts > SMALL_BATCH_BYTES:
        return 0
    narrow, wide = SMALL_BATCHES
    steps = hidden // GROUP // gate_up_cluster(wide, hidden)
    return narrow if tokens <= narrow else wide if tokens <= wide and steps >= 4 else 0


@functools.cache
def gate_up_cluster(width: int, hidden: int) -> int:
    """How many blocks of a cluster share a tile of gate_up_small_batch, and divide K: as few as have room for it."""
    kinds = (kind for kind in SMALL_BATCH_STAGES if kind[0] == width)
    return min(cluster for _, cluster in kinds if hidden <= SMALL_BATCH_STEPS * GROUP * cluster)


def gate_up_clusters(tiles: int, multiprocessors: int, cluster: int) -> int:
    """How many clusters of gate_up_small_batch share at most `tiles` tiles.

    Fewer than would fill the GPU: where its parts have no multiples of a cluster of multiprocessors, two clusters have
    to share theirs. With few tiles each that is the lesser evil than one round of tiles more.
    """
    clusters = max(multiprocessors // cluster, 2)
    fewer = max(clusters - SPARE_MULTIPROCESSORS // cluster, 1)
    return min(tiles, clusters if tiles <= 3 * clusters else fewer)


def whole_rows_l2_fetch(k: int) -> int:
    """Of weights of which a block reads whole rows: the next 128 bytes of a long one are its own."""
    return L2_FETCH if k >= LONG_K else STREAMED_L2_FETCH


def down_splits(hidden: int, width: int) -> int:
    """How many blocks of a cluster share 128 channels of down_small_batch, and divide K.

    As few as keep up with the first GEMM, beside which all of them run: more take from it what the memory gives.
    """
    return min(ceil_div(DOWN_BLOCKS[width], hidden // GROUP), CLUSTER_SPLITS)


def moe_block_m(tokens: int, topk: int, global_experts: int) -> int:
    """Rows a tile of a fused MoE layer: swap-AB tiles as long as an expert has few tokens on average."""
    return DECODE_BLOCK_M if tokens <= decode_tokens(topk, global_experts) else PREFILL_BLOCK_M


def gathers(intermediate: int, block_m: int) -> bool:
    """Whether GEMM 1 finds the tokens of an expert among those of the step, instead of reading a copy for each expert.

    The copies cost as many bytes whatever the width; gathering costs each tile time and power (benchmarks/NOTES.md).
    Where weights are streamed it costs nothing.
    """
    return block_m == DECODE_BLOCK_M or intermediate <= GATHER_UP_TO


def dense_width(m: int) -> int:
    """How many rows dense_gemm_few_rows multiplies `m` as."""
    return next(width for width in DENSE_WIDTHS if m <= width)


def k_splits(rows: int, experts: int, hidden: int, intermediate: int) -> int:
    """Into how many parts of K a tile of gate_up_few_rows is divided, for `rows` rows of at most `experts` experts.

    As many as give each multiprocessor of an H200 at most a part, as long as the parts' sums, which go through memory,
    are few bytes. The number of tokens decides, not where they are routed.
    """
    if batch_invariant():
        return 1
    tiles, nbytes = min(rows, experts) * (intermediate // GROUP), 4 * rows * 2 * intermediate
    limit = min(MULTIPROCESSORS // tiles, SPLIT_BYTES // nbytes)
    return max((s for s in (1, 2, 4, MAX_SPLITS) if hidden // GROUP % s == 0 and s <= limit), default=1)


def columns_at_once(rows: int, experts: int, n: int, k: int) -> int:
    """How many columns of tiles a block of grouped_gemm_few_rows takes of `rows` rows of at most `experts` experts.

    Enough that what it does once in a while, which takes as long as a few steps of 128 K, stays beside the loads; while
    there are tiles for all multiprocessors.
    """
    columns, steps = ceil_div(n, GROUP), k // GROUP
    fits = [c for c in range(1, ceil_div(STEPS_AT_ONCE, steps) + 1) if columns % c == 0]
    enough = [c for c in fits if min(rows, experts) * (columns // c) >= MULTIPROCESSORS * 3 // 4]
    return max(enough, default=1)


def starts_early(rows_per_expert: float, intermediate: int, block_m: int) -> bool:
    """Whether GEMM 2 takes multiprocessors that GEMM 1 has no tiles for any more, instead of waiting for its end.

    With narrow experts and many rows GEMM 2 takes its tiles in fixed order instead, which is 5% faster and needs all
    blocks to start together (benchmarks/NOTES.md); unless it `keeps_b`. `rows_per_expert` is an average, also over
    experts of other ranks.
    """
    narrow_and_many = intermediate < EARLY_FROM and rows_per_expert >= EARLY_BELOW
    fixed_order = narrow_and_many and not keeps_b(rows_per_expert, intermediate, block_m)
    return block_m == PREFILL_BLOCK_M and not fixed_order


def keeps_b(rows_per_expert: float, intermediate: int, block_m: int) -> bool:
    """Whether blocks of GEMM 2 take runs of row tiles under the same columns, and load the weights of a run once.

    Runs come from the counter. That pays where K is short, so that weights are most of what a tile loads, and where an
    expert has so many rows that runs are long (benchmarks/NOTES.md).
    """
    many = rows_per_expert >= EARLY_BELOW
    return block_m == PREFILL_BLOCK_M and intermediate <= KEEP_B_UP_TO and many


def masked_block_m(expected_m: int) -> int:
    """Rows a tile of a masked GEMM whose groups have about `expected_m` rows."""
    return DECODE_BLOCK_M if expected_m <= DECODE_BLOCK_M else PREFILL_BLOCK_M


def grouped_key(block_m: int, keep_b: bool = False) -> KernelKey:
    """The GEMM of grouped rows in tiles of `block_m`; `keep_b`: see `keeps_b`."""
    return grouped_gemm_few_rows_key() if block_m == DECODE_BLOCK_M else grouped_gemm_key(Output.BF16, keep_b=keep_b)


def dense_key(m: int, n: int, k: int, output: Output, sms: int) -> KernelKey:
    """The GEMM of a dense `[m, n]` result of `k` channels.

    To bfloat16: dense_gemm_few_rows; or, up to a few hundred rows and where one round of the largest tiles does, tiles
    that make all multiprocessors load the same; or tiles of 256 columns. To others: tiles of 256 columns, or of 128
    where that is one round.
    """
    if output == Output.BF16:
        if m <= DENSE_WIDTHS[-1] and dense_streams(n, k):
            return dense_gemm_few_rows_key()
        one_round = ceil_div(m, DENSE_TILE_M[-1]) * ceil_div(n, DENSE_TILE_N[-1]) <= sms
        if m <= DENSE_ROWS or one_round:
            return dense_gemm_key(dense_tile(m, n, k, sms)[0])
        return grouped_gemm_key(output)
    narrow = count_row_tiles(m, PREFILL_BLOCK_M) * ceil_div(n, 128)
    return grouped_gemm_key(output, 128 if narrow <= sms else 256)


def dense_streams(n: int, k: int) -> bool:
    """Whether few rows go to dense_gemm_few_rows: where each of a cluster's blocks has a multiprocessor of its own.

    There columns are so few that blocks with all of K would take many steps.
    """
    return not batch_invariant() and k >= LONG_K and DENSE_SPLITS * ceil_div(n, DENSE_BLOCK_N) <= MULTIPROCESSORS


@functools.lru_cache(4096)
def dense_tile(m: int, n: int, k: int, sms: int) -> tuple[int, int]:
    """Rows and columns of a tile of dense_gemm: those with which the busiest multiprocessor is done first.

    A tile takes as long as its loads, and then its stores. Tiles that share columns do not keep step, so that weights
    which do not stay in L2 may be read for each of them: those are in as few tiles of rows as there can be
    (benchmarks/NOTES.md).
    """

    def time(tile: tuple[int, int]) -> tuple[int, int]:
        rows, columns = tile
        rounds = ceil_div(ceil_div(m, rows) * ceil_div(n, columns), sms)
        return rounds * ((rows + columns) * k // GROUP + rows * columns // DENSE_STORE), -rows

    low, high = DENSE_TILE_M
    heights = (low,) if m <= low else (high,) if n * k > L2_BYTES else DENSE_TILE_M
    return min(itertools.product(heights, DENSE_TILE_N), key=time)


def row_tiles(rows: int, block_m: int) -> list[int]:
    """How the rows of an expert are cut into tiles; `RowTiles` of csrc/tile_table.cuh does the same and says why."""
    full, rest = divmod(rows, block_m)
    if count_row_tiles(rows, block_m) > full:
        return [block_m] * full + [rest]
    return [block_m + min(TAIL_ROWS, max(0, rest - tile * TAIL_ROWS)) for tile in range(full)]


def count_row_tiles(rows: int, block_m: int) -> int:
    full, rest = divmod(rows, block_m)
    tails = full * TAIL_ROWS if block_m == PREFILL_BLOCK_M else 0
    return full + (rest > tails)


def computed_rows(rows: int, block_m: int) -> int:
    """How many rows the kernels multiply for an expert that has `rows`."""
    widths = (8, 16, 32, 64) if block_m == DECODE_BLOCK_M else (64, 128, PREFILL_BLOCK_M + TAIL_ROWS)
    return sum(min(width for width in widths if width >= tile) for tile in row_tiles(rows, block_m))


def tile_capacity(rows: int, groups: int, block_m: int) -> int:
    """How many tiles `rows` rows in at most `groups` runs can make."""
    return max(1, min(rows, rows // block_m + groups))


def route_chunks(pairs: int) -> int:
    """Into how many parts route divides the (token, expert) pairs of a step; more than one are counted first."""
    return max(1, ceil_div(pairs, PAIRS_PER_CHUNK))


class MoeScratch(NamedTuple):
    """Where in the scratch of a mixture-of-experts layer each piece begins, in bytes; `rows` are T * k.

    Kernels of the layer run beside one another, so no two pieces share memory. One that a layer does without is empty.
    """

    x: int  # e4m3 [rows, H], or [T, H] where GEMM 1 gathers
    x_scales: int  # of the same, K-major, or row-major where GEMM 1 gathers
    slots: int  # int32 [T, k]
    tokens: int  # int32 [rows]
    num_rows: int  # int32 [1]
    expert_counts: int  # uint32 [chunks, ceil(E / 2)], where the pairs are counted first
    table: int  # int32 [tiles, 4]
    num_tiles: int  # int32 [5]
    ready: int  # int32 [1 + tiles * tile_counters]
    partial: int  # float32 [splits, rows, 2I], where splits of K share a tile of GEMM 1
    inner: int  # e4m3 [rows, I]
    inner_scales: int  # of the same, K-major
    down: int  # bfloat16 [rows, H]
    nbytes: int  # of all pieces


class SmallBatchScratch(NamedTuple):
    """The same of a small batch; `experts` are min(rows, E)."""

    inner: int  # e4m3 [experts, width, I]
    inner_scales: int  # float32 [experts, I / 128, width]
    told: int  # int32 [experts, I / 128]
    nbytes: int


@functools.lru_cache(maxsize=1024)
def small_batch_scratch(rows: int, width: int, intermediate: int, local_experts: int) -> SmallBatchScratch:
    experts, groups = min(rows, local_experts), intermediate // GROUP
    slots = experts * width
    return SmallBatchScratch(*_offsets(slots * intermediate, 4 * slots * groups, 4 * experts * groups))


def layer_splits(rows: int, local_experts: int, hidden: int, intermediate: int, block_m: int) -> int:
    """`k_splits` of a layer with tiles of `block_m`."""
    return k_splits(rows, local_experts, hidden, intermediate) if block_m == DECODE_BLOCK_M else 1


def tile_counters(intermediate: int, splits: int) -> int:
    """How many counters GEMM 1 needs for each row tile: of columns that are done, and of splits of each."""
    return 1 + intermediate // GROUP if splits > 1 else 1


@functools.lru_cache(maxsize=1024)
def moe_scratch(
    tokens: int, topk: int, hidden: int, intermediate: int, local_experts: int, global_experts: int
) -> MoeScratch:
    """The scratch of a mixture-of-experts layer on one rank, nearly all of it in use at once, freed after the layer."""
    rows, block_m = tokens * topk, moe_block_m(tokens, topk, global_experts)
    tiles = tile_capacity(rows, local_experts, block_m)
    chunks = route_chunks(rows)
    gathered = gathers(intermediate, block_m)
    splits = layer_splits(rows, local_experts, hidden, intermediate, block_m)
    sizes = (
        (tokens if gathered else rows) * hidden,
        4 * (tokens if gathered else scale_rows(rows)) * (hidden // GROUP),
        4 * rows,
        4 * rows,
        4,
        4 * chunks * ceil_div(local_experts, 2) if chunks > 1 else 0,
        16 * tiles,
        20,
        4 * (1 + tiles * tile_counters(intermediate, splits)),
        8 * splits * rows * intermediate if splits > 1 else 0,
        rows * intermediate,
        4 * scale_rows(rows) * (intermediate // GROUP),
        2 * rows * hidden,
    )
    return MoeScratch(*_offsets(*sizes))


def _offsets(*sizes: int) -> Iterable[int]:
    """Where pieces of these sizes begin one behind the other, and the end."""
    return itertools.accumulate((ceil_div(size, PIECE) * PIECE for size in sizes), initial=0)


def moe_scratch_bytes(
    tokens: int, topk: int, hidden: int, intermediate: int, local_experts: int, global_experts: int
) -> int:
    """How much scratch a layer takes for this step."""
    if width := small_batch(tokens, topk, hidden, intermediate, local_experts, global_experts):
        return small_batch_scratch(tokens * topk, width, intermediate, local_experts).nbytes
    return moe_scratch(tokens, topk, hidden, intermediate, local_experts, global_experts).nbytes


def moe_workspace_bytes(local: Experts, tokens: int, global_experts: int) -> int:
    """How much scratch a layer of these experts takes for a step.

    Args:
        local: what the rank holds.
        tokens: of the step.
        global_experts: over all ranks.
    """
    return moe_scratch_bytes(tokens, local.topk, local.hidden, local.intermediate, local.experts, global_experts)


def scale_rows(rows: int) -> int:
    """How far apart the K-major scales of two k blocks are: a multiple of 16 bytes."""
    return ceil_div(rows, 4) * 4


def _align(size: int) -> int:
    return ceil_div(size, SMEM_ALIGNMENT) * SMEM_ALIGNMENT
