"""Mixture-of-experts layers of a vLLM model. They create and load parameters, and run the modular kernel."""

import dataclasses
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular
from vllm.model_executor.utils import set_weight_attrs

from fp8moe_plugin.checkpoint.shapes import local_intermediate
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import Role, WeightFormat
from fp8moe_plugin.layers.blocks import announce_padding, padded_to_blocks
from fp8moe_plugin.layers.experts import Experts
from fp8moe_plugin.layers.loading import check_expert_shape
from fp8moe_plugin.layers.pack import Share
from fp8moe_plugin.layers.parameters import expert_tensors, format_of, is_bias, marked, role_of
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.biases import bias_parameters, check_bias, load_bias
from fp8moe_plugin.layers.vllm.experts import experts_class, layer_spec
from fp8moe_plugin.layers.vllm.gather import QuantizedGather, quantized_gather
from fp8moe_plugin.layers.vllm.input_scales import input_scale
from fp8moe_plugin.layers.vllm.loading import Arriving, LayerLoading, check_experts_not_moved
from fp8moe_plugin.layers.vllm.model_state import ModelState
from fp8moe_plugin.layers.vllm.push import PushedExperts, pushed_experts
from fp8moe_plugin.layers.vllm.refusals import check_layer
from fp8moe_plugin.layers.vllm.router import FusedRouter, fused_router
from fp8moe_plugin.layers.vllm.shared_expert import Mlp, SharedExpert
from fp8moe_plugin.plan.spec import Arrival


