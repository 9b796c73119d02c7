"""Mixture-of-experts layers of an SGLang model: creating and loading their parameters, and calling the op."""

import functools
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from sglang.srt.layers.moe import get_deepep_mode, get_moe_a2a_backend
from sglang.srt.layers.moe.fused_moe_triton import FusedMoeWeightScaleSupported
from sglang.srt.layers.moe.token_dispatcher import (
    DeepEPLLCombineInput,
    DeepEPNormalCombineInput,
    StandardCombineInput,
)
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils import is_cuda, set_weight_attrs

from fp8moe_plugin.checkpoint.shapes import local_intermediate
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.spec import SCALE, WEIGHT
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.blocks import announce_padding, padded_to_blocks
from fp8moe_plugin.layers.experts import Experts
from fp8moe_plugin.layers.loading import as_kept, check_expert_shape, per_row, shape_errors
from fp8moe_plugin.layers.pack import Share, pack, part_of_rank
from fp8moe_plugin.layers.parameters import expert_tensors, marked, role_of, unset
from fp8moe_plugin.layers.recode import block_fp8, targets
from fp8moe_plugin.layers.sglang import compat, online
from fp8moe_plugin.layers.sglang.loads import scale_parameter
from fp8moe_plugin.layers.sglang.refusals import activation, check_computation, check_experts
from fp8moe_plugin.plan.spec import Arrival, LayerSpec, MoeShape
from fp8moe_plugin.settings import batch_invariant

BLOCK, CHANNEL = FusedMoeWeightScaleSupported.BLOCK, FusedMoeWeightScaleSupported.CHANNEL
_lock = threading.Lock()  # SGLang's DeepSeek-V4 calls the loaders of tensors on the host on several threads


class Fp8MoeMethod(FusedMoEMethodBase):
    """Keeps the checkpoint's layout: contiguous parameters with one expert per index of dim 0, as EPLB needs them."""

    runner = None  # without a runner, SGLang passes top-k ids that are local to the rank, -1 for other experts

    def __init__(self, quant_config: Any, prefix: str, warmup: str) -> None:
        self.quant_config = quant_config
        self.prefix = prefix
        self.warmup = warmup
        self.scale = scale_parameter(quant_config.spec.weights)
        self.parameters = tuple(f"{name}_{suffix}" for name in ("w13", "w2") for suffix in (WEIGHT, self.scale))

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: MethodType,
        with_bias: bool = False,
        **_: Any,
    ) -> None:
        ranks = layer.moe_tp_size
        intermediate = intermediate_size_per_partition * ranks
        check_experts(self.prefix, num_experts, hidden_size, intermediate, ranks)
        if with_bias or weight_loader != layer.weight_loader:
            raise UnsupportedError(
                f"{self.prefix}: the model's experts have a bias or are stored in one tensor for all, but the kernels "
                "need one for each projection of each expert, without bias. Use --quantization fp8."
            )
        local = local_intermediate(intermediate, ranks)
        if local * ranks != intermediate:
            announce_padding("expert", intermediate, ranks, "--ep-size")
        load = _loader(self, hidden_size, intermediate)
        load_weight = online.experts_loader(self.prefix, load) if self.quant_config.online else load
        quant = self.quant_config.expert_spec
        for name, tensor in expert_tensors(quant.weights, num_experts, hidden_size, local, self.scale).items():
            role = role_of(tensor)
            attrs = {"weight_loader": MethodType(load_weight if role is Role.WEIGHT else load, layer)}
            if role is Role.SCALES:
                attrs["quant_method"] = (BLOCK if quant.weights.weight_block else CHANNEL).value
            parameter = torch.nn.Parameter(unset(tensor), requires_grad=False)
            set_weight_attrs(parameter, attrs)
            layer.register_parameter(name, marked(parameter, quant.weights, role, quant.recoded_from))
        for name in ("w13_input_scale", "w2_input_scale") if quant.input_scales else ():
            unused = torch.nn.Parameter(torch.ones(num_experts), requires_grad=False)
            set_weight_attrs(unused, {"weight_loader": weight_loader})  # not used, but SGLang's models load it
            layer.register_parameter(name, unused)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        check_computation(self.prefix, moe_runner_config)
        moe_runner_config.inplace = False  # `apply` does not change its input, which the model may use afterwards
        self.config = moe_runner_config

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the parameters and load the kernels, at startup and after each update of the weights.

        Raises:
            CheckpointError: a tensor is missing or holds NaN.
        """
        self.quant_config.loads.check_layer(self, layer)
        arrivals = [Arrival.STANDARD]
        if get_moe_a2a_backend().is_deepep():
            compat.choose_rows(layer.dispatcher)
            mode = get_deepep_mode()
            arrivals = [Arrival.STANDARD] * mode.enable_normal() + [Arrival.BATCHED] * mode.enable_low_latency()
        spec, tensors = self.spec(layer), (layer._parameters, self.parameters)
        self.dispatched_experts = Experts(spec, *tensors)
        self.experts = Experts(spec._replace(routed_scale=self.routed_scaling_factor(layer)), *tensors)
        self.experts.prepare(self.prefix, arrivals, self.warmup)

    def spec(self, layer: Any) -> LayerSpec:
        """Returns the spec of a layer's experts on this rank, without the model's `routed_scaling_factor`."""
        quant = self.quant_config.expert_spec
        _, hidden, _ = quant.weights.weight.channels(layer.w2_weight.shape)
        shape = MoeShape.of_w13(quant.weights, layer.w13_weight.shape, hidden, layer.top_k or 1)
        return LayerSpec(
            shape,
            quant.weights,
            quant.ue8m0,
            self.activation,
            bias=quant.gpt_oss,
            batch_invariant=batch_invariant(),
        )

    @property
    def activation(self) -> Activation:
        return activation(self.config)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Run this rank's experts on the output of SGLang's dispatcher; T, the number of rows, may be 0.

        - Standard: bfloat16 `[T, H]`.
        - DeepEP normal: bfloat16 `[T, H]`; the model applies `routed_scaling_factor`.
        - DeepEP low latency: e4m3 `[E, max_m, H]` and scales. DeepEP's combine computes the weighted sums.
        """
        kind = dispatch_output.format
        if kind.is_deepep_ll():
            x, scale, topk_ids, topk_weights, counts, expected_m = dispatch_output
            rows = self.dispatched_experts.run_batched(x, scale, counts, expected_m)
            return DeepEPLLCombineInput(rows, topk_ids, topk_weights)
        if kind.is_deepep_normal():
            x, _, topk_ids, topk_weights, _ = dispatch_output
            sums = self.dispatched_experts.run(x, topk_weights, topk_ids)
            return DeepEPNormalCombineInput(sums, topk_ids, topk_weights)
        topk_weights, topk_ids, _ = dispatch_output.topk_output
        return StandardCombineInput(self.experts.run(dispatch_output.hidden_states, topk_weights, topk_ids))

    def routed_scaling_factor(self, layer: Any) -> float:
        """Returns the factor of the router's weights for standard dispatch.

        On a GPU this is the model's `routed_scaling_factor`, unless the top-k applies it. On a CPU, SGLang's models
        apply it.
        """
        factor = self.config.routed_scaling_factor
        if factor is None or not is_cuda() or layer.should_fuse_routed_scaling_factor_in_topk:
            return 1.0
        return float(factor)


