"""The activations of a model's experts, from the fields of its config."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fp8moe_plugin.checkpoint import gpt_oss
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

NAMES = ("hidden_act", "hidden_activation", "mlp_hidden_act")
SILU, OAI = "silu", "swigluoai"  # by the names in config.json
KNOWN = (SILU, OAI)  # vLLM, too, accepts no other name for SiLU
# Each is one number, or a list with one for each layer. Layers past its end have no limit, nor do those with 0.
LIMITS = ("swiglu_limit", "swiglu_limits", "expert_swiglu_limit_list")
# Of model types whose engines have a default.
DEFAULT_LIMITS = {"deepseek_v4": 10.0, "deepseek_v41": 10.0, "glm5_next_text": 10.0, "hy_v4": 10.0}
# Model types whose classes in vLLM clamp to 0 with a `swiglu_limit` of 0, where others take it as no limit.
CLAMPED_TO_ZERO = ("deepseek_v4", "deepseek_v41", "glm5_next_text")
OAI_ALPHA, OAI_BETA, OAI_LIMIT = 1.702, 1.0, 7.0  # of swigluoai, unless config.json has others
# By the beginning of a model type, what a limit applies to, if not to the gate before SiLU.
LIMITED_KINDS = {
    "step": ("swiglustep",),
    "gigachat": ("swiglustep",),
    "bailing": ("silu", "swiglustep"),  # vLLM clamps before SiLU, SGLang after it
}


def check_limit(fields: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for a limit that is not positive, if the model's class takes it as a limit."""
    limit, family = fields.get("swiglu_limit"), fields.get("model_type")
    if family in CLAMPED_TO_ZERO and limit is not None and limit <= 0:
        raise UnsupportedError(
            f"The checkpoint's swiglu_limit is {shown(limit)}, which vLLM's class for model_type {shown(family)} takes "
            "as a limit, but the kernels only compute positive ones. Set it to null in config.json for no limit, or "
            f"serve the checkpoint without --quantization {NAME}."
        )


def experts_activations(fields: Mapping[str, Any], layers: Iterable[int]) -> tuple[Activation, ...]:
    """Returns every activation that an engine may compute in the experts of these layers, that of most layers first.

    Args:
        fields: the part of config.json that describes the language model. Names of activations are known ones.
    """
    counted = Counter(activation for layer in layers for activation in _layer_activations(fields, layer))
    return tuple(activation for activation, _ in counted.most_common())


def _layer_activations(fields: Mapping[str, Any], layer: int) -> list[Activation]:
    if fields.get("model_type") == gpt_oss.MODEL_TYPE:
        return [gpt_oss.ACTIVATION]
    limit, alpha, beta = _limit(fields, layer), fields.get("swiglu_alpha"), fields.get("swiglu_beta")
    # transformers changes the name to silu, and keeps alpha.
    if alpha is not None or any(fields.get(name) == OAI for name in NAMES):
        alpha, beta = OAI_ALPHA if alpha is None else alpha, OAI_BETA if beta is None else beta
        return [Activation("swigluoai_uninterleave", limit or OAI_LIMIT, alpha, beta)]
    if limit is None:
        return [Activation()]
    family = str(fields.get("model_type"))
    kinds = next((kinds for start, kinds in LIMITED_KINDS.items() if family.startswith(start)), ("silu",))
    return [Activation(kind, limit) for kind in kinds]


def _limit(fields: Mapping[str, Any], layer: int) -> float | None:
    given = [fields[name] for name in LIMITS if name in fields] or [DEFAULT_LIMITS.get(str(fields.get("model_type")))]
    limit = next((value for value in given if value is not None), None)
    if isinstance(limit, list):
        limit = limit[layer] if layer < len(limit) else None
    return limit if limit and limit > 0 else None