class Fp8MoeMethod(FusedMoEMethodBase):
    """Keeps the checkpoint's layout: contiguous parameters with one expert per index of dim 0, as EPLB needs them."""

    online = False

    def __init__(
        self,
        moe: Any,
        spec: QuantSpec,
        prefix: str,
        warmup: str,
        model: ModelState,
        shared: Mlp | None = None,
    ) -> None:
        super().__init__(moe)
        self.prefix = prefix
        self.warmup = warmup
        self.weights, self.stored, self.scale = spec.weights, spec.recoded_from, spec.scale
        self.input_scales = spec.input_scales
        self.loading = LayerLoading(prefix, model, self.online)
        self.loading.arriving = self.arriving(moe)
        batched = moe.moe_parallel_config.use_batched_activation_format
        self.arrival = Arrival.BATCHED if batched else Arrival.STANDARD
        self.arrivals = [self.arrival]  # of all steps
        self.spec = layer_spec(moe, spec)
        self.experts_cls = experts_class(self.arrival, self.spec)
        self.tokens_stay = False  # on this rank
        self.local_experts: Experts | None = None  # called directly: the modular kernel costs the host more, and copies
        self.pushed: PushedExperts | None = None  # with an all-to-all of their own
        self.router: FusedRouter | None = None  # replaces vLLM's router
        self.shared_mlp = shared
        self.shared_expert: SharedExpert | None = None  # computed with the experts
        check_layer(prefix, moe, self.spec, self.experts_cls, spec.stores_blocks)

    @property
    def supports_eplb(self) -> bool:
        return True

    @property
    def is_monolithic(self) -> bool:  # vLLM then calls apply_monolithic with the router's logits, instead of apply
        return self.router is not None

    @staticmethod
    def arriving(moe: Any) -> Arriving:
        return Arriving(moe.hidden_dim, moe.intermediate_size, Share(moe.intermediate_size, moe.tp_size, moe.tp_rank))

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Return the unchanged hidden size, and this rank's intermediate channels rounded up to whole scale blocks.

        vLLM uses these sizes for everything that follows.

        Raises:
            UnsupportedError: vLLM's dispatch does not support this hidden size.
        """
        sizes = hidden_size, intermediate_size_per_partition
        wanted = super().maybe_roundup_sizes(*sizes, act_dtype, moe_parallel_config)
        if tuple(wanted) != sizes:
            raise UnsupportedError(
                f"{self.prefix}: {moe_parallel_config.all2all_backend} does not support hidden size {hidden_size}, "
                "and fp8moe cannot pad it. Choose another --all2all-backend."
            )
        return hidden_size, local_intermediate(self.moe.intermediate_size, self.moe.tp_size)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        layer.num_experts = num_experts
        layer.orig_dtype = params_dtype
        layer.weight_block_size = self.weights.weight_block
        for name in ("w13_input_scale", "w2_input_scale"):
            layer.register_parameter(name, input_scale(layer, num_experts) if self.input_scales else None)
        if intermediate_size_per_partition * self.moe.tp_size != self.moe.intermediate_size:
            announce_padding("expert", self.moe.intermediate_size, self.moe.tp_size, "--enable-expert-parallel")
            extra_weight_attrs["weight_loader"] = MethodType(load_experts, layer)
        loader = extra_weight_attrs["weight_loader"]
        attrs = {role: {**extra_weight_attrs, "weight_loader": self.weight_loader(role, loader)} for role in Role}
        kind = FusedMoeWeightScaleSupported.BLOCK if self.weights.weight_block else FusedMoeWeightScaleSupported.CHANNEL
        attrs[Role.SCALES]["quant_method"] = kind.value
        sizes = hidden_size, intermediate_size_per_partition
        mlp = self.shared_mlp
        shared = mlp if mlp and mlp.fits(self.moe, self.spec, num_experts, *sizes) else None
        tensors = expert_tensors(self.weights, num_experts + (shared is not None), *sizes, self.scale)
        parameters = {
            name: _parameter(tensor, num_experts, attrs[role_of(tensor)], self.stored)
            for name, tensor in tensors.items()
        }
        if self.spec.bias:
            parameters |= bias_parameters(layer, self.load_bias, num_experts, *sizes)
        self.loading.register(layer, parameters, self.check_tensor)
        if shared:
            self.shared_expert = SharedExpert(shared, list(tensors.values()))
        self.shared_mlp = None

    def weight_loader(self, role: Role, loader: MethodType) -> MethodType:
        """Returns the loader for the weights or for the scales, derived from vLLM's."""
        return loader

    load_bias: Callable[..., bool | None] = staticmethod(load_bias)

    @staticmethod
    def check_tensor(
        layer: Any,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> tuple[str | None, torch.Tensor] | None:
        """Returns the tensor's projection, or None for a bias, and the tensor for vLLM's loader; None on other ranks.

        Raises:
            CheckpointError: the tensor is unusable.
        """
        if is_bias(param):
            return check_bias(layer, param, loaded_weight, weight_name, shard_id, expert_id)
        if compat.local_expert(layer, expert_id) is None:
            return None
        loading, part = layer.fp8moe_loading, f"({shard_id} of expert {expert_id})"
        what, (hidden, intermediate, _) = f"{weight_name} {part}", loading.arriving
        rows = hidden if shard_id == "w2" else intermediate
        tensor = loading.kept(what, param, loaded_weight, rows)
        check_expert_shape(what, param, tensor, shard_id, hidden, intermediate)
        return f"{loading.prefix} {part}", tensor

    def process_weights_after_loading(self, layer: Any) -> None:
        self.loading.finish(layer)
        if self.moe_kernel is None:  # after a reload, the kernel still has the original parameters
            self._set_up(layer)

    def _set_up(self, layer: Any) -> None:
        if self.moe.moe_parallel_config.enable_eplb:
            self.loading.check_reloadable = functools.partial(
                check_experts_not_moved, self.prefix, compat.eplb_state(layer), layer.global_num_experts
            )
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        kernel = self._make_kernel(layer)
        experts = Experts(self.spec, layer._parameters, self.loading.parameters)
        self.pushed = pushed_experts(layer, self.moe, experts, self.loading.model.engine)
        experts.prepare(self.prefix, [*self.arrivals, *[Arrival.PUSHED] * bool(self.pushed)], self.warmup)
        self.moe_kernel = kernel
        router = fused_router(layer, experts) if self.tokens_stay else None
        merged = self.shared_expert and self.shared_expert.merge(layer, self.spec, router is not None)
        if not merged:
            self.shared_expert = None
        self.local_experts = merged or (experts if self.tokens_stay else None)
        self.router = router and dataclasses.replace(router, experts=merged or experts)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return fp8_w8a8_moe_quant_config(
            w1_scale=getattr(layer, f"w13_{self.scale}"),
            w2_scale=getattr(layer, f"w2_{self.scale}"),
            **({"w1_bias": layer.w13_bias, "w2_bias": layer.w2_bias} if self.spec.bias else {}),
            block_shape=[GROUP, GROUP],  # by which vLLM's dispatch quantizes tokens
        )

    def _make_kernel(self, layer: Any) -> mk.FusedMoEKernel:
        dispatch = compat.make_prepare_finalize(self.moe, self.moe_quant_config, layer._expert_routing_tables())
        dispatch = quantized_gather(dispatch, self.spec.ue8m0)
        capacity = {}
        if self.arrival is Arrival.BATCHED:
            capacity = {
                "max_num_tokens": dispatch.max_num_tokens_per_rank(),
                "num_dispatchers": dispatch.num_dispatchers(),
            }
        experts = self.experts_cls(moe_config=self.moe, quant_config=self.moe_quant_config, **capacity)
        self.tokens_stay = isinstance(dispatch, MoEPrepareAndFinalizeNoDPEPModular)
        self.arrivals = [self.arrival, *[Arrival.QUANTIZED] * isinstance(dispatch, QuantizedGather)]
        return mk.FusedMoEKernel(dispatch, experts)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self.moe_kernel is not None
        self.loading.model.check_usable()
        if self.local_experts and not layer.apply_router_weight_on_input:
            return self.local_experts.run(x, topk_weights, topk_ids, layer.expert_map)
        if self.pushed and self.pushed.fits(len(x)):
            return self.pushed.run(x, topk_weights, topk_ids, layer.expert_map)
        return self.moe_kernel.apply(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )

    def apply_monolithic(self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, **rest: Any) -> torch.Tensor:
        assert self.router is not None
        self.loading.model.check_usable()
        return self.router.run(x, router_logits, self.topk_indices_dtype, **rest)


def load_experts(
    layer: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Load a tensor of experts whose scale blocks ranks cannot share equally: pad it, then call vLLM's `weight_loader`.

    Args:
        loaded_weight: weights or scales of all channels of w1, w2 or w3.
    Raises:
        CheckpointError: see `padded_to_blocks`.
    """
    moe, dim = layer.moe_config, -1 if shard_id == "w2" else -2
    what = f"{weight_name} ({shard_id} of expert {expert_id})"
    padded = padded_to_blocks(what, param, loaded_weight, dim, moe.intermediate_size, moe.tp_size, moe.tp_rank)
    return layer.weight_loader(param, padded, weight_name, shard_id, expert_id, return_success=return_success)


load_experts.supports_moe_loading = True  # type: ignore[attr-defined]  # some of vLLM's models check for it


def _parameter(
    tensor: torch.Tensor, experts: int, attrs: dict[str, Any], stored: WeightFormat | None
) -> torch.nn.Parameter:
    """Returns a parameter with the first `experts` experts of a tensor."""
    parameter = torch.nn.Parameter(tensor[:experts], requires_grad=False)
    set_weight_attrs(parameter, attrs)
    return marked(parameter, format_of(tensor), role_of(tensor), stored)
