"""vLLM's layers on one of several ranks, with vLLM's loaders and our methods, without an engine."""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import DPMetadata
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.formats.spec import ONLINE, QuantSpec
from fp8moe_plugin.layers.vllm import gather
from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig, moe_method
from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.vllm.model_state import ModelState
from fp8moe_plugin.layers.vllm.online import OnlineLinearMethod
from fp8moe_plugin.layers.vllm.shared_expert import Mlp
from tests.layers.experts import EXPERTS, HIDDEN, TOPK, Checkpoint

FP8 = QuantSpec(FP8_BLOCK)
RECODED = QuantSpec(FP8_BLOCK, recoded_from=MXFP4)
PACKED = QuantSpec(PACKED_MXFP4, recoded_from=MXFP4)
ROWS = QuantSpec(FP8_CHANNEL, scale="weight_scale", dense=FP8_CHANNEL)


def step_of(patch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """Make vLLM report these numbers of tokens, one for each rank, in this step."""
    context = SimpleNamespace(dp_metadata=DPMetadata(torch.tensor(sizes), sizes))
    patch.setattr(gather, "get_forward_context", lambda: context)


class Layer(RoutedExperts):
    """A layer of experts on one rank.

    Args:
        quant: of the checkpoint; None: block FP8.
        moe, parallel: other fields of vLLM's configurations.
    """

    apply_router_weight_on_input, expert_map = False, None

    def __init__(
        self,
        intermediate: int,
        ranks: int,
        rank: int,
        quant: QuantSpec | None = None,
        shared: Mlp | None = None,
        moe: Mapping[str, object] = MappingProxyType({}),
        **parallel: object,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.quant_config = self._fused_shared_expert_quantizer = None
        self.local_num_experts = EXPERTS
        alone = FusedMoEParallelConfig.make_no_parallel()
        config = dataclasses.replace(alone, **{"tp_size": ranks, "tp_rank": rank} | parallel)
        fields = {
            "num_experts": EXPERTS,
            "experts_per_token": TOPK,
            "hidden_dim": HIDDEN,
            "intermediate_size": intermediate,
            "num_local_experts": EXPERTS,
            "num_logical_experts": EXPERTS,
            "activation": MoEActivation.SILU,
            "device": "cpu",
            "routing_method": RoutingMethodType.Renormalize,
            "moe_parallel_config": config,
            "in_dtype": torch.bfloat16,
        }
        self.moe_config = FusedMoEConfig(**fields | moe)
        quant = quant or FP8
        self.quant_method = moe_method(quant)(self.moe_config, quant, "L", "warmup", ModelState(), shared)
        part = self.moe_config.intermediate_size_per_partition
        sizes = self.quant_method.maybe_roundup_sizes(self.moe_config.hidden_dim, part, torch.bfloat16, config)
        self.quant_method.create_weights(self, EXPERTS, *sizes, torch.bfloat16, weight_loader=self.weight_loader)

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert

    def load(self, checkpoint: Checkpoint) -> "Layer":
        load_experts(self, checkpoint)
        return self

    def parts(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of a checkpoint with only this rank's channels."""
        found = {}
        for kind, suffix in (("weight", "weight"), ("weight_scale_inv", self.quant_method.scale)):
            gate_up = getattr(self, f"w13_{suffix}").data
            found[f"w1_{kind}"], found[f"w3_{kind}"] = gate_up.chunk(2, 1)
            found[f"w2_{kind}"] = getattr(self, f"w2_{suffix}").data
        return found


def load_experts(layer: RoutedExperts, checkpoint: Checkpoint) -> None:
    for name, tensors in checkpoint.items():
        shard, _, kind = name.partition("_")
        param = getattr(layer, f"{'w2' if shard == 'w2' else 'w13'}_{kind}")
        for i, tensor in enumerate(tensors):
            named = {"shard_id": shard, "expert_id": i, "return_success": True}
            assert tensor is None or param.weight_loader(param, tensor, f"L.{kind}", **named)


class Quantized(Fp8MoeConfig):
    """A checkpoint's configuration, for layers outside of a model."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Fp8MoeLinearMethod:
        dense = OnlineLinearMethod if self.online else Fp8MoeLinearMethod
        return dense(self.spec, prefix, "warmup", self.model, self.engine_method)


@functools.cache  # creating one takes longer than everything else
def default_config() -> VllmConfig:
    return VllmConfig()


def make_mlp(
    intermediate: int, online: bool = False, prefix: str = "mlp", quant: QuantSpec | None = None, **options: object
) -> Mlp:
    """`gate_up_proj` and `down_proj` on the rank that the fixture `on_rank` has set; options are those of down_proj."""
    quantized = {"quant_config": Quantized(quant or (ONLINE if online else FP8)), "bias": False}
    sizes = [intermediate, intermediate]
    with set_current_vllm_config(default_config()):
        gate_up = linear.MergedColumnParallelLinear(HIDDEN, sizes, prefix=f"{prefix}.gate_up_proj", **quantized)
        options = quantized | options
        return Mlp(gate_up, linear.RowParallelLinear(intermediate, HIDDEN, prefix=f"{prefix}.down_proj", **options))


def load_mlp(mlp: Mlp, checkpoint: Checkpoint, expert: int = 0) -> Mlp:
    """Returns the weights of an expert, as those of an MLP."""
    gate_up, down = mlp
    for name, tensors in checkpoint.items():
        shard, _, kind = name.partition("_")
        param = getattr(down if shard == "w2" else gate_up, kind)
        if tensors[expert] is not None:
            param.weight_loader(param, tensors[expert], *{"w1": [0], "w3": [1], "w2": []}[shard])
    return mlp
