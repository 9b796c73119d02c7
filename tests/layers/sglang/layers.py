"""Layers of SGLang with our methods, on one of several ranks, outside of a model and of an engine."""

from types import SimpleNamespace

import torch
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe_layer
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.spec import SCALE, QuantSpec
from fp8moe_plugin.layers.sglang.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.sglang.loads import Loads
from fp8moe_plugin.layers.sglang.moe import Fp8MoeMethod
from tests.layers.experts import EXPERTS, HIDDEN, Checkpoint, make_mxfp4


class Quant(SimpleNamespace):
    @property
    def expert_spec(self) -> QuantSpec:
        return self.spec


QUANT = Quant(
    spec=QuantSpec(FP8_BLOCK),
    ue8m0=False,
    online=False,
    loads=Loads(SCALE),
    weight_block_size=[GROUP, GROUP],
    get_name=lambda: "fp8moe",
)
KINDS = ("weight", "weight_scale_inv")
PARAMETERS = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")


class Layer(fused_moe_layer.FusedMoE):
    """A layer of experts on one rank, with the loaders of SGLang's."""

    layer_id = 0
    top_k = None  # some models do not pass it
    quant_config = QUANT
    uses_expert_location = use_presharded_weights = use_triton_kernels = use_flashinfer_trtllm_moe = False
    should_fuse_routed_scaling_factor_in_topk = _has_fused_shared = False
    moe_ep_rank = _expert_storage_rank = 0
    num_local_experts = _num_local_routed = _num_global_routed = num_experts = EXPERTS

    def __init__(
        self, intermediate: int, ranks: int, rank: int, experts: int = EXPERTS, bias: bool = False, **runner: object
    ) -> None:
        torch.nn.Module.__init__(self)
        self.moe_tp_size, self.moe_tp_rank = ranks, rank
        self.moe_runner_config = MoeRunnerConfig(routed_scaling_factor=2.5, **runner)
        self.quant_method = Fp8MoeMethod(QUANT, "L", "warmup")
        self.quant_method.create_weights(
            layer=self,
            num_experts=experts,
            hidden_size=HIDDEN,
            intermediate_size_per_partition=intermediate // ranks,
            params_dtype=torch.bfloat16,
            weight_loader=self.weight_loader,
            with_bias=bias,
            moe_intermediate_size=intermediate,
        )
        self.quant_method.create_moe_runner(self, self.moe_runner_config)

    def load(self, checkpoint: Checkpoint) -> "Layer":
        for name, tensors in checkpoint.items():
            shard, _, kind = name.partition("_")
            param = getattr(self, f"{'w2' if shard == 'w2' else 'w13'}_{kind}")
            for i, tensor in enumerate(tensors):
                if tensor is not None:
                    param.weight_loader(param, tensor, f"L.{kind}", shard_id=shard, expert_id=i)
        return self

    def finish(self) -> None:
        self.quant_method.process_weights_after_loading(self)

    def parts(self) -> dict[str, torch.Tensor]:
        """Like a checkpoint, of this rank's channels."""
        found = {}
        for kind in self.quant_method.parameters[:2]:
            kind = kind.removeprefix("w13_")
            found[f"w1_{kind}"], found[f"w3_{kind}"] = getattr(self, f"w13_{kind}").data.chunk(2, 1)
            found[f"w2_{kind}"] = getattr(self, f"w2_{kind}").data
        return found


def in_mxfp4(intermediate: int) -> Checkpoint:
    """Returns experts in MXFP4, by SGLang's names of scales."""
    return {name.replace("_scale", "_scale_inv"): tensors for name, tensors in make_mxfp4(intermediate).items()}


def assert_assembled(parts: list[dict[str, torch.Tensor]], checkpoint: dict[str, torch.Tensor], dims: int) -> None:
    """The ranks' parts are the checkpoint's bit by bit, and zeros after it."""
    for name, whole in checkpoint.items():
        dim = dims - 1 if name.startswith("w2") else dims - 2
        assembled, size = torch.cat([part[name] for part in parts], dim), whole.shape[dim]
        assert torch.equal(assembled.narrow(dim, 0, size).float(), whole.float())
        assert not assembled.narrow(dim, size, assembled.shape[dim] - size).float().any()


def called(layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    layer.finish()
    topk = StandardTopKOutput(weights, ids, torch.empty(0))
    return layer.quant_method.apply(layer, StandardDispatchOutput(x, None, topk)).hidden_states


class Quantized(SimpleNamespace):
    """A checkpoint's configuration, for layers outside of a model."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Fp8MoeLinearMethod:
        return Fp8MoeLinearMethod(QUANT, prefix, "warmup")


def load_mlp(mlp: tuple[torch.nn.Module, torch.nn.Module], checkpoint: Checkpoint) -> None:
    """Expert 0 of a checkpoint, as the MLP."""
    gate_up, down = mlp
    for name, tensors in checkpoint.items():
        shard, _, kind = name.partition("_")
        param = getattr(down if shard == "w2" else gate_up, kind)
        if tensors[0] is not None:
            param.weight_loader(param, tensors[0], *{"w1": [0], "w3": [1], "w2": []}[shard])
