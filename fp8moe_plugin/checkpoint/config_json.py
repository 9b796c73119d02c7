"""A checkpoint's config.json: reading and validating the fields that determine the shapes of its layers."""

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from fp8moe_plugin.checkpoint.untrusted import ADVICE, MAX_SIZE, Limits, opened, read_json, shown
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.settings import NAME

# Published files name every unquantized layer, in 50 kB, or describe each projection of each expert by an object, as
# ModelOpt does: 22,000 of them in MiniMax-M3's.
LIMITS = Limits(size=16 << 20, containers=180_000, values=400_000)
MODELOPT = "hf_quant_config.json"  # older versions of NVIDIA's ModelOpt describe the quantization there
MAX_LAYERS = 256  # bounds the time, because layers are processed one by one; Kimi-K3 has 93

EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")

Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Count = Annotated[int, Field(ge=0, le=MAX_SIZE)]
Layers = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
Sizes = Annotated[list[Size], Field(min_length=1, max_length=MAX_LAYERS)]  # one per layer, as in Hunyuan
Counts = Annotated[list[Count], Field(min_length=1, max_length=MAX_LAYERS)]
Architecture = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,100}$")]


class Config(BaseModel):
    """The fields of config.json that shapes and refusals depend on, under the names of all model families."""

    model_config = ConfigDict(strict=True, frozen=True)

    architectures: Annotated[list[Architecture], Field(min_length=1, max_length=16)]
    hidden_size: Size
    vocab_size: Size
    num_hidden_layers: Annotated[Layers, Field(ge=1)]
    num_nextn_predict_layers: Layers = 0
    max_position_embeddings: Size | None = None
    intermediate_size: Size | Sizes | None = None

    experts: Size | Sizes = Field(validation_alias=AliasChoices(*EXPERT_COUNTS))
    topk: Size | Sizes = Field(validation_alias=AliasChoices("num_experts_per_tok", "moe_topk", "moe_k"))
    moe_intermediate_size: Size | Sizes | None = None

    first_k_dense_replace: Count = 0
    moe_layer_freq: Size | Counts = 1
    mlp_only_layers: Annotated[list[Count], Field(max_length=MAX_LAYERS)] = []
    decoder_sparse_step: Size = 1
    moe_layer_start_index: Count | Counts = 0
    moe_layer_end_index: Annotated[int, Field(ge=-1, le=MAX_SIZE)] | Counts | None = None
    moe_layer_interval: Size = 1

    n_shared_experts: Count | Counts = Field(
        0, validation_alias=AliasChoices("n_shared_experts", "moe_num_shared_experts")
    )
    num_shared_expert: Count | Counts = 0
    shared_expert_intermediate_size: Count = 0

    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = Field(None, validation_alias=AliasChoices("head_dim", "attention_head_dim"))
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_nope_head_dim: Count = 0
    qk_rope_head_dim: Count = 0
    v_head_dim: Count = 0
    index_n_heads: Count = 0
    index_head_dim: Count = 0

    hidden_act: str = "silu"
    hidden_activation: str = "silu"

    quantization_config: dict[str, Any] | None = None

    @property
    def layers(self) -> range:
        """All layers; those for multi-token prediction (MTP) come last."""
        return range(self.num_hidden_layers + self.num_nextn_predict_layers)

    @property
    def kv_heads(self) -> int:
        """Key/value heads. Without the field, and for MLA, whose cache has no heads, as many as attention heads."""
        return (not self.kv_lora_rank and self.num_key_value_heads) or self.num_attention_heads


def _names(name: str, field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [name]


FIELDS = {name for field in Config.model_fields.items() for name in _names(*field)}


def load_config(folder: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's config.json; its fields are not checked.

    Raises:
        CheckpointError: the file is damaged.
        OSError: it is missing or cannot be opened.
    """
    return _load(folder / "config.json")


def _load(path: Path) -> dict[str, Any]:
    """Read JSON that may contain NaN and infinities: not standard, but written by Python and read by vLLM."""
    with opened(path) as file:
        found, _ = read_json(file, LIMITS.size + 1, LIMITS, shown(str(path)), constants=True)
    return found


def quantization_config(folder: Path, config: dict[str, Any]) -> Any:
    """A checkpoint's quantization config, unchecked, searched for in the same order as by vLLM's `get_quant_config`.

    Args:
        config: the result of `load_config`.
    Returns:
        None for an unquantized checkpoint.
    Raises:
        CheckpointError: ModelOpt's file is damaged.
        OSError: ModelOpt's file cannot be opened.
    """
    modelopt, text = folder / MODELOPT, config.get("text_config")
    found = config.get("quantization_config")
    if found is None and os.path.lexists(modelopt):
        found = _load(modelopt)
    if found is None and isinstance(text, dict):
        found = text.get("quantization_config")
    return config.get("compression_config") if found is None else found


def read_fields(folder: Path) -> dict[str, Any]:
    """The fields of a checkpoint's config.json that describe its language model, and its `quantization_config`.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedError: the model has no experts.
        OSError: the file is missing or cannot be opened.
    """
    config, what = load_config(folder), shown(str(folder / "config.json"))
    _check_constants(config, what)
    found = language_model(config)
    if found is None:
        raise UnsupportedError(
            f"{what} does not describe a mixture-of-experts model: it has no {', '.join(EXPERT_COUNTS[:-1])} or "
            f"{EXPERT_COUNTS[-1]}. Serve it without --quantization {NAME}."
        )
    return found | {"quantization_config": quantization_config(folder, config)}


def language_model(config: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a config.json that describes the language model: all of it, or one below; None without experts."""
    thinker = config.get("thinker_config")
    below = [config.get("text_config"), thinker.get("text_config") if isinstance(thinker, dict) else None]
    parts = [part for part in (config, *below) if isinstance(part, dict)]
    found = next((part for part in parts if any(part.get(key) for key in EXPERT_COUNTS)), None)
    architectures = config.get("architectures")
    return found if found is None or architectures is None else found | {"architectures": architectures}


def parse_config(found: dict[str, Any], what: str) -> Config:
    """Validate the result of `read_fields`; `what` names the file in messages.

    Raises:
        CheckpointError: a field is missing or out of range.
    """
    try:
        return Config.model_validate({key: value for key, value in found.items() if value is not None})
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
        missing = [str(one["loc"][0]) for one in wrong if one["type"] == "missing"]
        first = next((one for one in wrong if one["type"] != "missing"), None)
        if first:
            problem = f"{first['loc'][0]} is {shown(first['input'])}: {first['msg']}"
        else:
            problem = f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        raise CheckpointError(f"{what}: {problem}. {ADVICE}") from None


def _check_constants(config: dict[str, Any], what: str) -> None:
    """Raise `CheckpointError` for NaN or an infinity in a field that shapes depend on."""
    for part in (config, config.get("text_config")):
        for key, value in part.items() if isinstance(part, dict) else ():
            if key in FIELDS and isinstance(value, float) and not math.isfinite(value):
                name = json.dumps(value)
                raise CheckpointError(f"{what}: {key} is {name}, which is not a JSON number. {ADVICE}")
