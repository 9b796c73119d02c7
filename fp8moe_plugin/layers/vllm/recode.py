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
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

from fp8moe_plugin.checkpoint.shapes import Experts, local_intermediate
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.parameters import empty_pair, role_of
from fp8moe_plugin.layers.recode import Halves, block_fp8, check_memory, targets
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod

EXPERT_SCALE = "weight_scale"  # suffix of the names that vLLM's DeepSeek-V4 gives the exponents


class RecodedMoeMethod(Fp8MoeMethod):
    """Experts whose checkpoint has them in MXFP4."""

    def __init__(self, moe: Any, spec: QuantSpec, *rest: Any) -> None:
        super().__init__(moe, replace(spec, scale=EXPERT_SCALE), *rest)
        if current_platform.is_cuda():
            memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            check_layers(get_current_vllm_config(), moe, memory)

    def weight_loader(self, role: Role, loader: MethodType) -> MethodType:
        return MethodType(_loader(self.prefix, self.scale, loader.__func__), loader.__self__)


def check_layers(engine: Any, moe: Any, memory: int) -> None:
    """Check that a GPU can hold its experts, unless vLLM keeps a part of the weights elsewhere; see `check_memory`.

    Args:
        engine: vLLM's configuration.
        moe: that of a layer of experts.
    """
    if engine.offload_config.uva.cpu_offload_gb or engine.offload_config.prefetch.offload_group_size:
        return
    sizes = moe.experts_per_token, moe.hidden_dim
    layers, stages = engine.model_config.hf_text_config.num_hidden_layers, engine.parallel_config.pipeline_parallel_size
    every = Experts(layers, moe.num_logical_experts, *sizes, moe.intermediate_size)
    width = local_intermediate(moe.intermediate_size, moe.tp_size)
    check_memory(every, Experts(layers // stages, moe.num_local_experts, *sizes, width), memory)


def _loader(prefix: str, scale: str, load: Callable[..., bool | None]) -> Callable[..., bool | None]:
    """Returns a loader for codes or exponents of w1, w2 or w3 of an expert of this rank.

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
        name = f"{prefix} ({shard_id} of expert {expert_id})"
        halves: Halves = layer.fp8moe_loading.model.halves
        both = halves.add(name, role_of(param), loaded_weight, param.device)
        if both is None:
            return True if return_success else None
        q, scales = _recoded(name, *both)
        (weight, its_name), (own_scales, scales_name) = targets(layer, shard_id, weight_name, scale)
        load(layer, own_scales, scales, scales_name, shard_id, expert_id, return_success)
        return load(layer, weight, q, its_name, shard_id, expert_id, return_success)

    return recode_and_load


def _recoded(name: str, codes: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Re-encode a projection. On the meta device, where vLLM counts the tensors of a reload, return empty tensors."""
    if not codes.is_meta:
        return block_fp8(name, codes, exponents)
    return empty_pair(FP8_BLOCK, codes.shape[0], 2 * codes.shape[1], codes.device)
