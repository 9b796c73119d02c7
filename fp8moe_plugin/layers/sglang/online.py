"""Online quantization: each tensor of an unquantized checkpoint is quantized as it arrives, then loaded as FP8.

Every rank receives the whole weight and quantizes it before taking its part, so the scale blocks do not depend on the
number of ranks. No state is kept between tensors, so weights can be updated at any time and in any order.
"""

from collections.abc import Callable
from typing import Any

import torch

from fp8moe_plugin.layers.sglang import compat
from fp8moe_plugin.layers.unquantized import quantize_weight

Load = Callable[..., None]


def linear_loader(prefix: str, load: Load) -> Load:
    """Returns a loader for the unquantized `[N, K]` of a dense layer.

    It calls `load` for the e4m3 weight, then for its scales, and raises `CheckpointError` for tensors that
    `quantize_weight` rejects.
    """

    def quantize_and_load(layer: Any, param: torch.Tensor, loaded_weight: torch.Tensor, *shard: Any) -> None:
        q, scales = quantize_weight(f"{prefix}.weight", loaded_weight, param.device)
        load(layer, param, q, *shard)
        load(layer, layer.weight_scale_inv, scales, *shard)

    return quantize_and_load


def experts_loader(prefix: str, load: Load) -> Load:
    """Returns such a loader for w1, w2 and w3 of an expert; it skips tensors of experts on other ranks."""

    def quantize_and_load(
        layer: Any,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        if not compat.local_slots(layer, expert_id):
            return
        q, scales = quantize_weight(f"{prefix}.{expert_id}.{shard_id}.weight", loaded_weight, param.device)
        scale = layer.w2_weight_scale_inv if shard_id == "w2" else layer.w13_weight_scale_inv
        load(layer, param, q, weight_name, shard_id, expert_id)
        load(layer, scale, scales, f"{weight_name}_scale_inv", shard_id, expert_id)

    return quantize_and_load
