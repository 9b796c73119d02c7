"""The dense layers of a model: attention, MLPs and shared experts. Names, fusion and splits follow vLLM's models.

Routers are omitted: no published checkpoint quantizes them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fp8moe_plugin.checkpoint.config_fields import Config
from fp8moe_plugin.checkpoint.layer_kinds import LINEAR, attention_kinds, dense_width, experts_width, same
from fp8moe_plugin.checkpoint.shapes import Dense, Split
from fp8moe_plugin.checkpoint.unquantized import DELTA_NET, Unquantized

SHARED_UNNAMED = ("llama4_text",)  # each layer of experts has a shared one of their width, without a field for it
GATED = ("qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text")  # attention has a gate, unless config.json says otherwise


def dense_kinds(config: Config, moe: Sequence[int]) -> Iterator[tuple[Dense, Sequence[int]]]:
    """Yields each kind of dense layer with the layers that have one; `moe`: the layers with experts."""
    yield from _attention(config)
    if plain := sorted(set(config.layers) - set(moe)):
        yield from ((layer, plain) for layer in mlp("mlp", config.hidden_size, dense_width(config)))
    yield from ((layer, moe) for layer in _shared(config))


def divided(
    config: Config, kinds: Iterable[tuple[Dense, Sequence[int]]], unquantized: Unquantized
) -> tuple[tuple[Dense, ...], tuple[Dense, ...]]:
    """Returns the quantized and the unquantized layers of each kind."""
    found: dict[bool, list[Dense]] = {False: [], True: []}
    for layer, where in kinds:
        kept = {i: unquantized.has(i, layer.name) for i in where}
        for is_kept, dense in found.items():
            if layers := [i for i in where if kept[i] is is_kept]:
                mtp = sum(i >= config.num_hidden_layers for i in layers)
                dense.append(replace(layer, layers=len(layers), mtp=mtp))
    return tuple(found[False]), tuple(found[True])


def cached_elements(config: Config) -> int:
    """Returns the elements that attention caches per token: MLA's vector, or a key and a value of a head."""
    if config.kv_lora_rank:
        return config.kv_lora_rank + config.qk_rope_head_dim
    return sum(_heads(config))


def indexer_layers(config: Config) -> int:
    """Returns the number of layers with an indexer of their own, without layers for multi-token prediction."""
    types = config.indexer_types or ["full"] * config.num_hidden_layers
    return sum(kind == "full" for kind in types[: config.num_hidden_layers])


def _heads(config: Config) -> tuple[int, int]:
    """Returns the channels of a key head and of a value head."""
    head = config.head_dim or config.hidden_size // config.num_attention_heads
    return head, config.v_head_dim or head


def _attention(config: Config) -> Iterator[tuple[Dense, Sequence[int]]]:
    """Yields softmax attention and Qwen's linear attention.

    Other kinds count as softmax attention, because their layers have a similar size.
    """
    kinds = attention_kinds(config)
    linear = [i for i in config.layers if kinds[i] == LINEAR and config.linear_num_value_heads]
    others = sorted(set(config.layers) - set(linear))
    for layer in _mla(config) if config.kv_lora_rank else _gqa(config):
        if layer.name.startswith("self_attn.indexer."):
            types = config.indexer_types or ()
            yield layer, [i for i in others if i >= len(types) or types[i] == "full"]
        else:
            yield layer, others
    yield from ((layer, linear) for layer in _delta_net(config) if linear)


def _gqa(config: Config) -> Iterator[Dense]:
    head, value_head = _heads(config)
    gated = config.model_type in GATED if config.attn_output_gate is None else config.attn_output_gate
    q, k = config.num_attention_heads * head * (1 + gated), config.kv_heads * head
    outputs = q, k, config.kv_heads * value_head
    yield Dense("self_attn.qkv_proj", 0, config.hidden_size, outputs, Split.OUTPUTS, smallest=head)
    yield Dense("self_attn.o_proj", 0, config.num_attention_heads * value_head, (config.hidden_size,), Split.INPUTS)


def _delta_net(config: Config) -> Iterator[Dense]:
    k = config.linear_num_key_heads * config.linear_key_head_dim
    v = config.linear_num_value_heads * config.linear_value_head_dim
    yield Dense(f"{DELTA_NET}.in_proj_qkvz", 0, config.hidden_size, (k, k, v, v), Split.OUTPUTS)
    yield Dense(f"{DELTA_NET}.out_proj", 0, v, (config.hidden_size,), Split.INPUTS)


def _mla(config: Config) -> Iterator[Dense]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank or 0
    q = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    kv_a = kv_rank + config.qk_rope_head_dim
    if q_rank is None:
        yield Dense("self_attn.kv_a_proj_with_mqa", 0, hidden, (kv_a,), Split.NONE)
        yield Dense("self_attn.q_proj", 0, hidden, (q,), Split.OUTPUTS)
    else:
        yield Dense("self_attn.fused_qkv_a_proj", 0, hidden, (q_rank, kv_a), Split.NONE)
        yield Dense("self_attn.q_b_proj", 0, q_rank, (q,), Split.OUTPUTS)
    kv_b = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield Dense("self_attn.kv_b_proj", 0, kv_rank, (kv_b,), Split.OUTPUTS)
    yield Dense("self_attn.o_proj", 0, heads * config.v_head_dim, (hidden,), Split.INPUTS)
    if q_rank is not None and config.index_n_heads:  # selects the tokens that DeepSeek-V3.2 attends to
        index = config.index_n_heads * config.index_head_dim
        yield Dense("self_attn.indexer.wq_b", 0, q_rank, (index,), Split.NONE)


def mlp(name: str, hidden: int, width: int) -> Iterator[Dense]:
    yield Dense(f"{name}.gate_up_proj", 0, hidden, (width, width), Split.OUTPUTS)
    yield Dense(f"{name}.down_proj", 0, width, (hidden,), Split.INPUTS)


def _shared(config: Config) -> Iterator[Dense]:
    """Yields the shared experts, under the names of DeepSeek, GLM and ERNIE, of Hunyuan, and of Qwen and Llama."""
    shared = same(config.n_shared_experts, "number of shared experts")
    if shared:
        yield from mlp(
            "mlp.shared_experts", config.hidden_size, shared * (config.shared_width or experts_width(config))
        )
    shared = same(config.num_shared_expert, "number of shared experts")
    if shared:
        yield from mlp("mlp.shared_mlp", config.hidden_size, shared * dense_width(config))
    width = experts_width(config) if config.model_type in SHARED_UNNAMED else config.shared_expert_intermediate_size
    if width:
        yield from mlp("mlp.shared_expert", config.hidden_size, width)
