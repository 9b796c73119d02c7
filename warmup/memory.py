"""The memory of a model on one GPU in bytes: weights, scratch and the KV cache."""

import math
from dataclasses import replace

import numpy as np

from fp8moe_plugin.checkpoint.cache import KvCache
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.placement import Server
from fp8moe_plugin.checkpoint.shapes import (
    Dense,
    Experts,
    Model,
    experts_bytes,
    is_down,
    is_gate_up,
    padding_share,
    rank_dense,
)
from fp8moe_plugin.checkpoint.splits import RankShapes, rank_shapes
from fp8moe_plugin.formats.dtypes import DTYPES
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat, ceil_div
from warmup.all_to_all import window_bytes
from warmup.report import ShapeReport
from warmup.target import GIB

MOST_SEQUENCES = 1024  # sequences in vLLM's profiling run with sampling; its default on these GPUs
SAMPLER_COPIES = 3  # of float32 logits, in vLLM's sampler
HIDDEN_COPIES = 6  # of the hidden states of a step: residual, attention, experts, and their outputs
STREAM_COPIES = 2  # of each further stream of hyper-connections: before and after a layer
CONTEXT_ROWS = 64 * 1024  # cached tokens whose keys and values vLLM's MLA computes at once, in a prefill with context
GATHERED_SEQUENCES = 4  # whose compressed cache vLLM gathers in BF16 in a prefill, if all had the greatest length
# Not modelled one by one: the CUDA context, workspaces of libraries, CUDA graphs; buffers of NCCL and of all-reduces.
OTHER_BYTES, COMMUNICATION_BYTES = 3 * GIB // 4, 1 * GIB


def without_mtp(model: Model) -> Model:
    """Returns the model without the layers for multi-token prediction, which engines load only to speculate."""
    experts, plain_experts = _without_mtp(model.experts), model.plain_experts and _without_mtp(model.plain_experts)
    dense, plain = (
        tuple(replace(layer, layers=layer.layers - layer.mtp) for layer in kinds if layer.layers > layer.mtp)
        for kinds in (model.dense, model.plain)
    )
    replicated = tuple(replace(part, layers=part.layers - part.mtp, mtp=0) for part in model.replicated)
    return replace(
        model,
        experts=experts,
        plain_experts=plain_experts,
        dense=dense,
        plain=plain,
        replicated=replicated,
        mtp_layers=0,
    )


def _without_mtp(experts: Experts) -> Experts:
    return replace(experts, layers=experts.layers - experts.mtp)


def weight_shapes(model: Model, parallel: Parallel) -> list[ShapeReport]:
    """Returns the kinds of weights on the rank that holds the most weights.

    Raises:
        UnsupportedError: the model cannot be split this way.
    """
    rank = rank_shapes(model, parallel)
    dense = []
    for whole, part, (server, _) in zip(model.dense, rank.dense, rank.dense_placements, strict=True):
        padding, shape = _mlp_padding(whole, parallel.dense_ranks(whole.name)), [sum(part.outputs), part.inputs]
        if server is Server.ENGINE and not model.quantized:
            dense.append(_plain(f"{part.name} (BF16)", part.layers, shape))
        else:
            dense.append(_shape(model.dense_weights, part.name, part.layers, shape, padding))
    return [*_experts(model, parallel, rank), *dense, *_others(model, parallel, rank)]


def weight_bytes(model: Model, parallel: Parallel) -> int:
    """Returns the bytes of weights that an engine loads on the rank that holds the most, without speculation."""
    return sum(shape.bytes for shape in weight_shapes(without_mtp(model), parallel))


def recoding_note(model: Model) -> list[str]:
    """Returns a sentence about experts that have another form in memory than in the checkpoint, if they have."""
    if not (stored := model.recoded_from) or model.unknown_format or not model.experts.layers:
        return []
    e = model.experts
    before, after = (experts_bytes(e, weights) for weights in (stored, model.weights))
    how = "packed" if model.weights is PACKED_MXFP4 else f"re-encoded to {model.weights.name}"
    return [
        f"The experts are in {stored.name}, {before / 1e9:.4g} GB in all. While they are loaded, they are {how}, "
        f"{after / 1e9:.4g} GB."
    ]


