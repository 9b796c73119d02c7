"""Online quantization: each tensor of an unquantized checkpoint is quantized as it arrives, then loaded as FP8.

Every rank receives the whole weight and quantizes it before taking its part, so the scale blocks do not depend on the
number of ranks. No state is kept between tensors, so weights can be reloaded at any time and in any order.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.parameters import empty_pair
from fp8moe_plugin.layers.unquantized import quantize_weight
from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod


class Online:
    """Attributes for vLLM's weight tracking: the checkpoint has no tensors for the scales."""

    # Otherwise vLLM, if it tracks weights, reports the scales as missing. `check_loaded` finds missing weights.
    uses_meta_device = True

    online = True


@register_weight_loader_v2_supported_method
class OnlineLinearMethod(Online, Fp8MoeLinearMethod):
    def weight_loader(self, loader: MethodType) -> MethodType:
        return MethodType(_linear_loader(self.prefix, loader.__func__), loader.__self__)


class OnlineMoeMethod(Online, Fp8MoeMethod):
    def weight_loader(self, role: Role, loader: MethodType) -> MethodType:
        if role is Role.SCALES:
            return loader
        return MethodType(_experts_loader(self.prefix, loader.__func__), loader.__self__)


# Loaders must be methods bound to their layer: vLLM keeps loaders for reloading, and unbinds them to free the layer.


def _linear_loader(prefix: str, load: Callable[..., None]) -> Callable[..., None]:
    """Returns a loader for the unquantized `[N, K]` of a dense layer.

    It calls `load` for the e4m3 weight, then for its scales, and raises `CheckpointError` for tensors that
    `quantize_weight` rejects.
    """

    @functools.wraps(load)
    def quantize_and_load(
        layer: Any, param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        q, scales = _quantized(f"{prefix}.weight", loaded_weight, param.device)
        load(layer, param, q, *args, **kwargs)
        layer.fp8moe_loading.note_arrival(f"{prefix} {args}", Role.WEIGHT, Role.SCALES)
        load(layer, layer.weight_scale_inv, scales, *args, **kwargs)

    return quantize_and_load


def _experts_loader(prefix: str, load: Callable[..., bool | None]) -> Callable[..., bool | None]:
    """Returns such a loader for w1, w2 and w3 of an expert of this rank."""

    @functools.wraps(load)
    def quantize_and_load(
        layer: Any,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        q, scales = _quantized(f"{prefix}.{expert_id}.{shard_id}.weight", loaded_weight, param.device)
        layer.fp8moe_loading.note_arrival(f"{prefix} ({shard_id} of expert {expert_id})", Role.WEIGHT, Role.SCALES)
        scale = layer.w2_weight_scale_inv if shard_id == "w2" else layer.w13_weight_scale_inv
        load(layer, scale, scales, f"{weight_name}_scale_inv", shard_id, expert_id, return_success)
        return load(layer, param, q, weight_name, shard_id, expert_id, return_success)

    return quantize_and_load


def _quantized(name: str, weight: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight. On the meta device, where vLLM counts the tensors of a reload, return empty tensors."""
    if device.type != "meta":
        return quantize_weight(name, weight, device)
    n, k = weight.shape
    return empty_pair(FP8_BLOCK, n, k, device)
