"""Checkpoints of compressed-tensors in FP8: the schemes FP8_BLOCK, FP8_DYNAMIC and FP8 of llm-compressor.

Names are those of the library compressed-tensors. It has many more schemes; an error names the field that differs.
"""

from typing import Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.patterns import check_patterns
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

METHOD = "compressed-tensors"
Model = TypeVar("Model", bound=BaseModel)
Weights = TypeVar("Weights")
Inputs = TypeVar("Inputs")
WITHOUT = ("sparsity_config", "transform_config")  # must be absent or empty


class Scheme(NamedTuple):
    """The quantization of a checkpoint."""

    weights: WeightFormat
    input_scales: bool  # whether it has scales of activations
    ignored: tuple[str, ...]  # the layers that it keeps unquantized: names and patterns
    cache_bits: int | None = None  # of an element of the KV cache, if it is quantized


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Float8(_Part):
    num_bits: Literal[8]
    type: Literal["float"]
    symmetric: Literal[True] = True


class _BlockWeights(_Float8):
    strategy: Literal["block"]
    block_structure: list[int]
    dynamic: Literal[False] = False

    @field_validator("block_structure")
    @classmethod
    def _is_ours(cls, found: list[int]) -> list[int]:
        if found != [128, 128]:
            raise ValueError("Input should be [128, 128]")
        return found


class _GroupInputs(_Float8):
    strategy: Literal["group"]
    group_size: Literal[128]
    dynamic: Literal[True]


class _RowWeights(_Float8):
    strategy: Literal["block", "channel", "tensor"]  # "block" is `_BlockWeights`
    dynamic: Literal[False] = False


class _RowInputs(_Float8):
    strategy: Literal["token", "tensor"]
    dynamic: bool = Field(False, validate_default=True)

    @field_validator("dynamic")
    @classmethod
    def _of_tokens(cls, found: bool, info: ValidationInfo) -> bool:
        if info.data.get("strategy") == "token" and not found:
            raise ValueError("Input should be True, because scales of tokens are computed at run time")
        return found


class _Group(_Part, Generic[Weights, Inputs]):
    targets: list[Literal["Linear"]] = Field(min_length=1)
    weights: Weights
    input_activations: Inputs
    output_activations: None = None
    format: Literal["float-quantized"] | None = None


class _Groups(_Part):
    config_groups: dict[str, dict[str, Any]] = Field(min_length=1, max_length=1)


class _Rest(_Part):
    format: Literal["float-quantized"] | None = None
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None  # left to the engine


def is_compressed(config: dict[str, Any]) -> bool:
    """Returns whether a `quantization_config` is one of compressed-tensors."""
    return config.get("quant_method") == METHOD


def parse_compressed(config: dict[str, Any]) -> Scheme:
    """Parse the `quantization_config` of a checkpoint in FP8.

    Raises:
        UnsupportedError: it has another scheme; the message names the field that differs.
    """
    ((name, group),) = _validated(_Groups, config).config_groups.items()
    weights = group.get("weights")
    if isinstance(weights, dict) and weights.get("strategy") == "block":
        _validated(_Group[_BlockWeights, _GroupInputs], group, "config_groups", name)
        scheme = FP8_BLOCK, False
    else:
        inputs = _validated(_Group[_RowWeights, _RowInputs], group, "config_groups", name).input_activations
        scheme = FP8_CHANNEL, not inputs.dynamic
    rest = _validated(_Rest, config)
    ignored, bits = tuple(rest.ignore or ()), (rest.kv_cache_scheme or {}).get("num_bits")
    for field in WITHOUT:
        if config.get(field):
            raise _refusal(field, config[field], "Input should be absent")
    check_patterns(ignored, "ignore")
    return Scheme(*scheme, ignored, bits if type(bits) is int and bits > 0 else None)


def _validated(model: type[Model], value: dict[str, Any], *where: str) -> Model:
    """Returns a part of the config; `where`: the keys of this part."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, (*where, *first["loc"])))
        if field.endswith("input_activations") and first["input"] is None:
            raise _refusal(field, None, "the checkpoint keeps activations in 16 bits, the kernels do not") from None
        raise _refusal(field, first["input"], first["msg"]) from None


def _refusal(field: str, value: object, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"--quantization {NAME}: of {METHOD}, only FP8 weights with FP8 activations are supported (the schemes "
        f"FP8_BLOCK with 128x128 blocks, FP8_DYNAMIC and FP8), but {shown(field)} of the checkpoint's "
        f"quantization_config is {shown(value)}: {why}. Remove --quantization to let the engine choose the method."
    )
