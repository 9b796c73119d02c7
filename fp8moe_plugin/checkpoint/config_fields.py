"""The fields of config.json that shapes and refusals depend on, under the names of all model families."""

from typing import Annotated, Any, NoReturn

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from fp8moe_plugin.checkpoint.untrusted import ADVICE, MAX_SIZE
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.quoting import shown

# In these families, a missing or invalid field means a damaged config.json; in others, it may have another name.
FAMILIES = (
    *("bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "ernie4_5_moe", "glm4_moe"),
    *(
        "glm4v_moe_text",
        "glm5_next_text",
        "glm_moe_dsa",
        "gpt_oss",
        "hunyuan_v1_moe",
        "hy_v3",
        "kimi_k2",
        "laguna",
        "llama4_text",
        "mimo_v2_flash",
        "minimax_m2",
        "minimax_m3_text",
        "mixtral",
    ),
    *("qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_moe_text"),
    *("qwen4_exp_text", "step3p5"),
)
MAX_LAYERS = 256  # bounds the time, because layers are processed one by one; Kimi-K3 has 93

TOPKS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")

Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Count = Annotated[int, Field(ge=0, le=MAX_SIZE)]
Layers = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
Sizes = Annotated[list[Size], Field(min_length=1, max_length=MAX_LAYERS)]  # one per layer, as in Hunyuan
Names = Annotated[list[str], Field(min_length=1, max_length=2 * MAX_LAYERS)]
Counts = Annotated[list[Count], Field(min_length=1, max_length=MAX_LAYERS)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Architecture = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,100}$")]


class Config(BaseModel):
    """The fields of config.json that shapes and refusals depend on, under the names of all model families."""

    model_config = ConfigDict(strict=True, frozen=True)

    model_type: str | None = None
    architectures: Annotated[list[Architecture], Field(min_length=1, max_length=16)]
    hidden_size: Size
    vocab_size: Size
    num_hidden_layers: Annotated[Layers, Field(ge=1)] = Field(
        validation_alias=AliasChoices("num_hidden_layers", "num_layers")
    )
    num_nextn_predict_layers: Layers = Field(
        0, validation_alias=AliasChoices("num_nextn_predict_layers", "mtp_num_hidden_layers")
    )
    max_position_embeddings: Size | None = None
    intermediate_size: Size | Sizes | None = None
    # In models where `intermediate_size` is that of the experts.
    dense_intermediate_size: Size | None = Field(
        None, validation_alias=AliasChoices("dense_intermediate_size", "intermediate_size_mlp")
    )

    experts: Size | Sizes = Field(validation_alias=AliasChoices(*EXPERT_COUNTS))
    topk: Size | Sizes = Field(validation_alias=AliasChoices(*TOPKS))
    moe_intermediate_size: Size | Sizes | None = None

    first_k_dense_replace: Count = 0
    moe_layer_freq: Size | Counts = 1
    mlp_only_layers: Annotated[list[Count], Field(max_length=MAX_LAYERS)] = []
    decoder_sparse_step: Size = 1
    moe_layer_start_index: Count | Counts = 0
    moe_layer_end_index: Annotated[int, Field(ge=-1, le=MAX_SIZE)] | Counts | None = None
    moe_layer_interval: Size = 1
    interleave_moe_layer_step: Size = 1
    mlp_layer_types: Names | None = Field(None, validation_alias=AliasChoices("mlp_layer_types", "layers_block_type"))
    moe_layers_enum: Annotated[str, Field(pattern=r"^\d{1,4}(, ?\d{1,4})*$")] | Counts | None = None

    n_shared_experts: Count | Counts = Field(
        0, validation_alias=AliasChoices("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
    )
    shared_width: Count = Field(
        0, validation_alias=AliasChoices("moe_shared_expert_intermediate_size", "shared_intermediate_size")
    )
    num_shared_expert: Count | Counts = 0
    shared_expert_intermediate_size: Count = Field(
        0, validation_alias=AliasChoices("shared_expert_intermediate_size", "share_expert_dim")
    )

    num_attention_heads: Size
    num_key_value_heads: Size | None = Field(
        None, validation_alias=AliasChoices("num_key_value_heads", "num_attention_groups")
    )
    head_dim: Count | None = Field(None, validation_alias=AliasChoices("head_dim", "attention_head_dim"))
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_nope_head_dim: Count = 0
    qk_rope_head_dim: Count = 0
    v_head_dim: Count = 0
    index_n_heads: Count = 0
    index_head_dim: Count = 0
    indexer_types: Names | None = None
    attn_output_gate: bool | None = None
    attention_bias: bool | None = Field(
        None, validation_alias=AliasChoices("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias")
    )
    # Of DeepSeek-V4. Tokens of a layer that share an entry of the cache; 0: the layer has a sliding window only.
    compress_ratios: Annotated[list[Count], Field(max_length=2 * MAX_LAYERS)] | None = None
    index_source_layer_ids: Counts | None = None  # layers with an indexer of their own (V4.1)
    kv_source_layer_ids: Counts | None = None  # layers with a compressed cache of their own (V4.1)
    o_groups: Size | None = None
    o_lora_rank: Size | None = None
    num_hash_layers: Count = 0
    hc_mult: Annotated[int, Field(ge=1, le=64)] | None = None

    layer_types: Names | None = Field(None, validation_alias=AliasChoices("layer_types", "layers_block_type"))
    hybrid_layer_pattern: Counts | None = None
    attn_type_list: Counts | None = None
    full_attention_interval: Size | None = None
    layer_group_size: Size | None = None
    linear_attn_config: dict[str, Any] | None = None
    linear_num_key_heads: Count = 0
    linear_num_value_heads: Count = 0
    linear_key_head_dim: Count = 0
    linear_value_head_dim: Count = 0

    hidden_act: str = "silu"
    hidden_activation: str = "silu"
    swiglu_limit: Number | None = None
    swiglu_limits: Annotated[list[Number | None], Field(max_length=2 * MAX_LAYERS)] | None = None
    expert_swiglu_limit_list: Annotated[list[Number | None], Field(max_length=2 * MAX_LAYERS)] | None = None
    swiglu_alpha: Number | None = None
    swiglu_beta: Number | None = None

    quantization_config: dict[str, Any] | None = None

    @property
    def dense_bias(self) -> bool:
        """Whether some dense layers have a bias."""
        return self.model_type == "qwen2_moe" if self.attention_bias is None else self.attention_bias

    @property
    def layers(self) -> range:
        """All layers; those for multi-token prediction (MTP) come last."""
        return range(self.num_hidden_layers + self.num_nextn_predict_layers)

    @property
    def kv_heads(self) -> int:
        """Key/value heads. Without the field, and for MLA, whose cache has no heads, the number of attention heads."""
        return (not self.kv_lora_rank and self.num_key_value_heads) or self.num_attention_heads


def _names(name: str, field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [name]


ALIASES = [names for field in Config.model_fields.items() if len(names := _names(*field)) > 1]
FIELDS = {name for field in Config.model_fields.items() for name in _names(*field)}


def parse_config(fields: dict[str, Any], what: str) -> Config:
    """Validate the fields of a language model; `what` names the file in messages.

    Raises:
        CheckpointError, UnsupportedError: see `refuse`.
    """
    given = {key: value for key, value in fields.items() if value is not None}
    for names in ALIASES:  # besides the used name, another one may have a default of 0
        if any(given.get(name) for name in names):
            given = {key: value for key, value in given.items() if value or key not in names}
    if isinstance(types := given.get("layers_block_type"), list):  # Nemotron's later models give no number
        given = {"num_hidden_layers": len(types)} | given
    try:
        return Config.model_validate(given)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
        missing = [str(one["loc"][0]) for one in wrong if one["type"] == "missing"]
        first = next((one for one in wrong if one["type"] != "missing"), None)
        if first:
            problem = f"{first['loc'][0]} is {shown(first['input'])}: {first['msg']}"
        else:
            problem = f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        refuse(given.get("model_type"), what, problem)


def refuse(model_type: object, what: str, problem: str) -> NoReturn:
    """Raise the error for a description with a problem: a field that is missing or has another form than expected.

    Raises:
        CheckpointError: the description of a known family is damaged.
        UnsupportedError: the family is not known, and may have other names or forms.
    """
    if model_type in FAMILIES:
        raise CheckpointError(f"{what}: {problem}. {ADVICE}") from None
    raise UnsupportedError(
        f"{what}: fp8moe-warmup does not know models of the type {shown(model_type)}, and cannot read this one: "
        f"{problem}. The engine may serve it nevertheless. To compile every kernel that it could need, run the command "
        "without --model."
    ) from None
