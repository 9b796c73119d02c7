"""Dense FP8 layers of a vLLM model, computed by our GEMM."""

import functools
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from fp8moe_plugin.checkpoint.placement import DensePart, Engine, Server, place_dense
from fp8moe_plugin.checkpoint.shapes import begins_within_block
from fp8moe_plugin.formats.spec import WEIGHT, QuantSpec
from fp8moe_plugin.formats.weight_format import Role, WeightFormat
from fp8moe_plugin.layers.blocks import unsupported_shape, whole_blocks
from fp8moe_plugin.layers.kernels import dense_format_refusal, prepare_dense_kernels
from fp8moe_plugin.layers.loading import check_size, rows_of_shard
from fp8moe_plugin.layers.parameters import empty_tensor, marked, role_of
from fp8moe_plugin.layers.vllm.deepseek_v4 import serve_batched_product
from fp8moe_plugin.layers.vllm.fallback import EngineMethod, architecture_of, refuse_to_load
from fp8moe_plugin.layers.vllm.loading import LayerLoading
from fp8moe_plugin.layers.vllm.model_state import ModelState
from fp8moe_plugin.ops import torch_ops

RANKS_OPTION = "--tensor-parallel-size"


@register_weight_loader_v2_supported_method
class Fp8MoeLinearMethod(LinearMethodBase):
    """Keeps the checkpoint's layout: `weight` e4m3 `[N, K]`, and float32 scales, one per block or per row."""

    online = False

    def __init__(
        self, spec: QuantSpec, prefix: str, warmup: str, model: ModelState, engine_method: EngineMethod
    ) -> None:
        self.ue8m0 = spec.ue8m0
        self.prefix = prefix
        self.warmup = warmup
        self.weights, self.scale, self.input_scales = spec.dense, spec.scale, spec.input_scales
        self.loading = LayerLoading(prefix, model, self.online)
        self.engine_method = engine_method

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        split = output_size != sum(output_partition_sizes)
        self.widths, self.inputs = list(getattr(layer, "output_sizes", [output_size])), input_size  # on all ranks
        own = input_size_per_partition, output_partition_sizes, extra_weight_attrs["weight_loader"]
        kind, model = dense_format_refusal(self.weights), self.loading.model
        option = None if kind else RANKS_OPTION
        blocks = whole_blocks(self.prefix, layer, layer.tp_rank, layer.tp_size, *own) if kind is None else own
        inputs, outputs, loader = blocks
        part = DensePart(inputs, outputs, input_size, split, loader is not own[2], kind)
        engine = Engine("vLLM", not self.online, architecture_of(model.engine))
        server, refusal = place_dense(part, self.weights, engine)
        if server is Server.ENGINE:
            given = input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype
            make = functools.partial(self.engine_layer, layer, *given, **extra_weight_attrs)
            method = model.fallback.take_dense(layer, self.prefix, refusal, option, make)
            model.leave_layer(self.prefix, "dense", f"it {refusal}", method)
            if begins_within_block(inputs, outputs, input_size, split, self.weights) and hasattr(layer, self.scale):
                why = f"{refusal}, and vLLM's own loader would copy the scales of other blocks"
                error = unsupported_shape(self.prefix, why, RANKS_OPTION)
                refuse_to_load(layer, getattr(layer, self.scale), error)
            return
        if server is Server.NONE:
            raise unsupported_shape(self.prefix, refusal, option)
        layer.logical_widths = outputs
        layer.input_size_per_partition = inputs
        layer.output_size_per_partition = sum(outputs)
        layer.orig_dtype = params_dtype
        layer.weight_block_size = self.weights.weight_block
        sizes = sum(outputs), inputs
        parameters = {
            WEIGHT: _parameter(self.weights, Role.WEIGHT, *sizes, self.weight_loader(loader)),
            self.scale: _parameter(self.weights, Role.SCALES, *sizes, loader),
        }
        self.loading.register(layer, parameters, self.check_tensor)
        if self.input_scales:  # not used, but vLLM's models load it
            unused = PerTensorScaleParameter(data=torch.ones(len(outputs)), weight_loader=own[2])
            layer.register_parameter("input_scale", unused)

    def engine_layer(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns vLLM's own method, which has created the weights of the layer; arguments as of `create_weights`."""
        method = self.engine_method(layer, self.prefix)
        method.create_weights(layer, *args, **kwargs)
        return method

    def weight_loader(self, loader: MethodType) -> MethodType:
        """Returns the loader for the weight, derived from vLLM's."""
        return loader

    @staticmethod
    def check_tensor(
        layer: Any, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: object = None
    ) -> tuple[str, torch.Tensor]:
        """Returns the tensor's projection, and the tensor for vLLM's loader, which refuses one that is too small.

        Raises:
            CheckpointError: the tensor is unusable.
        """
        method = layer.quant_method
        name = WEIGHT if role_of(param) is Role.WEIGHT else method.scale
        part = "" if loaded_shard_id is None else f" ({loaded_shard_id})"
        what = f"{layer.prefix}.{name}{part}"
        rows = rows_of_shard(layer, method.widths, loaded_shard_id)
        tensor = layer.fp8moe_loading.kept(what, param, loaded_weight, rows)
        check_size(what, param, tensor, rows, method.inputs, smaller=True)
        return f"{layer.prefix}{part}", tensor

    def process_weights_after_loading(self, layer: Any) -> None:
        self.loading.finish(layer)
        prepare_dense_kernels(layer, self.weights, self.ue8m0, self.warmup)
        if getattr(layer, "is_bmm", False):  # set after the layer is made
            serve_batched_product(self.prefix, layer.weight, layer.bmm_batch_size, self.warmup)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch_ops.linear(x, layer.weight, getattr(layer, self.scale), bias, self.ue8m0)


def _parameter(weights: WeightFormat, role: Role, n: int, k: int, load: MethodType) -> torch.nn.Parameter:
    """Returns the parameter of a weight `[n, k]` or of its scales, by whose class vLLM's loader splits tensors."""
    split: dict[str, Any] = {"data": empty_tensor(weights, role, n, k), "output_dim": 0, "weight_loader": load}
    if role is Role.WEIGHT:
        return marked(ModelWeightParameter(input_dim=1, **split), weights, role)
    if weights.weight_block is None:
        return marked(ChannelQuantScaleParameter(**split), weights, role)
    return marked(BlockQuantScaleParameter(input_dim=1, **split), weights, role)
