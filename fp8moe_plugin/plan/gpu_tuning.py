"""The constants of plan/tuning.py that depend on the GPU, and that `fp8moe-warmup tune` measures on the one at hand."""

from typing import Annotated

from pydantic import ConfigDict, Field, NonNegativeInt
from pydantic.dataclasses import dataclass

from fp8moe_plugin.plan.tuning import (
    EARLY_BELOW,
    FEW_ROWS_PER_EXPERT,
    MULTIPROCESSORS,
    PACKED_FEW_ROWS_PER_EXPERT,
    PACKED_SMALL_BATCH_BYTES,
    SMALL_BATCH_BYTES,
    SPARE_MULTIPROCESSORS,
)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class GpuTuning:
    """The values for a kind of GPU. Those here were measured on an H200; see the constants of these names."""

    few_rows_per_expert: NonNegativeInt = FEW_ROWS_PER_EXPERT
    packed_few_rows_per_expert: NonNegativeInt = PACKED_FEW_ROWS_PER_EXPERT
    small_batch_bytes: NonNegativeInt = SMALL_BATCH_BYTES
    packed_small_batch_bytes: NonNegativeInt = PACKED_SMALL_BATCH_BYTES
    early_below: NonNegativeInt = EARLY_BELOW
    spare_multiprocessors: Annotated[NonNegativeInt, Field(le=MULTIPROCESSORS)] = SPARE_MULTIPROCESSORS


UNTUNED = GpuTuning()
# By name: what `fp8moe-warmup tune` found on them, see docs/tuning.md.
OF_GPUS = {
    "NVIDIA H100 80GB HBM3": GpuTuning(
        few_rows_per_expert=1,
        packed_few_rows_per_expert=56,
        small_batch_bytes=3 * 2**28,
        packed_small_batch_bytes=2**29,
        early_below=384,
    ),
}


def default_tuning(gpu: str) -> GpuTuning:
    """Returns the values for a GPU of this name without FP8MOE_TUNING."""
    return OF_GPUS.get(gpu, UNTUNED)
