"""Refusals of experts that the kernels do not support, from a model's config, for the warm-up and the engines."""

from collections.abc import Mapping, Sequence
from typing import Any

from fp8moe_plugin.checkpoint.expert_format import expert_format
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
CLAMPS = ("swiglu_limit", "swiglu_limits")  # one number, or one for each layer


def check_experts(fields: Mapping[str, Any], unquantized: Sequence[str] = ()) -> None:
    """Raise `UnsupportedError` if a model's experts are not `silu(gate) * up`, or in an unknown format of four bits.

    Args:
        fields: the part of config.json that describes the language model, or an engine's copy of it.
        unquantized: the checkpoint's list of unquantized layers. If it names experts, nothing is refused: other kernels
            may compute them.
    """
    if any("experts" in name.replace("shared_experts", "") for name in unquantized):
        return
    for field in ACTIVATIONS:
        activation = fields.get(field)
        if isinstance(activation, str) and activation != "silu":  # vLLM, too, accepts only this name
            raise _refusal(f"{field} is {shown(activation)}, but the kernels compute silu(gate) * up")
    expert_format(fields)
    for field in CLAMPS:
        limits = fields.get(field)
        given = [limit for limit in (limits if isinstance(limits, list) else [limits]) if limit not in (None, 0)]
        if given:
            limit = shown(given[0])
            raise _refusal(f"experts clamp SwiGLU ({field} {limit}), but the kernels compute it without a limit")


def _refusal(why: str) -> UnsupportedError:
    return UnsupportedError(f"The checkpoint's {why}. Serve it without --quantization {NAME}.")
