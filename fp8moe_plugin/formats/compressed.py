"""Checkpoints of compressed-tensors in block FP8, the scheme FP8_BLOCK of llm-compressor.

Names are those of the library compressed-tensors. It has many more schemes; an error names the field that differs.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.patterns import check_patterns
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

METHOD = "compressed-tensors"
WITHOUT = ("kv_cache_scheme", "sparsity_config", "transform_config")  # must be absent or empty


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Weights(_Part):
    num_bits: Literal[8]
    type: Literal["float"]
    strategy: Literal["block"]
    block_structure: list[int]
    symmetric: Literal[True] = True
    dynamic: Literal[False] = False

    @field_validator("block_structure")
    @classmethod
    def _is_ours(cls, found: list[int]) -> list[int]:
        if found != [128, 128]:
            raise ValueError("Input should be [128, 128]")
        return found


class _Activations(_Part):
    num_bits: Literal[8]
    type: Literal["float"]
    strategy: Literal["group"]
    group_size: Literal[128]
    symmetric: Literal[True] = True
    dynamic: Literal[True]


class _Group(_Part):
    targets: list[Literal["Linear"]] = Field(min_length=1)
    weights: _Weights
    input_activations: _Activations
    output_activations: None = None
    format: Literal["float-quantized"] | None = None


class _Config(_Part):
    config_groups: dict[str, _Group] = Field(min_length=1, max_length=1)
    format: Literal["float-quantized"] | None = None
    ignore: list[str] | None = None


def is_compressed(config: dict[str, Any]) -> bool:
    """Returns whether a `quantization_config` is one of compressed-tensors."""
    return config.get("quant_method") == METHOD


def ignored_layers(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the layers that a checkpoint in block FP8 keeps unquantized: names and patterns.

    Raises:
        UnsupportedError: it has another scheme; the message names the field that differs.
    """
    try:
        found = _Config.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _refusal(".".join(map(str, first["loc"])), first["input"], first["msg"]) from None
    for field in WITHOUT:
        if config.get(field):
            raise _refusal(field, config[field], "Input should be absent")
    check_patterns(found.ignore or (), "ignore")
    return tuple(found.ignore or ())


def _refusal(field: str, value: object, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"--quantization {NAME}: of {METHOD}, only FP8 with 128x128 blocks and dynamic activations is supported (the "
        f"scheme FP8_BLOCK), but {shown(field)} of the checkpoint's quantization_config is {shown(value)}: {why}. "
        "Remove --quantization to let the engine choose the method."
    )
