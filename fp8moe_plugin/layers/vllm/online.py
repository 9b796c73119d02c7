"""Layers of an unquantized checkpoint: each tensor is quantized as it arrives, then loaded as if it came as FP8.

A weight arrives whole on every rank, and is quantized before the rank takes its part: the blocks are the same for any
number of ranks. Nothing is kept between two tensors, so weights may be loaded again at any time, in any order.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

from fp8moe_plugin.checkpoint.shapes import GROUP, ceil_div
from fp8moe_plugin.layers.unquantized import quantize_weight
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.ops.checks import FP8


class Online:
    """What vLLM asks of a method for whose parameters no checkpoint has tensors of the same names."""

    # Else vLLM, where it is asked to track weights, misses the scales. What is missing indeed, `check_loaded` finds.
    uses_meta_device = True

    @staticmethod
    def check_tensor(*_: object, **__: object) -> None:
        """Nothing: `quantize_weight` refuses what it cannot take."""


@register_weight_loader_v2_supported_method
class OnlineLinearMethod(Online, Fp8MoeLinearMethod):
    def weight_loader(self, loader: MethodType) -> MethodType:
        return MethodType(_of_linear(self.prefix, loader.__func__), loader.__self__)


class OnlineMoeMethod(Online, Fp8MoeMethod):
    def weight_loader(self, loader: MethodType) -> MethodType:
        return MethodType(_of_experts(self.prefix, loader.__func__), loader.__self__)


# Loaders are methods bound to their layer: so vLLM, which keeps them for reloading, can tell and loosen what they hold.


def _of_linear(prefix: str, load: Callable) -> Callable:
    """A dense layer's loader of unquantized `[N, K]`; `load` takes the e4m3 weight, then its float32 scales.

    The loader raises `CheckpointError` for what `quantize_weight` refuses.
    """

    @functools.wraps(load)
    def quantize_and_load(
        layer: Any, param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        q, scales = _quantized(f"{prefix}.weight", loaded_weight, param.device)
        load(layer, param, q, *args, **kwargs)
        load(layer, layer.weight_scale_inv, scales, *args, **kwargs)

    return quantize_and_load


def _of_experts(prefix: str, load: Callable) -> Callable:
    """The same for w1, w2 and w3 of one expert; those of other ranks' experts are not looked at."""

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
        if not compat.holds_expert(layer, expert_id):
            return False if return_success else None
        q, scales = _quantized(f"{prefix}.{expert_id}.{shard_id}.weight", loaded_weight, param.device)
        scale = layer.w2_weight_scale_inv if shard_id == "w2" else layer.w13_weight_scale_inv
        load(layer, scale, scales, f"{weight_name}_scale_inv", shard_id, expert_id, return_success)
        return load(layer, param, q, weight_name, shard_id, expert_id, return_success)

    return quantize_and_load


def _quantized(name: str, weight: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """To reload, vLLM first loads into parameters without memory, to count what arrives: sizes are enough there."""
    if device.type != "meta":
        return quantize_weight(name, weight, device)
    blocks = [ceil_div(size, GROUP) for size in weight.shape]
    return torch.empty(weight.shape, dtype=FP8, device="meta"), torch.empty(blocks, dtype=torch.float32, device="meta")
