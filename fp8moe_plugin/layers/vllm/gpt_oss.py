"""gpt-oss: vLLM's model passes the tensors of all experts of a layer at once, cut for the rank in groups of a scale.

Gate and up rows alternate in them. They are loaded expert by expert, by the loaders of experts in MXFP4. The hidden
size is padded to whole scale blocks; vLLM's runner pads the tokens.
"""

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from fp8moe_plugin.checkpoint.gpt_oss import rank_channels
from fp8moe_plugin.checkpoint.shapes import local_intermediate, padded_hidden
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.pack import Share
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.loading import Arriving
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.vllm.pack import PackedMoeMethod
from fp8moe_plugin.layers.vllm.recode import RecodedMoeMethod

SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}  # by the parameter's name; their rows alternate


class GptOssMethod(Fp8MoeMethod):
    """What both forms of gpt-oss's experts have in common."""

    @staticmethod
    def arriving(moe: Any) -> Arriving:
        width = rank_channels(moe.intermediate_size, moe.tp_size, moe.tp_rank)
        whole = local_intermediate(moe.intermediate_size, moe.tp_size)
        return Arriving(moe.hidden_dim_unpadded, width, Share(whole, 1, 0))

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
    """Load this rank's part of w1, w2 or w3 of an expert, in block FP8, zero-padded to the parameter's size."""
    local = compat.local_expert(layer, expert_id)
    if local is not None:
        own = param.data[local]
        own = own if shard_id == "w2" else own.chunk(2)[shard_id == "w3"]
        missing = (size - given for size, given in zip(own.shape[::-1], loaded_weight.shape[::-1], strict=True))
        padding = [side for size in missing for side in (0, size)]
        values = loaded_weight.view(torch.uint8) if loaded_weight.element_size() == 1 else loaded_weight
        own.copy_(torch.nn.functional.pad(values, padding).view(loaded_weight.dtype))
    return local is not None if return_success else None


load_part.supports_moe_loading = True  # type: ignore[attr-defined]


def _of_all_experts(load: Callable[..., bool | None], name: str) -> Callable[..., bool | None]:
    """Returns a loader for the tensor of a parameter for all experts of a rank; `load`: that for one expert.

    Newer versions of vLLM can also load the experts of gpt-oss one by one, under names that OpenAI's checkpoints do not
    have.
    """
    shards = SHARDS[name.partition("_")[0]]

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
        loading = layer.fp8moe_loading
        with loading.errors_fail_model():
            _check_experts(weight_name, loaded_weight, layer.moe_config, len(shards), shard_id)
        first = layer.moe_config.ep_rank * len(loaded_weight)
        for expert, shard, tensor in _parts(loaded_weight, shards):
            load(layer, param, tensor, weight_name, shard, first + expert)
        return True if return_success else None

    return load_all


def _parts(tensor: torch.Tensor, shards: tuple[str, ...]) -> Iterator[tuple[int, str, torch.Tensor]]:
    for expert, of_expert in enumerate(tensor):
        for row, shard in enumerate(shards):
            yield expert, shard, of_expert[row :: len(shards)]


def _check_experts(name: str, tensor: torch.Tensor, moe: Any, alternating: int, shard_id: str | None) -> None:
    """Raise `CheckpointError` for a tensor that does not hold all experts of the rank; `load` checks each of them."""
    if shard_id is not None:
        raise CheckpointError(
            f"{name}: the tensors of gpt-oss's experts arrive one by one, but only those of all experts of a layer, as "
            "in OpenAI's checkpoints, are supported. Load such a checkpoint."
        )
    experts = moe.num_experts // moe.ep_size
    if tensor.dim() < 2 or len(tensor) != experts or tensor.shape[1] % alternating:
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)}, but must be that of {experts} experts"
            f"{' with alternating gate and up rows' if alternating > 1 else ''}. Check that config.json belongs to the "
            "weights."
        )
