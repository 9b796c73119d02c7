"""Bytes of weights that GPUs read to decode, calculated from a split's shapes, with the padding of experts."""

from collections.abc import Callable, Iterator

import numpy as np

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model, padding_share
from fp8moe_plugin.checkpoint.splits import computes_experts, rank_shapes
from warmup import memory
from warmup.explain import STEPS
from warmup.report import SplitReport

SEQUENCES = 64  # of a decode step that shows what padding costs


def padding(model: Model, way: Parallel) -> float:
    """Returns the padding of the experts' channels on a rank, relative to an equal share."""
    return padding_share(model.experts.intermediate, way.sharing) if computes_experts(model, way) else 0


def with_less_padding(model: Model, way: Parallel) -> list[Parallel]:
    """Returns SGLang's splits of the same GPUs in which fewer ranks share an expert, each with less padding."""
    found, least = [], padding(model, way)
    for ep in range(2, way.ranks):
        fewer = Parallel(way.tp, ep=ep, sglang=way.sglang)
        if way.ranks % ep == 0 and model.experts.experts % ep == 0 and padding(model, fewer) < least:
            found.append(fewer)
            least = padding(model, fewer)
    return found


def read_bytes(model: Model, way: Parallel, sequences: int = 1) -> int:
    """Returns the bytes of weights that GPUs read one after another to decode a step.

    This counts the busiest GPU of each stage. A GPU reads each expert of the step's tokens once.
    """
    shapes = memory.weight_shapes(model, way)
    experts = sum(shape.bytes for shape in shapes if shape.name.startswith("experts."))
    looked_up = shapes[-1].bytes // 2  # the embeddings: a token reads one row of them; not the output head
    local = rank_shapes(model, way).experts
    others = sum(shape.bytes for shape in shapes) - experts - looked_up
    return way.pp * (others + round(experts / local.experts * _busiest(model, way, sequences)))


def _busiest(model: Model, way: Parallel, sequences: int) -> float:
    """Returns the average number of the step's experts on the GPU that has the most of them."""
    experts, topk, rng = model.experts.experts, model.experts.topk, np.random.default_rng(0)
    held = [len(part) for part in np.array_split(np.arange(experts), way.ep)]
    if sequences == 1:
        return topk if way.ep == 1 else float(rng.multivariate_hypergeometric(held, topk, STEPS).max(axis=1).mean())
    chosen = 1 - (1 - topk / experts) ** sequences  # the chance of an expert
    return float(rng.binomial(held, chosen, (STEPS, way.ep)).max(axis=1).mean())


def padded_counts(splits: list[SplitReport]) -> list[int]:
    """Returns the numbers of GPUs on which the best split for a step pads the experts less than another that fits."""
    most = {split.gpus: 0.0 for split in splits if split.fits}
    for split in splits:
        if split.fits:
            most[split.gpus] = max(most[split.gpus], split.padding)
    return [count for count in sorted(most) if best_for_batches(splits, count).padding < most[count]]


def best_for_batches(splits: list[SplitReport], gpus: int) -> SplitReport:
    """Returns the split of these GPUs that reads the fewest bytes to decode a step of `SEQUENCES` sequences."""
    return min((s for s in splits if s.fits and s.gpus == gpus), key=lambda s: (s.step_bytes or 0, s.padding))


def table(splits: list[SplitReport], gpus: int, width: int, shown: Callable[[SplitReport], str]) -> Iterator[str]:
    """Yields the bytes that each split of these GPUs reads; `shown`: its options, in `width` columns."""
    yield f"Weights that the busiest of {gpus} GPUs reads to decode 1 and {SEQUENCES} sequences:"
    for split in splits:
        if split.fits and split.gpus == gpus:
            read = f"{(split.read_bytes or 0) / 1e9:6.2f}G {(split.step_bytes or 0) / 1e9:7.2f}G"
            yield f"  {shown(split):{width}s} {read}  {split.padding:.1%} padding"


def advice(splits: list[SplitReport], gpus: int, best: SplitReport) -> str:
    """Returns a sentence about the best split for a step of `SEQUENCES` sequences."""
    same = [split for split in splits if split.fits and split.gpus == gpus]
    padded = max(same, key=lambda split: split.padding)
    less = 1 - (best.step_bytes or 0) / (padded.step_bytes or 1)
    where = "" if best.vllm and best.sglang else " (SGLang)" if best.sglang else " (vLLM)"
    return (
        f"Best for {SEQUENCES} sequences: {best.options}{where}. It reads {less:.0%} less than {padded.options}, which "
        "pads the experts. Calculated for tokens that choose experts at random, not measured; what GPUs send one "
        "another is not counted."
    )
