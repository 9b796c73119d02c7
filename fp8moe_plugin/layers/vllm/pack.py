"""Experts in MXFP4: each projection is packed for the kernels as soon as its codes and exponents have arrived.

Every rank receives the whole projection and takes its part first. Parameters have one expert per index of their first
dimension, as EPLB needs them. They have no room for further steps (ops/mxfp4.py) until an expert needs some; then those
of its layer grow. A reload that needs more of them than the kernels' parameters have is refused, since CUDA graphs have
their addresses, and so is EPLB with them, because all ranks would need the same number.
"""

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch

from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.pack import grow, pack, part_of_rank
from fp8moe_plugin.layers.parameters import role_of
from fp8moe_plugin.layers.recode import Halves, targets
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.vllm.recode import EXPERT_SCALE
from fp8moe_plugin.ops.mxfp4 import Steps, further_steps, steps_of


class PackedMoeMethod(Fp8MoeMethod):
    """Experts whose checkpoint has them in MXFP4, and which stay in it."""

    def __init__(self, moe: Any, spec: QuantSpec, *rest: Any) -> None:
        super().__init__(moe, replace(spec, scale=EXPERT_SCALE), *rest)

    def weight_loader(self, role: Role, loader: MethodType) -> MethodType:
        return MethodType(_loader(self.prefix, self.scale), loader.__self__)

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.loading.reloading:
            with self.loading.errors_fail_model():
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


def check_room(prefix: str, needed: int, room: int) -> None:
    """Raise `CheckpointError` if a load needs more further steps than the parameters that kernels read have."""
    if needed > room:
        raise CheckpointError(
            f"{prefix}: the exponents of these weights need {needed} further steps of K, but the running layer has "
            f"room for {room}. Restart the engine to load them."
        )


def _loader(prefix: str, scale: str) -> Callable[..., bool | None]:
    """Returns a loader for codes or exponents of w1, w2 or w3 of an expert. It skips experts of other ranks."""

    def pack_and_load(
        layer: Any,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        expert = compat.local_expert(layer, expert_id)
        if expert is None:
            return False if return_success else None
        name = f"{prefix} ({shard_id} of expert {expert_id})"
        halves: Halves = layer.fp8moe_loading.model.halves
        if both := halves.add(name, role_of(param), loaded_weight):
            (weight, _), (scales, _) = targets(layer, shard_id, weight_name, scale)
            if param.is_meta:
                _count(weight, scales, shard_id)
            else:
                _pack(layer, name, (weight, scales), expert, shard_id, both)
        return True if return_success else None

    pack_and_load.supports_moe_loading = True  # type: ignore[attr-defined]  # some of vLLM's models check for it
    return pack_and_load


def _pack(
    layer: Any,
    name: str,
    parameters: tuple[torch.Tensor, torch.Tensor],
    expert: int,
    shard_id: str,
    both: tuple[torch.Tensor, torch.Tensor],
) -> None:
    moe = layer.moe_config
    sizes = moe.intermediate_size, moe.tp_size, moe.tp_rank
    parts = (
        part_of_rank(role, tensor.to(parameters[0].device), shard_id == "w2", *sizes)
        for role, tensor in zip((Role.WEIGHT, Role.SCALES), both, strict=True)
    )
    steps = steps_of(*parts)
    _check_steps(layer, name, parameters, shard_id, steps)
    pack(name, *parameters, expert, shard_id, steps)


def _check_steps(
    layer: Any, name: str, parameters: tuple[torch.Tensor, torch.Tensor], shard_id: str, steps: Steps
) -> None:
    if steps.extra and layer.moe_config.moe_parallel_config.enable_eplb:
        raise UnsupportedError(
            f"{name}: the exponents of a block differ by more than expert load balancing can serve. Restart without "
            "--enable-eplb, or with FP8MOE_FP4_EXPERTS=fp8."
        )
    if layer.fp8moe_loading.in_place:
        halves = 1 if shard_id == "w2" else 2
        check_room(name, steps.extra * halves, further_steps(*parameters))


def _count(weight: torch.Tensor, scales: torch.Tensor, shard_id: str) -> None:
    """On the meta device, where vLLM counts the elements that a reload copies, copy as many as a projection has."""
    for parameter in (weight, scales):
        share = parameter.data[0].flatten()
        share = share if shard_id == "w2" else share[: len(share) // 2]
        share.copy_(torch.empty_like(share))
