"""The plan of a step: the choices of a mixture-of-experts layer, from its spec and the number of tokens.

With `batch_invariant` every sum is computed in the same order for any number of tokens: K is never split, and
the small-batch kernels are not used. The tiles may still depend on the number of tokens, because wgmma rounds the same
whether the tokens are its first or its second operand. PTX does not guarantee that;
tests/gpu/test_batch_invariance.py checks it for every tile size.
"""

from dataclasses import dataclass

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.plan.gpu_tuning import UNTUNED, GpuTuning
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.sm90.catalog import (
    PACKED_FORMATS,
    SMALL_BATCH_HIDDEN,
    SMALL_BATCH_STAGES,
    SMALL_BATCH_TOKENS,
    blocks_of_few_rows,
    down_small_batch_key,
    gate_up_few_rows_key,
    gate_up_key,
    gate_up_small_batch_key,
    permute_key,
    pushed,
    quantize_key,
)
from fp8moe_plugin.plan.sm90.constants import (
    MAX_CLUSTER_SPLITS,
    MAX_GATE_UP_SPLITS,
    SMALL_BATCH_K_BLOCKS,
    SMALL_BATCH_PAIRS,
    Layout,
)
from fp8moe_plugin.plan.sm90.grouped import (
    columns_at_once,
    down_uses_pdl,
    grouped_key,
    has_wide_tiles,
    keeps_b,
    row_tile,
)
from fp8moe_plugin.plan.sm90.scratch import (
    SmallBatchScratch,
    SortedScratch,
    row_counters,
    small_batch_scratch,
    sorted_scratch,
)
from fp8moe_plugin.plan.sm90.tiles import PACKED_WIDE, SHARED, RowTile, route_chunks
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from fp8moe_plugin.plan.tuning import (
    DOWN_BLOCKS,
    GATHER_UP_TO,
    MIN_K_BLOCKS,
    MULTIPROCESSORS,
    PACKED_COPIES_FROM,
    PACKED_DOWN_BLOCKS,
    PACKED_STAGES_BEFORE_DOWN,
    PACKED_UNDELAYED_TILES,
    PACKED_WIDE_BATCH_BYTES,
    PACKED_WIDE_ROWS_PER_EXPERT,
    SPLIT_BYTES,
    STAGES_BEFORE_DOWN,
    TILES_PER_CLUSTER,
)


@dataclass(frozen=True)
class SmallBatchStep:
    """A step of few tokens: two kernels, which find the tokens of each expert themselves."""

    spec: LayerSpec
    tokens: int
    padded_tokens: int  # 8 or 16
    cluster: int  # blocks that share a tile of GEMM 1 by splitting K
    clusters: int  # in the grid of GEMM 1
    down_splits: int  # blocks that share 128 channels of GEMM 2 by splitting K
    stages_before_down: int  # stages of weights that each block of GEMM 1 starts to load before GEMM 2 starts (PDL)
    gate_up: KernelKey
    down: KernelKey
    scratch: SmallBatchScratch


@dataclass(frozen=True)
class SortedStep:
    """A step of more tokens: rows are sorted by expert and cut into tiles, which both GEMMs share."""

    spec: LayerSpec
    tokens: int
    blocks: int  # in the grid of GEMM 1, whose blocks take tiles from a queue
    down_blocks: int  # the same of GEMM 2
    tile: RowTile
    route_chunks: int  # blocks of route; with more than one, count_experts runs first
    gathers: bool  # GEMM 1 gathers the tokens of its rows, instead of reading a copy for each expert
    k_splits: int  # blocks that share a tile of GEMM 1 by splitting K
    row_counters: int  # counters per row tile of GEMM 1
    pdl_down: bool  # GEMM 2 starts (PDL) before GEMM 1 has finished, and waits for the rows of each tile
    pushes_rows: bool  # GEMM 2 stores rows in the windows of their tokens' ranks
    keep_b: bool  # GEMM 2 keeps weights in shared memory from tile to tile
    columns_at_once: int  # column tiles that a block of GEMM 2 takes at once, in the kernel for few rows
    quantize: KernelKey | None  # None: GEMM 1 gathers tokens that arrive quantized
    gate_up: KernelKey
    down: KernelKey
    scratch: SortedScratch

    @property
    def rows(self) -> int:
        """The number of rows of all experts if no id is out of range."""
        return self.tokens * self.spec.shape.topk


StepPlan = SmallBatchStep | SortedStep


