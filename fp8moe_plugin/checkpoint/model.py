"""The shapes of a checkpoint's layers, from its config.json. Invalid input only ever raises this package's errors."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fp8moe_plugin.checkpoint import deepseek_v4, gpt_oss
from fp8moe_plugin.checkpoint.activations import check_limit, experts_activations
from fp8moe_plugin.checkpoint.cache import Indexer, KvCache
from fp8moe_plugin.checkpoint.config_fields import FAMILIES, Config, parse_config
from fp8moe_plugin.checkpoint.config_json import read_description
from fp8moe_plugin.checkpoint.dense import cached_elements, dense_kinds, divided, indexer_layers
from fp8moe_plugin.checkpoint.expert_format import expert_format, may_be_fp4, named_dtype, stored_dtype
from fp8moe_plugin.checkpoint.headers import check_shards
from fp8moe_plugin.checkpoint.layer_kinds import FULL, attention_kinds, experts_width, moe_layers, same
from fp8moe_plugin.checkpoint.refusals import check_experts
from fp8moe_plugin.checkpoint.shapes import Experts, Model
from fp8moe_plugin.checkpoint.unquantized import BY_SUFFIX, Unquantized, incomplete_names
from fp8moe_plugin.checkpoint.untrusted import ADVICE, MAX_SIZE
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import ONLINE, QuantSpec, parse_quantization, recoded
from fp8moe_plugin.quoting import shown
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
        return _read(folder)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{shown(error.filename)} is missing. Give the folder of a downloaded checkpoint."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{shown(error.filename)} cannot be read: {error.strerror}. Check the folder.") from None


def _read(folder: Path) -> Model:
    """Read config.json, then the headers of the weights.

    Unsupported models are refused before the sizes are read, because they may have other names for them.
    """
    description = read_description(folder)
    fields, is_v4 = description.fields, deepseek_v4.has(description.fields)
    quantization = fields["quantization_config"]
    spec = parse_quantization(quantization) if isinstance(quantization, dict) else ONLINE
    if is_v4:
        deepseek_v4.check_format(fields, spec)
        spec = replace(spec, unquantized=deepseek_v4.engine_names(spec.unquantized))
    gpt_oss.check_format(fields, spec)
    check_experts(fields, spec.unquantized, spec.online, spec.gpt_oss)
    config = parse_config(fields, description.file)
    if config.model_type in deepseek_v4.V4_1:  # its draft layers have other experts, of sizes that are not known
        config = config.model_copy(update={"num_nextn_predict_layers": 0})
    moe = moe_layers(config)
    suffixes = config.model_type in BY_SUFFIX
    unquantized = Unquantized(spec.unquantized, suffixes, description.nested, spec.online, spec.gpt_oss)
    served = [layer for layer in moe if not unquantized.has(layer, "ffn.experts" if is_v4 else "mlp.experts")]
    if served:
        check_experts(fields, online=spec.online, gpt_oss=spec.gpt_oss)
        check_limit(fields)
    either = may_be_fp4(fields) and not spec.online
    dtype = stored_dtype(folder) if either else None
    stored = expert_format(fields, dtype) if either else FP8_BLOCK
    spec = spec if stored is FP8_BLOCK else recoded(spec, stored)
    model = replace(
        _model(config, spec, unquantized, moe, served),
        activations=experts_activations(fields, served or moe),
        unknown_format=either and named_dtype(fields) is None and dtype is None,
        incomplete_names=() if suffixes else incomplete_names(spec.unquantized),
        remote_code=description.remote_code,
    )
    scales = deepseek_v4.scale_names(spec) if is_v4 else (spec.scale,)
    check_shards(folder, spec, scales, model.experts, min(served or moe), served)
    return model


def _model(
    config: Config, spec: QuantSpec, unquantized: Unquantized, moe: Sequence[int], served: Sequence[int]
) -> Model:
    if is_v4 := config.model_type in deepseek_v4.RATIOS:
        deepseek_v4.check_fields(config)
    kinds = deepseek_v4.dense_kinds(config) if is_v4 else dense_kinds(config, moe)
    dense, plain = divided(config, kinds, unquantized)
    if not moe or not (served or dense):
        reason = "has no layer with experts" if not moe else "keeps all its layers unquantized"
        raise UnsupportedError(f"The checkpoint {reason}. Serve it without --quantization {NAME}.")
    every = Experts(
        layers=len(moe),
        experts=same(config.experts, "number of experts"),
        topk=same(config.topk, "number of experts for a token"),
        hidden=config.hidden_size,
        intermediate=experts_width(config),
        mtp=sum(layer >= config.num_hidden_layers for layer in moe),
    )
    mtp = sum(layer >= config.num_hidden_layers for layer in served)
    experts = replace(every, layers=len(served), mtp=mtp)
    plain_experts = replace(every, layers=every.layers - experts.layers, mtp=every.mtp - mtp)
    model = Model(
        architecture=config.architectures[0],
        experts=experts,
        dense=dense,
        heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        vocab=config.vocab_size,
        ue8m0=spec.ue8m0,
        quantized=not spec.online,
        weights=spec.weights,
        dense_weights=spec.dense,
        dense_bias=config.dense_bias and bool(dense),
        indexer=_indexer(config),
        cache=_cache(config, spec),
        plain=plain,
        plain_experts=plain_experts if plain_experts.layers else None,
        recoded_from=spec.recoded_from,
        gpt_oss=spec.gpt_oss,
        router=gpt_oss.ROUTER if spec.gpt_oss else Model.router,
        mtp_layers=config.num_nextn_predict_layers,
        context=config.max_position_embeddings,
        unknown_family=None if config.model_type in FAMILIES else shown(config.model_type),
    )
    model = deepseek_v4.completed(model, config) if is_v4 else model
    _check_sizes(model)
    return model


def _indexer(config: Config) -> Indexer | None:
    if not config.index_n_heads:
        return None
    return Indexer(config.index_n_heads, config.index_head_dim, indexer_layers(config))


def _cache(config: Config, spec: QuantSpec) -> KvCache:
    layers = config.num_hidden_layers
    growing = attention_kinds(config)[:layers].count(FULL) or layers
    return KvCache(layers, bool(config.kv_lora_rank), cached_elements(config), growing, fp8=spec.cache_bits == 8)


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
