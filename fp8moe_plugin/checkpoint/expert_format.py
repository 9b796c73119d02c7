"""The format in which a checkpoint stores its experts. DeepSeek-V4's may be in MXFP4, unlike its dense layers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8moe_plugin.checkpoint.headers import EXPERT, add_header, read_header, weight_map
from fp8moe_plugin.checkpoint.untrusted import Limits, opened
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.mxfp4 import NAMES as MXFP4_NAMES
from fp8moe_plugin.formats.spec import WEIGHT
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

FIELD = "expert_dtype"
FP4_BY_DEFAULT = ("deepseek_v4", "deepseek_v41")  # model types
FP8 = "fp8"  # a value of `expert_dtype`
FOUR_BITS = re.compile("fp4|float4", re.IGNORECASE)  # nvfp4, float4_e2m1fn_x2


def stored_dtype(folder: Path) -> str | None:
    """Returns the safetensors dtype of an expert's weight, from the first file at hand that has one; or None.

    Raises:
        CheckpointError: the index or a header is damaged.
    """
    files, spent = weight_map(folder), Limits(0, 0, 0)
    of_experts = {file for tensor, file in (files or {}).items() if is_weight_of_expert(tensor)}
    for path in sorted(folder.glob("*.safetensors")):
        if files is not None and path.name not in of_experts:
            continue
        with opened(path) as file:
            header = read_header(file, path)
        spent = add_header(spent, header, folder)
        for tensor, entry in header.tensors.items():
            if is_weight_of_expert(tensor):
                return str(entry["dtype"])
    return None


def is_weight_of_expert(tensor: str) -> bool:
    """Returns whether this is the name of an expert's weight, not of its scales."""
    match = EXPERT.search(tensor)
    return match is not None and match[3].endswith(f".{WEIGHT}")


def named_dtype(fields: Mapping[str, Any]) -> str | None:
    """Returns `expert_dtype`, or None if it is missing."""
    quantization = fields.get("quantization_config")
    below = quantization.get(FIELD) if isinstance(quantization, Mapping) else None
    found = fields.get(FIELD) or below
    return found if isinstance(found, str) else None


def may_be_fp4(fields: Mapping[str, Any]) -> bool:
    """Returns whether the dtype of the weights decides; see `expert_format`."""
    named = named_dtype(fields)
    if named is None:
        return fields.get("model_type") in FP4_BY_DEFAULT
    return named.lower() == FP8 or bool(FOUR_BITS.search(named))


def expert_format(fields: Mapping[str, Any], dtype: str | None = None) -> WeightFormat:
    """Returns the format of the experts in a checkpoint.

    Its weights decide. Without them it is `expert_dtype` or, where that is missing, MXFP4 for DeepSeek-V4, as for
    vLLM. Checkpoints of DeepSeek-V4 that were converted to FP8 often lack the field.

    Args:
        fields: the part of config.json that describes the language model.
        dtype: the safetensors dtype of an expert's weight, if it is known.
    Raises:
        UnsupportedError: `expert_dtype` names another format.
    """
    named = named_dtype(fields)
    if named and named.lower() not in (FP8, *MXFP4_NAMES):
        raise UnsupportedError(
            f"The checkpoint's experts are {shown(named)} ({FIELD}), but the kernels need block FP8, or MXFP4 to "
            f"re-encode. Serve it without --quantization {NAME}."
        )
    if may_be_fp4(fields) and dtype in (*MXFP4.weight.accepted, *FP8_BLOCK.weight.accepted):
        return MXFP4 if dtype in MXFP4.weight.accepted else FP8_BLOCK
    if named is None:
        return MXFP4 if may_be_fp4(fields) else FP8_BLOCK
    return MXFP4 if named.lower() in MXFP4_NAMES else FP8_BLOCK