def plan_layer(
    spec: LayerSpec,
    tokens: int,
    multiprocessors: int = MULTIPROCESSORS,
    tuning: GpuTuning = UNTUNED,
    pushes_rows: bool = False,
) -> StepPlan:
    """Returns the plan of a step of `tokens` tokens, at least 1.

    Args:
        multiprocessors, tuning: of the GPU.
        pushes_rows: GEMM 2, the kernel for many rows, stores rows in the windows of their tokens' ranks.
    """
    shape = spec.shape
    only_sorted = spec.batch_invariant or any(spec.further_steps) or spec.quantized
    padded_tokens = 0 if only_sorted else small_batch_tokens(spec, tokens, tuning)
    if padded_tokens and small_batch_fits(shape, padded_tokens, multiprocessors):
        return small_batch_step(spec, tokens, padded_tokens, multiprocessors, tuning)
    return sorted_step(spec, tokens, tile_of_step(spec, tokens, tuning), multiprocessors, tuning, pushes_rows)


def tile_of_step(spec: LayerSpec, tokens: int, tuning: GpuTuning = UNTUNED) -> RowTile:
    """Returns the tiles of a step whose rows are sorted by expert."""
    rows_per_expert = tokens * spec.shape.topk / spec.shape.global_experts
    tile = row_tile(spec.weights, rows_per_expert, tuning)
    most_wide = PACKED_WIDE_ROWS_PER_EXPERT if tuning.packed_few_rows_per_expert else 0  # 0: many rows in each step
    wide = tile is SHARED and rows_per_expert <= most_wide and has_wide_tiles(spec)
    return PACKED_WIDE if wide else tile


# ---- small batches -------------------------------------------------------------------------------------------------


def small_batch_tokens(spec: LayerSpec, tokens: int, tuning: GpuTuning) -> int:
    """Returns the padded token count (8 or 16), or 0 if the small-batch path does not apply.

    Every tile multiplies all tokens of the batch, though an expert has only some of them. That costs nothing while the
    kernels are bound by loading weights, and saves the launches that sort the tokens. If a rank is expected to read
    more weights than a limit, the other kernels stream them faster. With more than 8 tokens, each block of a cluster
    needs MIN_K_BLOCKS, which it does not have if `hidden` is small. The kernels do not know further steps, and they
    quantize the tokens themselves.
    """
    topk, hidden, intermediate, local_experts, global_experts = spec.shape
    pairs = tokens * topk
    if pairs > SMALL_BATCH_PAIRS or topk > 32 or hidden > SMALL_BATCH_HIDDEN:
        return 0
    nbytes = spec.weights.weight.nbytes(3 * intermediate, hidden)  # of an expert
    packed = spec.weights in PACKED_FORMATS
    fewer, more = SMALL_BATCH_TOKENS
    most = tuning.packed_small_batch_bytes if packed else tuning.small_batch_bytes
    if packed and tokens > fewer:
        most = min(most, PACKED_WIDE_BATCH_BYTES)
    if nbytes * pairs * local_experts / global_experts > most:
        return 0
    if tokens <= fewer:
        return fewer
    k_blocks = hidden // GROUP // gate_up_cluster(more, hidden)
    return more if tokens <= more and k_blocks >= MIN_K_BLOCKS else 0