def _experts(model: Model, parallel: Parallel, rank: RankShapes) -> list[ShapeReport]:
    e, weights = rank.experts, model.weights
    share = padding_share(model.experts.intermediate, parallel.sharing)
    if rank.experts_placement.server is Server.ENGINE:
        if not model.quantized:
            return _bf16_experts(model, parallel, rank, e.layers)
        e, share = replace(e, intermediate=ceil_div(model.experts.intermediate, parallel.sharing)), 0.0
        weights = model.recoded_from or weights
    w13, w2 = [e.experts, 2 * e.intermediate, e.hidden], [e.experts, e.hidden, e.intermediate]
    shapes = (("w13", w13), ("w2", w2))
    found = [_shape(weights, f"experts.{name}", e.layers, shape, share) for name, shape in shapes if e.layers]
    if model.gpt_oss:
        biases = [e.experts, 2 * e.intermediate + e.hidden]
        nbytes = e.layers * math.prod(biases) * DTYPES["F32"].bits // 8
        found.append(ShapeReport(name="experts' biases (F32)", layers=e.layers, shape=biases, bytes=nbytes))
    return found


def _bf16_experts(model: Model, parallel: Parallel, rank: RankShapes, layers: int) -> list[ShapeReport]:
    """Returns experts that stay unquantized, which engines do not pad to scale blocks."""
    if not layers:
        return []
    experts, hidden = rank.experts.experts, rank.experts.hidden
    width = ceil_div(model.experts.intermediate, parallel.sharing)
    w13, w2 = [experts, 2 * width, hidden], [experts, hidden, width]
    return [_plain(f"experts.{name} (BF16)", layers, shape) for name, shape in (("w13", w13), ("w2", w2))]


def _plain_layers(model: Model, parallel: Parallel) -> int:
    return ceil_div(model.plain_experts.layers, parallel.pp) if model.plain_experts else 0


def _others(model: Model, parallel: Parallel, rank: RankShapes) -> list[ShapeReport]:
    """Returns the weights that are not FP8: unquantized layers, routers, embeddings and output head."""
    plain = [rank_dense(layer, parallel) for layer in model.plain]
    found = [_plain(f"{layer.name} (BF16)", layer.layers, [sum(layer.outputs), layer.inputs]) for layer in plain]
    found = [*_bf16_experts(model, parallel, rank, _plain_layers(model, parallel)), *found]
    routers = rank.experts.layers + _plain_layers(model, parallel)
    found.append(_plain(f"{model.router} (BF16)", routers, [model.experts.experts, model.experts.hidden]))
    for part in model.replicated:
        layers, name = ceil_div(part.layers, parallel.pp), f"{part.name} ({part.dtype})"
        nbytes = layers * math.prod(part.shape) * DTYPES[part.dtype].bits // 8
        found.append(ShapeReport(name=name, layers=layers, shape=list(part.shape), bytes=nbytes))
    # Engines keep both parts of kv_b_proj in BF16 as well, to multiply queries and outputs with.
    for layer in _kv_b_proj(model, parallel):
        found.append(_plain("MLA's W_UK, W_UV (BF16)", layer.layers, [sum(layer.outputs), layer.inputs]))
    rows = 2 * ceil_div(model.vocab, parallel.tp)
    if parallel.sglang and parallel.dp > 1:  # each part of DP attention has all embeddings; the head is split
        rows = model.vocab + ceil_div(model.vocab, parallel.ranks)
    return [*found, _plain("embeddings (BF16)", 1, [rows, model.experts.hidden])]


def _kv_b_proj(model: Model, parallel: Parallel) -> list[Dense]:
    """Returns one rank's part of MLA's projections from cached vectors to keys and values; empty without MLA."""
    return [
        rank_dense(layer, parallel) for layer in (*model.dense, *model.plain) if layer.name == "self_attn.kv_b_proj"
    ]


def _plain(name: str, layers: int, shape: list[int]) -> ShapeReport:
    return ShapeReport(name=name, layers=layers, shape=shape, bytes=2 * layers * int(np.prod(shape, dtype=int)))


