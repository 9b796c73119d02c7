"""How ranks share a model: the part of one rank, who computes each layer of it, and which splits are refused."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.placement import (
    OURS,
    DensePart,
    Engine,
    ExpertsPart,
    Placement,
    Server,
    dense_kind_refusal,
    kind_refusal,
    place_dense,
    place_experts,
    sglang_experts,
)
from fp8moe_plugin.checkpoint.shapes import (
    Dense,
    Experts,
    Model,
    Split,
    is_down,
    is_gate_up,
    local_intermediate,
    padded_hidden,
    rank_dense,
)
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.weight_format import ceil_div


@dataclass(frozen=True)
class RankShapes:
    """The part of a model on the rank with the most weights: its experts, and each kind of dense layer."""

    experts: Experts
    dense: tuple[Dense, ...]
    experts_placement: Placement
    dense_placements: tuple[Placement, ...]


class EngineLayers(NamedTuple):
    """Layers of one kind that run on the engine's own kernels."""

    name: str
    layers: int
    why: str


def rank_shapes(model: Model, parallel: Parallel) -> RankShapes:
    """Returns one rank's part of a model.

    Raises:
        UnsupportedError: the model cannot be split this way; the message names the nearest supported options.
    """
    refusal = split_refusal(model, parallel)
    if refusal:
        raise UnsupportedError(f"{parallel} is not supported: {refusal}. {_advice(model, parallel)}")
    experts, width = model.experts, local_intermediate(model.experts.intermediate, parallel.sharing)
    layers, count = ceil_div(experts.layers, parallel.pp), ceil_div(experts.experts, parallel.ep)
    return RankShapes(
        experts=replace(experts, layers=layers, experts=count, hidden=_rank_hidden(model), intermediate=width),
        dense=tuple(rank_dense(layer, parallel) for layer in model.dense),
        experts_placement=place_rank_experts(model, parallel),
        dense_placements=tuple(_place(model, layer, parallel) for layer in model.dense),
    )


def place_rank_experts(model: Model, parallel: Parallel) -> Placement:
    """Returns who computes the experts of a model that is split this way."""
    experts, kinds = model.experts, (kind_refusal(model.weights, activation) for activation in model.activations)
    part = ExpertsPart(
        _rank_hidden(model),
        experts.intermediate,
        parallel.sharing,
        ceil_div(experts.experts, parallel.ep),
        next(filter(None, kinds), None),
    )
    stored = (model.recoded_from or model.weights) if model.quantized else None
    blocks = stored is not None and stored is not MXFP4 and stored.weight_block is not None
    return place_experts(part, sglang_experts(stored) if parallel.sglang else Engine("vLLM", blocks))


def _rank_hidden(model: Model) -> int:
    return padded_hidden(model.experts.hidden) if model.gpt_oss else model.experts.hidden


def computes_experts(model: Model, parallel: Parallel) -> bool:
    """Returns whether our kernels compute the experts of a model that is split this way."""
    return model.experts.layers > 0 and place_rank_experts(model, parallel) == OURS


def engine_layers(model: Model, parallel: Parallel) -> list[EngineLayers]:
    """Returns the layers that run on the engine's own kernels in a split that is not refused."""
    rank = rank_shapes(model, parallel)
    experts = EngineLayers("experts", model.experts.layers, rank.experts_placement.why)
    found = [experts] if experts.layers and rank.experts_placement.server is Server.ENGINE else []
    for layer, (server, why) in zip(model.dense, rank.dense_placements, strict=True):
        found += [EngineLayers(layer.name, layer.layers, why)] if server is Server.ENGINE else []
    return found


def engine_text(model: Model, *ways: Parallel) -> str | None:
    """Returns which layers run on the engine's own kernels, and why; None if there are none.

    Args:
        ways: splits with the same such layers.
    """
    by_reason: dict[str, list[str]] = {}
    for name, layers, why in engine_layers(model, ways[0]):
        by_reason.setdefault(why, []).append(f"{name} ({layers} layers)")
    if not by_reason:
        return None
    listed = "; ".join(f"{', '.join(named)}: {why}" for why, named in by_reason.items())
    return f"with {' or '.join(map(str, ways))}, {engine_name(ways[0])}'s own kernels compute {listed}"