def small_batch_fits(shape: MoeShape, padded_tokens: int, multiprocessors: int) -> bool:
    """Returns whether the smallest grids of both kernels have at most one block per multiprocessor."""
    return max(2 * gate_up_cluster(padded_tokens, shape.hidden), shape.hidden // GROUP) <= multiprocessors


def small_batch_step(
    spec: LayerSpec, tokens: int, padded_tokens: int, multiprocessors: int, tuning: GpuTuning = UNTUNED
) -> SmallBatchStep:
    """Returns the plan of a step of at most `padded_tokens` tokens for the small-batch kernels."""
    shape = spec.shape
    cluster = gate_up_cluster(padded_tokens, shape.hidden)
    pairs, groups = tokens * shape.topk, shape.intermediate // GROUP
    clusters = gate_up_clusters(min(pairs, shape.local_experts) * groups, multiprocessors, cluster, tuning)
    expected_tiles = min(pairs / shape.global_experts, 1) * shape.local_experts * groups
    if spec.weights in PACKED_FORMATS:
        down_blocks = PACKED_DOWN_BLOCKS
        stages_before_down = PACKED_STAGES_BEFORE_DOWN if expected_tiles > PACKED_UNDELAYED_TILES * clusters else 0
    else:
        down_blocks, stages_before_down = DOWN_BLOCKS[padded_tokens], STAGES_BEFORE_DOWN
    return SmallBatchStep(
        spec=spec,
        tokens=tokens,
        padded_tokens=padded_tokens,
        cluster=cluster,
        clusters=clusters,
        down_splits=down_splits(shape.hidden, down_blocks, multiprocessors),
        stages_before_down=stages_before_down,
        gate_up=gate_up_small_batch_key(spec, padded_tokens, cluster),
        down=down_small_batch_key(spec, padded_tokens, cluster),
        scratch=small_batch_scratch(shape, tokens, padded_tokens),
    )


def gate_up_cluster(padded_tokens: int, hidden: int) -> int:
    """Returns how many blocks share a tile of gate_up_small_batch by splitting K: the fewest that can hold K."""
    clusters = (cluster for tokens, cluster in SMALL_BATCH_STAGES if tokens == padded_tokens)
    return min(cluster for cluster in clusters if hidden <= SMALL_BATCH_K_BLOCKS * GROUP * cluster)


def gate_up_clusters(tiles: int, multiprocessors: int, cluster: int, tuning: GpuTuning = UNTUNED) -> int:
    """Returns how many clusters of gate_up_small_batch share at most `tiles` tiles.

    With many tiles, there are fewer blocks than SMs: the GPCs do not divide evenly into clusters, so the last clusters
    would share SMs with others. With few tiles per cluster, sharing costs less than another wave of tiles.
    """
    clusters = max(multiprocessors // cluster, 2)
    fewer = max(clusters - tuning.spare_multiprocessors // cluster, 1)
    return min(tiles, clusters if tiles <= TILES_PER_CLUSTER * clusters else fewer)


def down_splits(hidden: int, blocks: int, multiprocessors: int = MULTIPROCESSORS) -> int:
    """Returns how many blocks share 128 channels of down_small_batch by splitting K, so that it has at least `blocks`.

    The number is just large enough to keep up with GEMM 1, which runs concurrently: more blocks would take memory
    bandwidth from it.
    """
    columns = hidden // GROUP
    wanted = min(ceil_div(blocks, columns), MAX_CLUSTER_SPLITS)
    return min(wanted, max(multiprocessors // columns, 1))


# ---- steps whose rows are sorted by expert -------------------------------------------------------------------------


def sorted_step(
    spec: LayerSpec,
    tokens: int,
    tile: RowTile,
    multiprocessors: int = MULTIPROCESSORS,
    tuning: GpuTuning = UNTUNED,
    pushes_rows: bool = False,
) -> SortedStep:
    """Returns the plan of a step whose rows are cut into such tiles; `pushes_rows`: see `plan_layer`."""
    shape = spec.shape
    topk, hidden, intermediate, local_experts, global_experts = shape
    rows, few_rows, packed = tokens * topk, tile.streams_weights, spec.weights in PACKED_FORMATS
    rows_per_expert = rows / global_experts
    if few_rows:
        gathers = not packed or rows_per_expert * intermediate < PACKED_COPIES_FROM
    else:  # to push a row, GEMM 2 reads its pair where GEMM 1 would read its token
        gathers = intermediate <= GATHER_UP_TO and not packed and not pushes_rows
    may_split = few_rows and not spec.batch_invariant and not packed
    splits = k_splits(rows, shape) if may_split else 1
    counters = row_counters(intermediate, splits)
    keep_b = not (few_rows or packed) and keeps_b(rows_per_expert, intermediate, tuning)
    down = grouped_key(tile, keep_b, spec.weights, spec.bias)
    return SortedStep(
        spec=spec,
        tokens=tokens,
        blocks=tile.grid(multiprocessors),
        down_blocks=tile.grid(multiprocessors) * (blocks_of_few_rows(spec.weights, tile.rows) if few_rows else 1),
        tile=tile,
        route_chunks=route_chunks(rows),
        gathers=gathers,
        k_splits=splits,
        row_counters=counters,
        pdl_down=few_rows or down_uses_pdl(rows_per_expert, intermediate, tuning),
        pushes_rows=pushes_rows,
        keep_b=keep_b,
        columns_at_once=columns_at_once(rows, local_experts, hidden, intermediate, tile) if few_rows else 1,
        quantize=_quantize_key(spec, gathers),
        gate_up=gate_up_few_rows_key(spec, tile.rows) if few_rows else gate_up_key(spec, gathers),
        down=pushed(down) if pushes_rows else down,
        scratch=sorted_scratch(spec, tokens, tile.rows, gathers, splits, counters, pushes_rows),
    )


def _quantize_key(spec: LayerSpec, gathers: bool) -> KernelKey | None:
    """Returns the kernel that makes the rows that GEMM 1 reads, or None if these are the tokens as they arrive."""
    if spec.quantized:
        return None if gathers else permute_key()
    return quantize_key(spec.ue8m0, Layout.ROW_MAJOR if gathers else Layout.PERMUTED)


def k_splits(rows: int, shape: MoeShape) -> int:
    """Returns how many blocks share a tile of gate_up_few_rows by splitting K.

    This is the largest number with at most one part per SM of an H200 and at most SPLIT_BYTES of partial sums, which go
    through global memory. It depends on the number of tokens, but not on their routing.
    """
    tiles, nbytes = min(rows, shape.local_experts) * (shape.intermediate // GROUP), 8 * rows * shape.intermediate
    limit = min(MULTIPROCESSORS // tiles, SPLIT_BYTES // nbytes)
    return max((s for s in (1, 2, 4, MAX_GATE_UP_SPLITS) if shape.hidden // GROUP % s == 0 and s <= limit), default=1)
