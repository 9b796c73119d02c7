"""The kind of each layer of a model, from its config.json: experts or an MLP, and the kind of attention."""

from collections.abc import Callable, Sequence

from fp8moe_plugin.checkpoint.config_fields import Config, refuse
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

FULL, SLIDING, LINEAR = "full", "sliding", "linear"  # kinds of attention
KINDS = {  # by their names in config.json; all other names count as full
    **dict.fromkeys(("sliding_attention", "chunked_attention"), SLIDING),
    **dict.fromkeys(("linear_attention", "mamba", "conv", "moe", "mlp"), LINEAR),
}
MLPS = {"sparse", "moe", "dense", "mlp"}  # names of experts and MLPs in config.json


def same(value: int | Sequence[int], what: str) -> int:
    """Returns the common value of a field that some model families give per layer."""
    values = {value} if isinstance(value, int) else set(value)
    if len(values) > 1:
        raise UnsupportedError(
            f"The checkpoint's layers differ in their {what}: {shown(sorted(values))}. All layers with experts must "
            f"be the same. Serve it without --quantization {NAME}."
        )
    return values.pop()


def experts_width(config: Config) -> int:
    """Returns the intermediate channels of an expert.

    Without `moe_intermediate_size`, as in Mixtral and MiniMax-M2, `intermediate_size` is that of the experts.
    """
    found = config.intermediate_size if config.moe_intermediate_size is None else config.moe_intermediate_size
    return _width(config, found)


def dense_width(config: Config) -> int:
    """Returns the intermediate channels of the MLPs of layers without experts."""
    return _width(config, config.dense_intermediate_size or config.intermediate_size)


def _width(config: Config, value: int | Sequence[int] | None) -> int:
    if value is None:
        refuse(config.model_type, "config.json", "intermediate_size is missing")
    return same(value, "intermediate size")


def moe_layers(config: Config) -> list[int]:
    """Returns the layers with experts. The rules of all model families apply; rules without a field have no effect."""
    start = same(config.moe_layer_start_index, "first layer with experts")
    end = config.layers[-1]
    if config.moe_layer_end_index is not None:
        end = same(config.moe_layer_end_index, "last layer with experts")
        end = config.num_hidden_layers - 1 if end == -1 else end
    without, frequency, types = set(config.mlp_only_layers), config.moe_layer_freq, config.mlp_layer_types or ()
    if not MLPS & set(types):  # `layers_block_type` may name kinds of attention only
        types = ()
    listed = config.moe_layers_enum
    named = {int(i) for i in (listed.split(",") if isinstance(listed, str) else listed or ())}
    return [
        i
        for i in config.layers
        if max(start, config.first_k_dense_replace) <= i <= end
        and (i % frequency == 0 if isinstance(frequency, int) else i < len(frequency) and frequency[i] > 0)
        and i not in without
        and (i + 1) % config.decoder_sparse_step == 0
        and (i + 1) % config.moe_layer_interval == 0
        and (i + 1) % config.interleave_moe_layer_step == 0
        and (i >= len(types) or types[i] in ("sparse", "moe"))
        and (listed is None or i in named)
    ]


def attention_kinds(config: Config) -> list[str]:
    """Returns FULL, SLIDING or LINEAR for each layer; layers for multi-token prediction are FULL."""
    kind_of = _kind_of(config)
    main = [kind_of(i) for i in range(config.num_hidden_layers)]
    return main + [FULL] * config.num_nextn_predict_layers


def _kind_of(config: Config) -> Callable[[int], str]:
    """Returns the rule for a layer's kind of attention: of all model families' rules, the first one in config.json."""
    types, pattern, list_of_types = config.layer_types, config.hybrid_layer_pattern, config.attn_type_list
    group, interval = config.layer_group_size, config.full_attention_interval
    full = (config.linear_attn_config or {}).get("full_attn_layers")  # counted from 1, as in Kimi-Linear
    if types:
        return lambda i: KINDS.get(types[i], FULL) if i < len(types) else FULL
    if pattern:  # MiMo-V2
        return lambda i: SLIDING if i < len(pattern) and pattern[i] else FULL
    if list_of_types:  # MiniMax
        return lambda i: FULL if i >= len(list_of_types) or list_of_types[i] else LINEAR
    if interval:
        return lambda i: FULL if (i + 1) % interval == 0 else LINEAR
    if group:  # Ling
        whole = config.num_hidden_layers // group * group
        return lambda i: FULL if (i + 1) % group == 0 or i >= whole else LINEAR
    if isinstance(full, list):
        return lambda i: FULL if i + 1 in full else LINEAR
    return lambda _: FULL
