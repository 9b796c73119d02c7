"""Experts in MXFP4: each projection is re-encoded to block FP8 as soon as its codes and exponents have arrived.

Every rank receives the whole projection and re-encodes it before taking its part. A reload and a load in place work as
for block FP8.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.parameters import empty_pair, role_of
from fp8moe_plugin.layers.recode import Halves, block_fp8, targets
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod

EXPERT_SCALE = "weight_scale"  # suffix of the names that vLLM's DeepSeek-V4 gives the exponents


class RecodedMoeMethod(Fp8MoeMethod):
    """Experts whose checkpoint has them in MXFP4."""

    def __init__(self, moe: Any, spec: QuantSpec, *rest: Any) -> None:
        super().__init__(moe, replace(spec, scale=EXPERT_SCALE), *rest)

    def weight_loader(self, role: Role, loader: MethodType) -> MethodType:
        return MethodType(_loader(self.prefix, self.scale, loader.__func__), loader.__self__)


def _loader(prefix: str, scale: str, load: Callable[..., bool | None]) -> Callable[..., bool | None]:
    """Returns a loader for codes or exponents of w1, w2 or w3 of an expert. It skips experts of other ranks.

    The second of both tensors to arrive calls `load` for the e4m3 weight, and for its scales.
    """

    @functools.wraps(load)
    def recode_and_load(
        layer: Any,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        if compat.local_expert(layer, expert_id) is None:
            return False if return_success else None
        name = f"{prefix} ({shard_id} of expert {expert_id})"
        halves: Halves = layer.fp8moe_loading.model.halves
        both = halves.add(name, role_of(param), loaded_weight)
        if both is None:
            return True if return_success else None
        q, scales = _recoded(name, *both, param.device)
        (weight, its_name), (own_scales, scales_name) = targets(layer, shard_id, weight_name, scale)
        load(layer, own_scales, scales, scales_name, shard_id, expert_id, return_success)
        return load(layer, weight, q, its_name, shard_id, expert_id, return_success)

    return recode_and_load


def _recoded(
    name: str, codes: torch.Tensor, exponents: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Re-encode a projection. On the meta device, where vLLM counts the tensors of a reload, return empty tensors."""
    if device.type != "meta":
        return block_fp8(name, codes.to(device), exponents.to(device))
    return empty_pair(FP8_BLOCK, codes.shape[0], 2 * codes.shape[1], device)
