"""Experts in MXFP4: a projection is packed for the kernels once its codes and exponents have arrived."""

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch

from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.pack import Share, check_room, grow, pack, part_of_rank
from fp8moe_plugin.layers.parameters import role_of
from fp8moe_plugin.layers.recode import Halves, on_one_thread, targets
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.vllm.recode import EXPERT_SCALE
from fp8moe_plugin.ops.mxfp4 import further_steps


class PackedMoeMethod(Fp8MoeMethod):
    """Experts whose checkpoint has them in MXFP4, and which stay in it."""

    def __init__(self, moe: Any, spec: QuantSpec, *rest: Any) -> None:
        super().__init__(moe, replace(spec, scale=EXPERT_SCALE), *rest)

    def weight_loader(self, role: Role, loader: MethodType) -> MethodType:
        arriving = self.loading.arriving
        assert arriving is not None
        return MethodType(_loader(self.prefix, self.scale, arriving.share), loader.__self__)

    def process_weights_after_loading(self, layer: Any) -> None:
        with self.loading.errors_fail_model():
            if self.loading.reloading:
                self._match_further_steps(layer)
        super().process_weights_after_loading(layer)

    def _match_further_steps(self, layer: Any) -> None:
        """Give reloaded parameters the shapes of those that kernels read, to which vLLM copies them.

        Raises:
            CheckpointError: they have more further steps.
        """
        for shard_id in ("w1", "w2"):
            (weight, name), (scales, scales_name) = targets(layer, shard_id, "", self.scale)
            part = "w2" if shard_id == "w2" else "w13"
            room = further_steps(*(self.loading.parameters[f"{part}_{suffix}"] for suffix in (name, scales_name)))
            if room > further_steps(weight, scales):
                grow(self.prefix, weight, scales, shard_id == "w1", room)
            check_room(self.prefix, further_steps(weight, scales), room)


def _loader(prefix: str, scale: str, share: Share) -> Callable[..., bool | None]:
    """Returns a loader for codes or exponents of w1, w2 or w3 of an expert of this rank."""

    @on_one_thread
    def pack_and_load(
        layer: Any,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        name = f"{prefix} ({shard_id} of expert {expert_id})"
        halves: Halves = layer.fp8moe_loading.model.halves
        role = role_of(param)
        half = part_of_rank(role, loaded_weight, shard_id == "w2", share)
        if both := halves.add(name, role, half, param.device):
            (weight, _), (scales, _) = targets(layer, shard_id, weight_name, scale)
            if param.is_meta:
                _count(weight, scales, shard_id)
            else:
                expert = compat.local_expert(layer, expert_id)
                assert expert is not None  # see `Fp8MoeMethod.check_tensor`
                states = {
                    "running": layer.fp8moe_loading.in_place,
                    "balanced": layer.moe_config.moe_parallel_config.enable_eplb,
                }
                pack(name, (weight, scales), [expert], shard_id, both, **states)
        return True if return_success else None

    pack_and_load.supports_moe_loading = True  # type: ignore[attr-defined]  # some of vLLM's models check for it
    return pack_and_load


def _count(weight: torch.Tensor, scales: torch.Tensor, shard_id: str) -> None:
    """On the meta device, where vLLM counts the elements that a reload copies, copy as many as a projection has."""
    for parameter in (weight, scales):
        share = parameter.data[0].flatten()
        share = share if shard_id == "w2" else share[: len(share) // 2]
        share.copy_(torch.empty_like(share))
