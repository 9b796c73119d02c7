"""DeepSeek-V4 and V4.1: their layers and caches. Names, fusion and splits follow vLLM's models.

All layers have experts. In most layers, attention reads a cache in which an entry stands for 4 or 128 tokens; in V4.1
for 1 or 2, and layers share caches and indexers. V4.1's n-gram tables (Engram) and draft layers (DSpark) are not known.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8moe_plugin.checkpoint.cache import Indexer, KvCache
from fp8moe_plugin.checkpoint.config_fields import Config, refuse
from fp8moe_plugin.checkpoint.dense import mlp
from fp8moe_plugin.checkpoint.layer_kinds import experts_width, same
from fp8moe_plugin.checkpoint.shapes import Dense, Model, Replicated, Split
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

V4_1 = ("deepseek_v41", "deepseek_v41_text")
NEEDED = ("compress_ratios", "o_groups", "o_lora_rank", "q_lora_rank", "head_dim")
WINDOW, SPARSE, COARSE = 0, 4, 128  # tokens of an entry; layers with 4 have an indexer
RATIOS = {  # by model type
    "deepseek_v4": (WINDOW, SPARSE, COARSE),
    **dict.fromkeys(V4_1, (WINDOW, 1, 2)),
}
WINDOW_TOKENS = 128
ENTRY_BYTES = 584  # 448 channels in FP8, 64 in BF16 and 8 bytes of scales: vLLM's only layout on Hopper
RENAMED = {  # in lists of unquantized layers; the first as vLLM's mapper does
    ".shared_experts.w2": ".shared_experts.down_proj",
    ".shared_experts.w1": ".shared_experts.gate_proj",
    ".shared_experts.w3": ".shared_experts.up_proj",
}


def has(fields: Mapping[str, Any]) -> bool:
    """Returns whether the language model that these fields of config.json describe is a DeepSeek-V4 or V4.1."""
    return fields.get("model_type") in [*RATIOS]  # the field is unchecked, and may be of any type


def engine_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns a checkpoint's list of unquantized layers with the names of engines."""
    return tuple(functools.reduce(lambda name, pair: name.replace(*pair), RENAMED.items(), name) for name in names)


def scale_names(spec: QuantSpec) -> tuple[str, ...]:
    """Returns the suffixes that scales of experts may have in checkpoints: the published one, and vLLM's."""
    return spec.recoded_from.scale_names if spec.recoded_from else ("scale", spec.scale)


def check_format(fields: Mapping[str, Any], spec: QuantSpec) -> None:
    """Raise `UnsupportedError` for a DeepSeek-V4 in FP8 without blocks, which the batched product `wo_a` needs."""
    if has(fields) and spec.dense is FP8_CHANNEL:
        raise UnsupportedError(
            f"The checkpoint's dense layers are {spec.dense.name}, but those of DeepSeek-V4 need {FP8_BLOCK.name}. "
            f"Serve it without --quantization {NAME}."
        )


def check_fields(config: Config) -> None:
    """Raise the error of `refuse` for a missing field, and `UnsupportedError` for a kind of layer that is not known."""
    for name in NEEDED:
        if getattr(config, name) is None:
            refuse(config.model_type, "config.json", f"{name} is missing")
    ratios, known = config.compress_ratios or [], RATIOS[config.model_type or ""]
    if len(ratios) < config.num_hidden_layers:
        problem = f"compress_ratios has {len(ratios)} entries for {config.num_hidden_layers} layers"
        refuse(config.model_type, "config.json", problem)
    others = set(ratios) - {*known}
    if others:
        raise UnsupportedError(
            f"The checkpoint's compress_ratios has {shown(sorted(others))}, but only {known[0]}, {known[1]} "
            f"and {known[2]} are known. Serve it without --quantization {NAME}."
        )


