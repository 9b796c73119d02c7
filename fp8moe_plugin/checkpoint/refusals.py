"""Refusals of experts that the kernels do not support, from a model's config, for the warm-up and the engines."""

from collections.abc import Mapping, Sequence
from typing import Any

from fp8moe_plugin.checkpoint.activations import KNOWN, NAMES
from fp8moe_plugin.checkpoint.expert_format import expert_format, may_be_fp4
from fp8moe_plugin.checkpoint.gpt_oss import MODEL_TYPE
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME


def check_experts(
    fields: Mapping[str, Any], unquantized: Sequence[str] = (), online: bool = False, gpt_oss: bool = False
) -> None:
    """Raise `UnsupportedError` for experts of a kind that is not supported, whatever their sizes are.

    Args:
        fields: the part of config.json that describes the language model, or an engine's copy of it.
        unquantized: the checkpoint's list of unquantized layers. If it names experts, nothing is refused: other kernels
            may compute them.
        online: whether the checkpoint has no `quantization_config`; `expert_dtype` may then name an unquantized dtype.
        gpt_oss: whether it is in the format of gpt-oss, the only one in which gate and up rows may alternate.
    """
    if any("experts" in name.replace("shared_experts", "") for name in unquantized):
        return
    for field in NAMES:
        activation = fields.get(field)
        if isinstance(activation, str) and activation not in KNOWN:
            raise _refusal(f"{field} is {shown(activation)}, but the kernels only compute kinds of SwiGLU")
    if not online or may_be_fp4(fields):
        expert_format(fields)
    if fields.get("model_type") == MODEL_TYPE and not gpt_oss:
        why = f"experts are in one tensor in which gate and up rows alternate (model_type {MODEL_TYPE!r})"
        raise _refusal(f"{why}, which is only supported in {MXFP4.name}")


def _refusal(why: str) -> UnsupportedError:
    return UnsupportedError(f"The checkpoint's {why}. Serve it without --quantization {NAME}.")
