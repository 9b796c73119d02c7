"""The shapes of a checkpoint's layers, whole and on one rank. Pure Python: the layers and warmup ask here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fp8moe_plugin.errors import UnsupportedError

GROUP = 128  # channels that share one activation scale; also the side of a weight's scale block
MAX_LOCAL_EXPERTS = 1024  # on one rank: a thread of csrc/route.cu each
N_MULTIPLE = 8  # of a weight's output channels: the GEMMs store 16 bytes of bfloat16 at a time


class Split(StrEnum):
    """Along what tensor parallelism divides a dense layer."""

    NONE = "none"
    OUTPUTS = "outputs"
    INPUTS = "inputs"


@dataclass(frozen=True)
class Dense:
    """Dense layers of one kind, as vLLM fuses them: `outputs` are the widths of the fused projections.

    A rank holds no fewer than `smallest` outputs of a projection: key and value heads are replicated, not cut.
    """

    name: str
    layers: int
    inputs: int
    outputs: tuple[int, ...]
    split: Split
    smallest: int = 0


@dataclass(frozen=True)
class Experts:
    """The routed experts of `layers` equal layers: w13 `[experts, 2 * intermediate, hidden]`, w2 transposed to it."""

    layers: int
    experts: int
    topk: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class Model:
    """A checkpoint, of which the plugin serves `experts` and `dense`."""

    architecture: str
    experts: Experts
    dense: tuple[Dense, ...]
    heads: int
    kv_heads: int  # as many as `heads` where attention keeps no heads in its cache (MLA)
    vocab: int
    ue8m0: bool  # the scales of activations are powers of two
    quantized: bool  # false: the checkpoint is not FP8, so that serving quantizes it as it loads


@dataclass(frozen=True)
class Parallel:
    """How vLLM spreads a model; with `expert_parallel` each expert stays whole, else all ranks share each expert."""

    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def ep(self) -> int:
        return self.ranks if self.expert_parallel else 1

    @property
    def sharing(self) -> int:
        """Ranks that share each expert."""
        return self.ranks // self.ep

    def __str__(self) -> str:
        """The options that ask for it, of `python -m warmup`."""
        parts = [f"--tp {self.tp}"]
        parts += [f"--dp {self.dp}"] if self.dp > 1 else []
        parts += [f"--ep {self.ep}"] if self.expert_parallel else []
        return " ".join(parts)


@dataclass(frozen=True)
class RankShapes:
    """What the busiest rank holds of a model: its experts, and each kind of dense layer."""

    experts: Experts
    dense: tuple[Dense, ...]


def rank_shapes(model: Model, parallel: Parallel) -> RankShapes:
    """One rank's part of a model.

    Raises:
        UnsupportedError: the ranks cannot share the model so; names the nearest way in which they can.
    """
    refusal = split_refusal(model, parallel)
    if refusal:
        raise UnsupportedError(f"{parallel} is not supported: {refusal}. {_advice(model, parallel)}")
    return _rank_shapes(model, parallel)


def _advice(model: Model, parallel: Parallel) -> str:
    ways = " or ".join(str(way) for way in nearest(model, parallel))
    if ways:
        return f"Nearest that is: {ways}."
    alone = split_refusal(model, Parallel())
    return f"No other is either; on one GPU: {alone}. Serve the checkpoint without --quantization fp8moe."


def split_refusal(model: Model, parallel: Parallel) -> str | None:
    """Why the ranks cannot share a model so, or None."""
    tp, experts = parallel.tp, model.experts
    if model.heads % tp or (model.kv_heads % tp and tp % model.kv_heads):
        return f"{tp} ranks cannot share {model.heads} attention heads with {model.kv_heads} key and value heads"
    if parallel.ep > experts.experts:
        return f"{parallel.ep} ranks are more than the {experts.experts} experts"
    refusal = experts_refusal(experts.hidden, experts.intermediate, parallel.sharing)
    refusal = refusal or too_many_experts(ceil_div(experts.experts, parallel.ep))
    if refusal:
        return f"experts: {refusal}"
    for layer in model.dense:
        part = _rank_dense(layer, tp)
        refusal = _uneven(layer, tp) or dense_refusal(part.inputs, part.outputs, layer.split == Split.OUTPUTS)
        if refusal:
            return f"{layer.name} {refusal}"
    return None


def nearest(model: Model, parallel: Parallel) -> list[Parallel]:
    """The supported ways closest to one that is not: on as many ranks with whole experts, and on fewer without."""
    fewer = [Parallel(tp, parallel.dp) for tp in reversed(_divisors(parallel.tp))]
    found = [
        next((way for way in ways if split_refusal(model, way) is None), None)
        for ways in (whole_expert_ways(parallel.ranks), fewer)
    ]
    return [way for way in found if way]


def whole_expert_ways(ranks: int) -> list[Parallel]:
    """The ways to spread a model over so many ranks that keep each expert whole, those that replicate least first."""
    return [Parallel(ranks // dp, dp, True) for dp in _divisors(ranks)]


def too_many_experts(local_experts: int) -> str | None:
    """Why the kernels cannot serve so many experts on one rank, or None."""
    if local_experts <= MAX_LOCAL_EXPERTS:
        return None
    return f"a rank has {local_experts} experts, the kernel that routes tokens serves at most {MAX_LOCAL_EXPERTS}"


def experts_refusal(hidden: int, intermediate: int, ranks: int) -> str | None:
    """Why the kernels cannot serve experts of this size that `ranks` ranks share, or None."""
    if hidden % GROUP:
        return f"hidden size {hidden} is no multiple of {GROUP}, the scale block"
    if intermediate % ranks:  # vLLM asserts it, although the shares here need not be equal
        return f"{ranks} ranks cannot share {intermediate} intermediate channels equally"
    return None


def local_intermediate(intermediate: int, ranks: int) -> int:
    """How many intermediate channels of an expert or an MLP a rank holds that `ranks` ranks share: whole scale blocks.

    Rank r holds the channels from r times as many on. No block is cut, so each keeps the checkpoint's scale, and
    activations are quantized in the same groups as on one rank. What lies beyond the last channel is zero.
    """
    return ceil_div(intermediate, ranks * GROUP) * GROUP


def is_gate_up(name: str) -> bool:
    """Whether a dense layer is the first half of an MLP, by its name in vLLM; `is_down`: the second half.

    Only the other half sees which rank has which of the channels between them.
    """
    return name.rpartition(".")[2] == "gate_up_proj"


def is_down(name: str) -> bool:
    return name.rpartition(".")[2] == "down_proj"


def padding_share(intermediate: int, ranks: int) -> float:
    """What `local_intermediate` adds to an equal share of the channels, as a part of that share."""
    return local_intermediate(intermediate, ranks) * ranks / intermediate - 1


def dense_refusal(inputs: int, outputs: Sequence[int], split: bool) -> str | None:
    """Why the kernels cannot serve a rank's part of a dense layer, or None: it must consist of whole scale blocks.

    Args:
        inputs: input channels of this rank.
        outputs: output channels of each fused projection on this rank; the last may end within a block...
        split: ...unless the outputs are split over ranks.
    """
    for what, size in [("input", inputs), *(("output", size) for size in (outputs if split else outputs[:-1]))]:
        if size % GROUP:
            return f"has {size} {what} channels on this rank, the scales are given for blocks of {GROUP}"
    if sum(outputs) % N_MULTIPLE:
        return f"has {sum(outputs)} output channels, the kernels need a multiple of {N_MULTIPLE}"
    return None


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _rank_shapes(model: Model, parallel: Parallel) -> RankShapes:
    experts, intermediate = model.experts, local_intermediate(model.experts.intermediate, parallel.sharing)
    local = replace(experts, experts=ceil_div(experts.experts, parallel.ep), intermediate=intermediate)
    return RankShapes(local, tuple(_rank_dense(layer, parallel.tp) for layer in model.dense))


def _rank_dense(layer: Dense, tp: int) -> Dense:
    match layer.split:
        case Split.OUTPUTS if is_gate_up(layer.name):
            return replace(layer, outputs=tuple(local_intermediate(width, tp) for width in layer.outputs))
        case Split.OUTPUTS:
            return replace(layer, outputs=tuple(max(width // tp, layer.smallest) for width in layer.outputs))
        case Split.INPUTS if is_down(layer.name):
            return replace(layer, inputs=local_intermediate(layer.inputs, tp))
        case Split.INPUTS:
            return replace(layer, inputs=layer.inputs // tp)
        case Split.NONE:
            return layer


def _uneven(layer: Dense, tp: int) -> str | None:
    widths = layer.outputs if layer.split == Split.OUTPUTS else [layer.inputs] if layer.split == Split.INPUTS else []
    size = next((width for width in widths if width % tp and width // tp >= layer.smallest), None)
    return None if size is None else f"has {size} channels, which {tp} ranks cannot share"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