def _advice(model: Model, parallel: Parallel) -> str:
    ways = " or ".join(str(way) for way in nearest(model, parallel))
    if ways:
        return f"The nearest supported options are: {ways}."
    alone = split_refusal(model, Parallel(sglang=parallel.sglang))
    return (
        f"No other split is supported either; on one GPU: {alone}. Serve the checkpoint without --quantization fp8moe."
    )


def split_refusal(model: Model, parallel: Parallel) -> str | None:
    """Returns why a model cannot be split this way, or None if it can."""
    tp, experts = parallel.tp, model.experts
    if model.heads % tp or (model.kv_heads % tp and tp % model.kv_heads):
        return f"{tp} ranks cannot share {model.heads} attention heads with {model.kv_heads} key/value heads"
    whole = parallel.sglang or model.gpt_oss
    if parallel.ep > experts.experts or (whole and experts.experts % parallel.ep):
        equally = f" equally, which {engine_name(parallel)} requires" if parallel.ep <= experts.experts else ""
        return f"{parallel.ep} ranks cannot share {experts.experts} experts{equally}"
    if parallel.pp > 1 and model.cache and parallel.pp > model.cache.layers:
        return f"{parallel.pp} stages cannot share {model.cache.layers} layers"
    server, why = place_rank_experts(model, parallel)
    if server is Server.NONE and experts.layers:
        return f"experts: {why}"
    for layer in model.dense:
        server, why = _place(model, layer, parallel)
        if server is Server.NONE:
            return f"{layer.name} {why}"
    return None


def nearest(model: Model, parallel: Parallel) -> list[Parallel]:
    """Returns the closest supported splits: one with whole experts on the same ranks, and one with fewer ranks."""
    fewer = [replace(parallel, tp=tp, dp=dp, ep=1) for tp in _divisors(parallel.tp) for dp in _divisors(parallel.dp)]
    fewer = [*sorted(fewer, key=lambda way: way.ranks, reverse=True), Parallel(sglang=parallel.sglang)]
    found = [
        next((way for way in ways if split_refusal(model, way) is None), None)
        for ways in (whole_expert_ways(parallel), fewer)
    ]
    return [way for way in found if way]


def whole_expert_ways(parallel: Parallel) -> list[Parallel]:
    """Returns the splits over the same number of ranks with whole experts, starting with the least replication."""
    ranks = parallel.ranks
    return [replace(parallel, tp=ranks // dp, dp=dp, ep=ranks) for dp in _divisors(ranks)]


def engine_name(parallel: Parallel) -> str:
    return "SGLang" if parallel.sglang else "vLLM"


def _place(model: Model, layer: Dense, parallel: Parallel) -> Placement:
    """Returns who computes a kind of dense layer."""
    ranks, part = parallel.dense_ranks(layer.name), rank_dense(layer, parallel)
    if why := _uneven(layer, ranks):
        return Placement(Server.NONE, why)
    halves = layer.outputs[:1] if is_gate_up(layer.name) else (layer.inputs,) if is_down(layer.name) else ()
    weights, split = model.dense_weights, layer.split == Split.OUTPUTS and ranks > 1
    kind = dense_kind_refusal(weights)
    padded = kind is None and any(width // ranks % GROUP for width in halves)
    share = DensePart(part.inputs, part.outputs, layer.inputs, split, padded, kind)
    return place_dense(share, weights, Engine(engine_name(parallel), model.quantized, model.architecture))


def _uneven(layer: Dense, tp: int) -> str | None:
    if layer.groups > 1:
        if layer.groups % tp:
            return f"has {layer.groups} groups, which {tp} ranks cannot share equally"
        if (channels := sum(layer.outputs) // layer.groups) % GROUP:
            return f"has groups of {channels} output channels, not a multiple of the scale block of {GROUP}"
    widths = layer.outputs if layer.split == Split.OUTPUTS else [layer.inputs] if layer.split == Split.INPUTS else []
    size = next((width for width in widths if width % tp and width // tp >= layer.smallest), None)
    return None if size is None else f"has {size} channels, which {tp} ranks cannot share equally"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
