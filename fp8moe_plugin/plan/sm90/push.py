"""The plan of a layer under expert parallelism whose tokens and results the ranks store into each other's windows.

Each rank computes its experts for the tokens of all ranks, as in any other step; only what is before and after differs.
csrc/ranks/window.cuh says why nothing is acknowledged.
"""

import functools
import struct
from dataclasses import dataclass
from typing import NamedTuple

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.plan.gpu_tuning import UNTUNED, GpuTuning
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.scratch import offsets
from fp8moe_plugin.plan.sm90.catalog import (
    MAX_PUSHED_GROUPS,
    MAX_RANKS,
    PACKED_FORMATS,
    SMALL_BATCH_TOKENS,
    add_rows_key,
    add_sums_key,
    push_sums_key,
    push_tokens_key,
)
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, SortedStep, StepPlan, plan_layer, tile_of_step
from fp8moe_plugin.plan.sm90.tiles import MANY_ROWS
from fp8moe_plugin.plan.spec import LayerSpec
from fp8moe_plugin.plan.tuning import GATHER_UP_TO, PUSHED_ROWS_PER_EXPERT, PUSHED_ROWS_RANKS_FROM

FIELDS = struct.Struct(f"{MAX_RANKS}q7q3i2I")  # of `Window` in csrc/ranks/window.cuh, before `arrived`
HEADER_BYTES = ceil_div(FIELDS.size, 128) * 128 + 128 * MAX_RANKS  # `arrived`: a cache line per rank
TOKEN_BLOCKS, SUM_BLOCKS = 2, 10  # most blocks per multiprocessor of push_tokens and push_sums: one wave
FEW_BLOCKS = 256  # in one push, up to which each counts itself on all ranks: more would queue there


class WindowLayout(NamedTuple):
    """The offsets of the parts of a window, for `rows` tokens of each of N ranks; see csrc/ranks/window.cuh."""

    header: int
    tokens: int
    scales: int
    ids: int
    weights: int
    sums: int
    nbytes: int


def window_layout(ranks: int, rows: int, hidden: int, topk: int, experts: int) -> WindowLayout:
    """Returns the layout of windows for steps of up to `rows` tokens on each rank.

    Args:
        experts: of all ranks. They decide in which steps sums of N ranks arrive, and in which rows of k experts.
    """
    tokens, scales = ranks * rows, hidden // GROUP
    unquantized = min(tokens, SMALL_BATCH_TOKENS[-1])
    sizes = (
        HEADER_BYTES,
        max(tokens, 2 * unquantized) * hidden,
        4 * tokens * scales,
        4 * tokens * topk,
        4 * tokens * topk,
        2 * max(tokens, min(rows, most_pushed_rows(ranks, topk, experts)) * topk) * hidden,
    )
    return WindowLayout(*offsets(*sizes))


def push_refusal(ranks: int, hidden: int) -> str | None:
    """Returns why the kernels do not serve such a group, or None if they do."""
    if ranks > MAX_RANKS:
        return f"a group of {ranks} ranks, of which the kernels support up to {MAX_RANKS}"
    if hidden > MAX_PUSHED_GROUPS * GROUP:
        return f"a hidden size of {hidden}, of which the kernels support up to {MAX_PUSHED_GROUPS * GROUP}"
    return None


def largest_share(experts: int, ranks: int) -> int:
    """Returns the most experts that a rank may have: the shares of two ranks differ by at most one expert."""
    return ceil_div(experts, ranks)


def most_pushed_rows(ranks: int, topk: int, experts: int) -> int:
    """Returns the most tokens of a rank in a step whose GEMM 2 may push rows, 0 if it never does."""
    return PUSHED_ROWS_PER_EXPERT * experts // (ranks * topk) if ranks >= PUSHED_ROWS_RANKS_FROM else 0


def may_push_rows(spec: LayerSpec) -> bool:
    """Returns whether GEMM 2 pushes rows in some steps of such layers, in place of sums, which have other bits.

    The answer does not depend on shapes, as the kernels do not.
    """
    return spec.weights == FP8_BLOCK and not spec.bias and not spec.batch_invariant


def pushes_rows(spec: LayerSpec, ranks: int, rows: int, tuning: GpuTuning = UNTUNED) -> bool:
    """Returns whether GEMM 2 pushes rows in place of sums in a step; the same on all ranks.

    Without its kernel for many rows, a step is short, and has few bytes to push. Narrow experts have less arithmetic
    for each row that is pushed, and GEMM 1 could not gather their tokens.
    """
    many_channels = spec.shape.intermediate > GATHER_UP_TO
    fits = rows <= most_pushed_rows(ranks, spec.shape.topk, spec.shape.global_experts)
    return may_push_rows(spec) and many_channels and fits and tile_of_step(spec, ranks * rows, tuning) == MANY_ROWS


class PushScratch(NamedTuple):
    """Scratch memory of a step: that of the layer, and its result in a small batch."""

    layer: int
    sums: int  # bfloat16 [N * rows, H]
    nbytes: int


# Compared by identity, which is fast: steps are cached.
@dataclass(frozen=True, eq=False)
class PushStep:
    """A step in which each rank has up to `rows` tokens."""

    spec: LayerSpec
    ranks: int
    rows: int
    layer: StepPlan  # of the tokens of all ranks
    push_tokens: KernelKey
    token_blocks: int
    push_sums: KernelKey
    most_sum_blocks: int
    add: KernelKey  # of the sums or the rows that have arrived
    scratch: PushScratch

    @property
    def pushes_rows(self) -> bool:
        """Whether GEMM 2 stores rows in the windows, and push_sums stores nothing."""
        return isinstance(self.layer, SortedStep) and self.layer.pushes_rows


@functools.lru_cache(maxsize=4096)
def plan_push(spec: LayerSpec, ranks: int, rows: int, multiprocessors: int, tuning: GpuTuning = UNTUNED) -> PushStep:
    """Returns the plan of a step of up to `rows` tokens on each rank, at least 1; GPUs and tuning are alike."""
    tokens, hidden = ranks * rows, spec.shape.hidden
    # Ranks store tokens in one format, though some may have an expert less, or further steps, with which packed weights
    # have no small batches: the rank with most experts decides, and such weights take none.
    share = spec.shape._replace(local_experts=largest_share(spec.shape.global_experts, ranks))
    alike = spec._replace(shape=share, quantized=spec.weights in PACKED_FORMATS)
    of_share = plan_layer(alike, tokens, multiprocessors, tuning)
    small = isinstance(of_share, SmallBatchStep)  # its kernels quantize tokens, and sum up each token's experts
    by_rows = not small and pushes_rows(spec, ranks, rows, tuning)
    layer = plan_layer(spec._replace(quantized=not small), tokens, multiprocessors, tuning, by_rows)
    return PushStep(
        spec=spec,
        ranks=ranks,
        rows=rows,
        layer=layer,
        push_tokens=push_tokens_key(spec.ue8m0, not small),
        token_blocks=min(rows, TOKEN_BLOCKS * multiprocessors),
        push_sums=push_sums_key(),
        most_sum_blocks=SUM_BLOCKS * multiprocessors,
        add=add_rows_key() if by_rows else add_sums_key(),
        scratch=PushScratch(*offsets(layer.scratch.nbytes, 2 * tokens * hidden if small else 0)),
    )
