"""gpt-oss: its experts are in MXFP4, those of a layer in one tensor each for w13 and w2. The rest is unquantized."""

import re
from collections.abc import Mapping
from typing import Any

from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

MODEL_TYPE, ROUTER = "gpt_oss", "mlp.router"
ACTIVATION = Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)  # the engines' constants; loaders reorder the rows
# The tensors of all experts of a layer.
TENSOR = re.compile(r"layers\.\d{1,6}\.mlp\.experts\.((?:gate_up|down)_proj_(?:blocks|scales|bias))\Z", re.ASCII)


def check_format(fields: Mapping[str, Any], spec: QuantSpec) -> None:
    """Raise `UnsupportedError` for experts of gpt-oss that the kernels do not support, or another model in its format.

    Args:
        fields: the part of config.json that describes the language model.
    """
    family, limit = fields.get("model_type"), fields.get("swiglu_limit")
    if spec.gpt_oss and family != MODEL_TYPE:
        quantization = fields.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint's quant_method is {shown(method)}, which is only supported for "
            f"gpt-oss, but the model_type is {shown(family)}. Remove --quantization to let the engine choose the "
            "method."
        )
    if spec.gpt_oss and limit not in (None, ACTIVATION.limit):
        raise UnsupportedError(
            f"The checkpoint's swiglu_limit is {shown(limit)}, but the engines compute gpt-oss with "
            f"{ACTIVATION.limit:g}. Correct it in config.json."
        )


def wanted_tensors(experts: Experts) -> dict[str, dict[str, list[list[int]]]]:
    """Returns the permitted shapes of these tensors, by their names and dtypes."""
    found: dict[str, dict[str, list[list[int]]]] = {}
    e, group = experts.experts, MXFP4.scales.block[1]
    sizes = ("gate_up", 2 * experts.intermediate, experts.hidden), ("down", experts.hidden, experts.intermediate)
    for name, n, k in sizes:
        groups = ceil_div(k, group)
        found[f"{name}_proj_blocks"] = {"U8": [[e, n, groups, group // 2]]}
        found[f"{name}_proj_scales"] = {"U8": [[e, n, groups]]}
        found[f"{name}_proj_bias"] = {dtype: [[e, n]] for dtype in ("BF16", "F16", "F32")}
    return found


def rank_channels(intermediate: int, ranks: int, rank: int) -> int:
    """Returns the intermediate channels of a rank: whole groups of a scale, fewer or none on the last ranks."""
    group = MXFP4.scales.block[1]
    part = ceil_div(intermediate, ranks * group) * group
    return max(0, min(part, intermediate - rank * part))