def _loader(method: Fp8MoeMethod, hidden: int, intermediate: int) -> Callable[..., None]:
    """Returns a loader for w1, w2 and w3 of an expert. It checks and pads the tensor, then calls SGLang's loader.

    Of a projection in MXFP4, the second tensor to arrive brings both in block FP8, or packs them.

    It raises `CheckpointError` for a tensor of another dtype or shape, and for scales that are not valid.
    """

    loads, quant = method.quant_config.loads, method.quant_config.expert_spec

    def check_and_load(
        layer: Any,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        projection = f" ({shard_id} of expert {expert_id})"
        what = f"{weight_name}{projection}"
        loaded_weight = per_row(param, loaded_weight, hidden if shard_id == "w2" else intermediate)
        loads.check_tensor(what, param, loaded_weight)
        loaded_weight = as_kept(param, loaded_weight)
        check_expert_shape(what, param, loaded_weight, shard_id, hidden, intermediate)
        share = Share(intermediate, layer.moe_tp_size, layer.moe_tp_rank)
        if not quant.recoded_from:
            pad_and_load(layer, what, param, loaded_weight, weight_name, shard_id, expert_id)
        elif (slots := compat.local_slots(layer, expert_id)) and (
            both := _add_half(method, f"{method.prefix}{projection}", param, loaded_weight, shard_id, share)
        ):
            own = targets(layer, shard_id, weight_name, SCALE)
            if quant.weights is PACKED_MXFP4:
                (weight, _), (scales, _) = own
                states = {"running": loads.serving, "balanced": get_server_args().enable_eplb}
                pack(f"{method.prefix}{projection}", (weight, scales), slots, shard_id, both, **states)
            else:
                for (parameter, name), tensor in zip(own, block_fp8(what, *both), strict=True):
                    pad_and_load(layer, what, parameter, tensor, name, shard_id, expert_id)
        loads.note(method, layer, f"{method.prefix}{projection}", role_of(param))

    def pad_and_load(
        layer: Any, what: str, param: torch.Tensor, tensor: torch.Tensor, name: str, shard_id: str, expert_id: int
    ) -> None:
        rank, ranks = layer.moe_tp_rank, layer.moe_tp_size
        if local_intermediate(intermediate, ranks) * ranks != intermediate:
            dim = -1 if shard_id == "w2" else -2
            tensor = padded_to_blocks(what, param, tensor, dim, intermediate, ranks, rank)
        with shape_errors(method.prefix, tensor):
            layer.weight_loader(param, tensor, name, shard_id, expert_id)

    return _one_at_a_time(check_and_load) if quant.recoded_from else check_and_load


def _one_at_a_time(load: Callable[..., None]) -> Callable[..., None]:
    """Returns a loader that runs on one thread at a time, because the tensors that wait are shared."""

    @functools.wraps(load)
    def load_alone(*args: Any, **kwargs: Any) -> None:
        with _lock:
            load(*args, **kwargs)

    return load_alone


def _add_half(
    method: Fp8MoeMethod, projection: str, param: torch.Tensor, half: torch.Tensor, shard_id: str, share: Share
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns codes and exponents of a projection once both have arrived: this rank's part if it packs them, else all.

    Args:
        param: that of the codes or of the exponents.
    """
    role = role_of(param)
    if method.quant_config.expert_spec.weights is PACKED_MXFP4:
        half = part_of_rank(role, half, shard_id == "w2", share)
    both: tuple[torch.Tensor, torch.Tensor] | None
    both = method.quant_config.loads.halves.add(projection, role, half, param.device)
    return both