def dense_kinds(config: Config) -> Iterator[tuple[Dense, Sequence[int]]]:
    """Yields each kind of dense layer with the layers that have one."""
    hidden, every = config.hidden_size, config.layers
    q, head, groups = config.q_lora_rank or 0, config.head_dim or 0, config.o_groups or 0
    heads, o = config.num_attention_heads * head, groups * (config.o_lora_rank or 0)
    yield Dense("attn.fused_wqa_wkv", 0, hidden, (q, head), Split.NONE), every
    yield Dense("attn.wq_b", 0, q, (heads,), Split.OUTPUTS), every
    yield Dense("attn.wo_a", 0, heads // groups, (o,), Split.OUTPUTS, groups=groups), every
    yield Dense("attn.wo_b", 0, o, (hidden,), Split.INPUTS), every
    for ratio in (SPARSE, COARSE):
        yield from _compressor("attn", config, head, ratio)
    if sparse := _indexed(config):
        index = config.index_n_heads * config.index_head_dim
        yield Dense("attn.indexer.wq_b", 0, q, (index,), Split.NONE), sparse
        yield Dense("attn.indexer.weights_proj", 0, hidden, (config.index_n_heads,), Split.NONE), sparse
        yield from _compressor("attn.indexer", config, config.index_head_dim, SPARSE)
    if shared := same(config.n_shared_experts, "number of shared experts"):
        yield from ((half, every) for half in mlp("ffn.shared_experts", hidden, shared * experts_width(config)))
    if mtp := every[config.num_hidden_layers :]:
        yield from ((Dense(name, 0, hidden, (hidden,), Split.NONE), mtp) for name in ("e_proj", "h_proj"))


def completed(model: Model, config: Config) -> Model:
    """Returns the model with its cache, and the weights and sizes that only DeepSeek-V4 has."""
    streams, sparse, layers, mtp = config.hc_mult or 1, _indexed(config), len(config.layers), model.mtp_layers
    mixing = Replicated(
        "hc_attn_fn, hc_ffn_fn", layers, (2, streams * (2 + streams), streams * config.hidden_size), "F32", mtp
    )
    tables = min(config.num_hash_layers, config.num_hidden_layers)
    table = Replicated("ffn.gate.tid2eid", tables, (config.vocab_size, model.experts.topk), "I32")
    return replace(
        model,
        kv_heads=config.num_attention_heads,  # its cache has no heads
        indexer=Indexer(config.index_n_heads, config.index_head_dim, len(sparse)) if config.index_n_heads else None,
        cache=_cache(config),
        replicated=(*([table] if tables else []), *([mixing] if config.hc_mult else [])),
        router="ffn.gate",
        streams=streams,
    )


def _cache(config: Config) -> KvCache:
    """Returns the cache of the main layers.

    The sizes are those of vLLM's code. They were not measured, and vLLM also pads the pages of several layers to one
    size. V4.1's lack the state of its compressors.
    """
    head, index, layers = config.head_dim or 0, config.index_head_dim, config.num_hidden_layers
    sparse, coarse = (len(_layers(config, ratio)) for ratio in (SPARSE, COARSE))
    key = index + 4  # in FP8, with a scale
    states = sparse * (_state_bytes(head, SPARSE) + _state_bytes(index, SPARSE)) + coarse * _state_bytes(head, COARSE)
    windows = layers * WINDOW_TOKENS * ENTRY_BYTES
    if config.model_type in V4_1:
        owners = range(layers) if config.kv_source_layer_ids is None else config.kv_source_layer_ids
        ratios = [ratio for i, ratio in enumerate((config.compress_ratios or [])[:layers]) if ratio and i in owners]
        token_bytes = sum((ENTRY_BYTES + key) / ratio for ratio in ratios)
        fewest = min(ratios, default=None)
        return KvCache(layers, True, head, len(ratios), token_bytes, fewest, sequence_bytes=windows)
    return KvCache(
        layers,
        mla=True,
        elements=head,
        growing=sparse + coarse,
        token_bytes=sparse * (ENTRY_BYTES + key) / SPARSE + coarse * ENTRY_BYTES / COARSE,
        entry_tokens=SPARSE if sparse else COARSE if coarse else None,
        sequence_bytes=windows + states,
    )


def _compressor(module: str, config: Config, channels: int, ratio: int) -> Iterator[tuple[Dense, Sequence[int]]]:
    """Yields the projection that compresses keys, with one half for values and one for scores."""
    if layers := _layers(config, ratio):
        width = _overlap(ratio) * channels
        name = f"{module}.compressor.fused_wkv_wgate"
        yield Dense(name, 0, config.hidden_size, (width, width), Split.NONE), layers


def _state_bytes(channels: int, ratio: int) -> int:
    """Returns the bytes of a compressor's state of a sequence: float32 values and scores of the last tokens."""
    overlap = _overlap(ratio)
    return overlap * ratio * 2 * overlap * channels * 4


def _overlap(ratio: int) -> int:
    return 2 if ratio == SPARSE else 1  # each token is in two entries of 4


def _indexed(config: Config) -> list[int]:
    """Returns the layers with an indexer of their own."""
    if config.model_type not in V4_1:
        return _layers(config, SPARSE)
    return sorted({i for i in config.index_source_layer_ids or () if i < config.num_hidden_layers})


def _layers(config: Config, ratio: int) -> list[int]:
    """Returns the layers with this compression. Those for multi-token prediction have only a window."""
    return [i for i in range(config.num_hidden_layers) if (config.compress_ratios or [])[i] == ratio]
