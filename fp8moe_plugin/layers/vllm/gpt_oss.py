"""gpt-oss under vLLM, whose runner pads the tokens to whole scale blocks; see `layers/gpt_oss.py`."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from fp8moe_plugin.checkpoint.shapes import padded_hidden
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.gpt_oss import (
    Target,
    bias_on_device,
    check_in_order,
    check_shape,
    copy_bias,
    part_of,
    share_of,
)
from fp8moe_plugin.layers.parameters import is_bias, role_of
from fp8moe_plugin.layers.recode import targets
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.loading import Arriving
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.vllm.pack import PackedMoeMethod
from fp8moe_plugin.layers.vllm.recode import RecodedMoeMethod


class GptOssMethod(Fp8MoeMethod):
    """What both forms of gpt-oss's experts have in common."""

    @staticmethod
    def arriving(moe: Any) -> Arriving:
        return Arriving(moe.hidden_dim_unpadded, *share_of(moe.intermediate_size, moe.tp_size, moe.tp_rank))

    def maybe_roundup_sizes(self, hidden_size: int, *rest: Any) -> tuple[int, int]:
        return super().maybe_roundup_sizes(padded_hidden(hidden_size), *rest)

    def weight_loader(self, role: Role, loader: MethodType) -> MethodType:
        return MethodType(_loader(self.scale, self.weights is PACKED_MXFP4), loader.__self__)

    @staticmethod
    def load_bias(layer: Any, param: torch.Tensor, bias: torch.Tensor, weight_name: str, **_: Any) -> bool | None:
        copy_bias(param, part_of(weight_name), bias)
        return True

    @staticmethod
    def check_tensor(
        layer: Any,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> tuple[str | None, torch.Tensor]:
        """Checks a tensor for all experts of a rank.

        Newer versions of vLLM can also load the experts of gpt-oss one by one, under names that OpenAI's checkpoints do
        not have.
        """
        if shard_id is not None:
            raise CheckpointError(
                f"{weight_name}: the tensors of gpt-oss's experts arrive one by one, but only those of all experts of "
                "a layer, as in OpenAI's checkpoints, are supported. Load such a checkpoint."
            )
        loading, moe = layer.fp8moe_loading, layer.moe_config
        experts = moe.num_experts // moe.ep_size
        check_shape(weight_name, param, loaded_weight, experts, *loading.arriving[:2])
        check_in_order(weight_name, experts, lambda expert: compat.local_expert(layer, moe.ep_rank * experts + expert))
        if is_bias(param):
            projection, tensor = None, bias_on_device(weight_name, param, loaded_weight)
        else:
            projection = f"{loading.prefix} ({part_of(weight_name)})"
            tensor = loading.kept(weight_name, param, loaded_weight, rows=0)
        if loading.in_place:
            loading.model.written = True  # also by codes that wait for their exponents
        return projection, tensor


class PackedGptOssMethod(GptOssMethod, PackedMoeMethod):
    """Experts that stay in MXFP4."""


class RecodedGptOssMethod(GptOssMethod, RecodedMoeMethod):
    """Experts that are re-encoded to block FP8."""


def gpt_oss_method(spec: QuantSpec) -> type[GptOssMethod]:
    return PackedGptOssMethod if spec.weights is PACKED_MXFP4 else RecodedGptOssMethod


def _loader(scale: str, packed: bool) -> Callable[..., bool | None]:
    """Returns a loader for the codes or exponents of all experts of a rank."""

    def load_all(
        layer: Any,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: None = None,
        expert_id: None = None,
        return_success: bool = False,
    ) -> bool | None:
        if param.is_meta:  # vLLM counts the elements that a reload copies
            param.data.copy_(torch.empty_like(param))
            return True if return_success else None
        loading, part = layer.fp8moe_loading, part_of(weight_name)
        (weight, _), (scales, _) = targets(layer, part, weight_name, scale)
        target = Target(
            loading.prefix,
            part,
            weight,
            scales,
            loading.arriving.share,
            packed=packed,
            running=loading.in_place,
            balanced=layer.moe_config.moe_parallel_config.enable_eplb,
        )
        target.load(loading.model.halves, role_of(param), loaded_weight)
        return True if return_success else None

    load_all.supports_moe_loading = True  # type: ignore[attr-defined]  # some of vLLM's models check for it
    return load_all