def _shape(weights: WeightFormat, name: str, layers: int, shape: list[int], padding: float) -> ShapeReport:
    """Quantized weights `[.., N, K]` with their scales; `padding`: the result of `padding_share`."""
    *experts, n, k = shape
    nbytes = layers * math.prod(experts) * weights.nbytes(n, k)
    padding_bytes = round(nbytes * padding / (1 + padding))
    return ShapeReport(name=name, layers=layers, shape=shape, bytes=nbytes, padding_bytes=padding_bytes)


def _mlp_padding(whole: Dense, ranks: int) -> float:
    if is_gate_up(whole.name):
        return padding_share(whole.outputs[0], ranks)
    return padding_share(whole.inputs, ranks) if is_down(whole.name) else 0.0


def cache_bytes(model: Model, parallel: Parallel, fp8: bool) -> int:
    """Returns the KV cache's bytes for one token on one GPU; `fp8`: the command line asks for elements of 8 bits.

    MLA caches one vector, whole on every rank. Key/value heads are replicated if there are fewer heads than ranks.
    Windows and states of layers with sliding or linear attention do not grow with a sequence, see `sequence_bytes`.
    """
    cache, indexer = model.cache, model.indexer
    assert cache
    if cache.token_bytes is not None:  # with the indexer's keys; its only layout is FP8
        return math.ceil(cache.token_bytes * _stage_share(cache, parallel))
    fp8 = fp8 or cache.fp8
    size = 1 if fp8 else 2
    if not cache.mla:
        per_layer = max(1, model.kv_heads // parallel.tp) * cache.elements * size
    elif fp8 and indexer:  # sparse attention: 512 bytes, 4 scales, and 64 positional channels in BF16
        per_layer = 656
    else:
        per_layer = cache.elements * size
    found = per_layer * ceil_div(cache.growing or cache.layers, parallel.pp)
    if indexer:  # FP8 keys with a scale
        layers = cache.layers if indexer.layers is None else indexer.layers
        found += (indexer.dim + 4 * ceil_div(indexer.dim, GROUP)) * ceil_div(layers, parallel.pp)
    return found


def sequence_bytes(model: Model, parallel: Parallel) -> int:
    """Returns the KV cache's bytes for a sequence on one GPU, besides those of its tokens."""
    cache = model.cache
    assert cache
    return math.ceil(cache.sequence_bytes * _stage_share(cache, parallel))


def _gathered_bytes(model: Model, tokens: int, longest: int) -> int:
    """Returns the bytes of the cache that a prefill gathers: compressed entries, and keys of the step itself."""
    if not (cache := model.cache) or cache.entry_tokens is None:
        return 0
    return 2 * GATHERED_SEQUENCES * (ceil_div(longest, cache.entry_tokens) + tokens) * cache.elements


def _stage_share(cache: KvCache, parallel: Parallel) -> float:
    return ceil_div(cache.layers, parallel.pp) / cache.layers


def step_bytes(model: Model, parallel: Parallel, tokens: int, scratch: int, longest: int = 0) -> int:
    """Returns the peak memory of a step or of sampling, which an engine reserves besides weights and KV cache.

    Args:
        longest: tokens of the longest sequence. It has an effect for compressed caches only.
    """
    rank = rank_shapes(model, parallel)
    widest = max((sum(layer.outputs) + layer.inputs for layer in rank.dense), default=0)
    context = max((2 * CONTEXT_ROWS * sum(layer.outputs) for layer in _kv_b_proj(model, parallel)), default=0)
    copies = HIDDEN_COPIES + STREAM_COPIES * (model.streams - 1)
    layers = 2 * tokens * (copies * model.experts.hidden + widest) + max(scratch, context)
    layers += _gathered_bytes(model, tokens, longest)
    sampling = SAMPLER_COPIES * 4 * min(MOST_SEQUENCES, tokens) * model.vocab
    communication = COMMUNICATION_BYTES if parallel.gpus > 1 else 0
    return max(layers, sampling) + OTHER_BYTES + communication + window_bytes(model, parallel, tokens)
