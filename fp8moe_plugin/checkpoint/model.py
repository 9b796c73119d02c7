"""The shapes of a checkpoint's layers, from its config.json. Invalid input only ever raises this package's errors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8moe_plugin.checkpoint.config_json import Config, parse_config, read_fields
from fp8moe_plugin.checkpoint.headers import check_shards
from fp8moe_plugin.checkpoint.quantization import SCALE, Unquantized, block_fp8, scale_name, unquantized_layers
from fp8moe_plugin.checkpoint.refusals import check_experts
from fp8moe_plugin.checkpoint.shapes import Dense, Experts, Indexer, KvCache, Model, Split
from fp8moe_plugin.checkpoint.untrusted import ADVICE, MAX_SIZE, shown
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.settings import NAME

MAX_EXPERTS = 2**14  # Kimi-K2 has 384
MAX_WEIGHTS = 2**40  # in the experts of one layer; Kimi-K2 has 2^34


def read_model(folder: Path) -> Model:
    """Read the model that a checkpoint's config.json describes, and check its safetensors files, if any, against it.

    Raises:
        CheckpointError: a file is missing or damaged, or its content is not valid.
        UnsupportedError: the checkpoint is valid, but not supported.
    """
    if "\0" in str(folder):
        raise CheckpointError(f"{shown(str(folder))} is not a valid folder name. Give the folder of a checkpoint.")
    try:
        model, served, scale = _read(folder)
        check_shards(folder, model.experts, min(served), served if model.quantized else set(), scale)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{shown(error.filename)} is missing. Give the folder of a downloaded checkpoint."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{shown(error.filename)} cannot be read: {error.strerror}. Check the folder.") from None
    return model


def _read(folder: Path) -> tuple[Model, set[int], str]:
    """The model, the layers whose experts the plugin serves, and what the names of scales end with.

    What is not supported is refused before the sizes are read: a model of another kind may have other names for them.
    """
    fields = read_fields(folder)
    found = fields["quantization_config"]
    quantization = block_fp8(found) if isinstance(found, dict) else None
    names = unquantized_layers(quantization) if quantization else None
    check_experts(fields, names or ())
    config = parse_config(fields, shown(str(folder / "config.json")))
    unquantized = Unquantized(names)
    served = {layer for layer in moe_layers(config) if not unquantized.has(layer, "mlp.experts")}
    if served:
        check_experts(fields)
    return _model(config, quantization, unquantized, served), served, scale_name(found) if found else SCALE


def _model(config: Config, quantization: dict | None, unquantized: Unquantized, served: set[int]) -> Model:
    moe = moe_layers(config)
    if not served:
        reason = "has no layer with experts" if not moe else "keeps all its experts unquantized"
        raise UnsupportedError(f"The checkpoint {reason}. Serve it without --quantization {NAME}.")
    experts = Experts(
        layers=len(served),
        experts=_same(config.experts, "number of experts"),
        topk=_same(config.topk, "number of experts for a token"),
        hidden=config.hidden_size,
        intermediate=_experts_width(config),
        mtp=sum(layer >= config.num_hidden_layers for layer in served),
    )
    model = Model(
        architecture=config.architectures[0],
        experts=experts,
        dense=tuple(_dense(config, moe, unquantized)),
        heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        vocab=config.vocab_size,
        ue8m0=quantization is not None and quantization.get("scale_fmt") == "ue8m0",
        quantized=quantization is not None,
        indexer=Indexer(config.index_n_heads, config.index_head_dim) if config.index_n_heads else None,
        cache=KvCache(config.num_hidden_layers, bool(config.kv_lora_rank), _cached_elements(config)),
        plain=tuple(_dense(config, moe, unquantized, quantized=False)),
        mtp_layers=config.num_nextn_predict_layers,
        context=config.max_position_embeddings,
    )
    _check_sizes(model)
    return model


def _check_sizes(model: Model) -> None:
    experts = model.experts
    if experts.topk > experts.experts:
        raise CheckpointError(f"config.json routes a token to {experts.topk} of {experts.experts} experts. {ADVICE}")
    if experts.experts > MAX_EXPERTS:
        raise CheckpointError(f"config.json has {experts.experts} experts, more than {MAX_EXPERTS}. {ADVICE}")
    if model.heads % model.kv_heads:
        raise CheckpointError(f"config.json has {model.kv_heads} key/value heads for {model.heads} heads. {ADVICE}")
    if 2 * experts.experts * experts.intermediate * experts.hidden > MAX_WEIGHTS:
        raise CheckpointError(f"config.json describes experts of more than {MAX_WEIGHTS} weights. {ADVICE}")
    for layer in model.dense:
        if not all(1 <= size <= MAX_SIZE for size in (layer.inputs, *layer.outputs, sum(layer.outputs))):
            sizes = f"{layer.inputs} x {layer.outputs}"
            raise CheckpointError(f"config.json gives {layer.name} an invalid size, {sizes}. {ADVICE}")


def _same(value: int | Sequence[int], what: str) -> int:
    """The common value of a field that some model families give per layer."""
    values = {value} if isinstance(value, int) else set(value)
    if len(values) > 1:
        raise UnsupportedError(
            f"The checkpoint's layers differ in their {what}: {shown(sorted(values))}. All layers with experts must "
            f"be the same. Serve it without --quantization {NAME}."
        )
    return values.pop()


def _experts_width(config: Config) -> int:
    """Without `moe_intermediate_size`, as in Mixtral and MiniMax-M2, `intermediate_size` is that of the experts."""
    return _width(config.intermediate_size if config.moe_intermediate_size is None else config.moe_intermediate_size)


def _width(value: int | Sequence[int] | None) -> int:
    if value is None:
        raise CheckpointError(f"config.json lacks intermediate_size. {ADVICE}")
    return _same(value, "intermediate size")


def moe_layers(config: Config) -> list[int]:
    """The layers with experts. The rules of all model families apply; those that config.json omits have no effect."""
    start = _same(config.moe_layer_start_index, "first layer with experts")
    end = config.layers[-1]
    if config.moe_layer_end_index is not None:
        end = _same(config.moe_layer_end_index, "last layer with experts")
        end = config.num_hidden_layers - 1 if end == -1 else end
    without, frequency = set(config.mlp_only_layers), config.moe_layer_freq
    return [
        i
        for i in config.layers
        if max(start, config.first_k_dense_replace) <= i <= end
        and (i % frequency == 0 if isinstance(frequency, int) else i < len(frequency) and frequency[i] > 0)
        and i not in without
        and (i + 1) % config.decoder_sparse_step == 0
        and (i + 1) % config.moe_layer_interval == 0
    ]


def _dense(config: Config, moe: list[int], unquantized: Unquantized, quantized: bool = True) -> Iterator[Dense]:
    """The kinds of dense layers in the layers where the checkpoint quantizes them, or in those where it does not.

    Names, fusion and splits follow vLLM's models. Routers are omitted: no published checkpoint quantizes them.
    """
    plain = sorted(set(config.layers) - set(moe))
    kinds: list[tuple[Dense, Sequence[int]]] = [
        (layer, config.layers) for layer in (_mla(config) if config.kv_lora_rank else _gqa(config))
    ]
    if plain:
        kinds += [(layer, plain) for layer in _mlp("mlp", config.hidden_size, _width(config.intermediate_size))]
    kinds += [(layer, moe) for layer in _shared(config)]
    for layer, where in kinds:
        layers = [i for i in where if unquantized.has(i, layer.name) is not quantized]
        if layers:
            yield replace(layer, layers=len(layers), mtp=sum(i >= config.num_hidden_layers for i in layers))


def _cached_elements(config: Config) -> int:
    if config.kv_lora_rank:
        return config.kv_lora_rank + config.qk_rope_head_dim
    return config.head_dim or config.hidden_size // config.num_attention_heads


def _gqa(config: Config) -> Iterator[Dense]:
    head = config.head_dim or config.hidden_size // config.num_attention_heads
    q, kv = config.num_attention_heads * head, config.kv_heads * head
    yield Dense("self_attn.qkv_proj", 0, config.hidden_size, (q, kv, kv), Split.OUTPUTS, smallest=head)
    yield Dense("self_attn.o_proj", 0, q, (config.hidden_size,), Split.INPUTS)


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


def _mlp(name: str, hidden: int, width: int) -> Iterator[Dense]:
    yield Dense(f"{name}.gate_up_proj", 0, hidden, (width, width), Split.OUTPUTS)
    yield Dense(f"{name}.down_proj", 0, width, (hidden,), Split.INPUTS)


def _shared(config: Config) -> Iterator[Dense]:
    """The shared experts, under the names of DeepSeek, GLM and ERNIE, of Hunyuan, and of Qwen."""
    shared = _same(config.n_shared_experts, "number of shared experts")
    if shared:
        yield from _mlp("mlp.shared_experts", config.hidden_size, shared * _experts_width(config))
    shared = _same(config.num_shared_expert, "number of shared experts")
    if shared:
        yield from _mlp("mlp.shared_mlp", config.hidden_size, shared * _width(config.intermediate_size))
    if config.shared_expert_intermediate_size:
        yield from _mlp("mlp.shared_expert", config.hidden_size, config.shared_expert_intermediate_size)
