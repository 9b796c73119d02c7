"""The biases of the experts of a layer, which vLLM's models load like their weights."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.utils import set_weight_attrs

from fp8moe_plugin.layers.loading import checked_bias
from fp8moe_plugin.layers.parameters import bias_tensors, rank_bias
from fp8moe_plugin.layers.vllm import compat


def bias_parameters(
    layer: Any, load: Callable[..., bool | None], experts: int, hidden: int, intermediate: int
) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters of both biases.

    Args:
        load: their loader.
        intermediate: channels on this rank.
    """
    found = {}
    for name, tensor in bias_tensors(experts, hidden, intermediate).items():
        found[name] = torch.nn.Parameter(tensor, requires_grad=False)
        set_weight_attrs(found[name], {"weight_loader": MethodType(load, layer)})
    return found


def load_bias(
    layer: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Load the bias of w1, w2 or w3 of an expert of this rank, that of w2 only on the first of those that share it."""
    local = compat.local_expert(layer, expert_id)
    assert local is not None  # see `check_bias`
    own, share = param.data[local], layer.fp8moe_loading.arriving.share
    own = own if shard_id == "w2" else own.chunk(2)[shard_id == "w3"]
    own.copy_(rank_bias(loaded_weight, own, shard_id, share.rank))
    return True if return_success else None


load_bias.supports_moe_loading = True  # type: ignore[attr-defined]


def check_bias(
    layer: Any,
    param: torch.Tensor,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
) -> tuple[None, torch.Tensor] | None:
    """Returns no projection, as a bias is no half of a pair, and the tensor; None on other ranks.

    Raises:
        CheckpointError: see `checked_bias`.
    """
    if compat.local_expert(layer, expert_id) is None:
        return None
    loading = layer.fp8moe_loading
    if loading.in_place:
        loading.model.written = True
    rows = loading.arriving.hidden if shard_id == "w2" else loading.arriving.intermediate
    return None, checked_bias(f"{weight_name} ({shard_id} of expert {expert_id})", param, loaded_weight, rows)
