"""gpt-oss under vLLM, whose runner pads the tokens to whole scale blocks; see `layers/gpt_oss.py`."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from fp8moe_plugin.checkpoint.shapes import padded_hidden
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.gpt_oss import copy_part, share_of, split
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
        return super().weight_loader(role, MethodType(load_part, loader.__self__))

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        for name, parameter in self.loading.parameters.items():
            load = parameter.weight_loader.__func__  # type: ignore[attr-defined]
            parameter.weight_loader = MethodType(_of_all_experts(load, name), layer)  # type: ignore[attr-defined]


class PackedGptOssMethod(GptOssMethod, PackedMoeMethod):
    """Experts that stay in MXFP4."""


class RecodedGptOssMethod(GptOssMethod, RecodedMoeMethod):
    """Experts that are re-encoded to block FP8."""


def gpt_oss_method(spec: QuantSpec) -> type[GptOssMethod]:
    return PackedGptOssMethod if spec.weights is PACKED_MXFP4 else RecodedGptOssMethod


def load_part(
    layer: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Load this rank's part of w1, w2 or w3 of an expert, in block FP8."""
    local = compat.local_expert(layer, expert_id)
    if local is not None:
        copy_part(param.data[local], shard_id, loaded_weight)
    return local is not None if return_success else None


load_part.supports_moe_loading = True  # type: ignore[attr-defined]


def _of_all_experts(load: Callable[..., bool | None], name: str) -> Callable[..., bool | None]:
    """Returns a loader for the tensor of a parameter for all experts of a rank; `load`: that for one expert.

    Newer versions of vLLM can also load the experts of gpt-oss one by one, under names that OpenAI's checkpoints do not
    have.
    """

    @functools.wraps(load)
    def load_all(
        layer: Any,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        moe = layer.moe_config
        with layer.fp8moe_loading.errors_fail_model():
            if shard_id is not None:
                raise CheckpointError(
                    f"{weight_name}: the tensors of gpt-oss's experts arrive one by one, but only those of all experts "
                    "of a layer, as in OpenAI's checkpoints, are supported. Load such a checkpoint."
                )
            parts = split(weight_name, name, loaded_weight, moe.num_experts // moe.ep_size)
        for expert, shard, tensor in parts:
            load(layer, param, tensor, weight_name, shard, moe.ep_rank * len(loaded_weight) + expert)
        return True if return_success else None

    return load_all
