"""Input scales of experts: checkpoints with one scale per weight have them, the kernels do not use them."""

from types import MethodType
from typing import Any

import torch
from vllm.model_executor.utils import set_weight_attrs

from fp8moe_plugin.layers.vllm import compat


def load_input_scale(
    layer: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Load the input scale of w1, w2 or w3 of an expert: it is not used, but vLLM's models load it.

    w1 and w3 share an element. It is loaded only once, because a reload counts the elements that have arrived.
    """
    if shard_id == "w3":
        return compat.local_expert(layer, expert_id) is not None if return_success else None
    return layer.weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success=return_success)


load_input_scale.supports_moe_loading = True  # type: ignore[attr-defined]


def input_scale(layer: Any, experts: int) -> torch.nn.Parameter:
    """Returns the parameter for the input scales of w13 or w2 of a layer."""
    parameter = torch.nn.Parameter(torch.ones(experts), requires_grad=False)
    set_weight_attrs(parameter, {"weight_loader": MethodType(load_input_scale, layer)})
    return parameter
