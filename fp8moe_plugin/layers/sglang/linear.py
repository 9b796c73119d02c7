"""Dense FP8 layers of an SGLang model, computed by our GEMM."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED
from sglang.srt.layers.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from fp8moe_plugin.checkpoint.placement import DensePart, Engine, Server, place_dense
from fp8moe_plugin.formats.spec import WEIGHT
from fp8moe_plugin.formats.weight_format import Role, WeightFormat
from fp8moe_plugin.layers.blocks import unsupported_shape, whole_blocks
from fp8moe_plugin.layers.kernels import dense_format_refusal, prepare_dense_kernels
from fp8moe_plugin.layers.loading import as_kept, check_size, per_row, rows_of_shard, shape_errors
from fp8moe_plugin.layers.parameters import empty_tensor, marked, role_of, unset
from fp8moe_plugin.layers.sglang import compat, online
from fp8moe_plugin.layers.sglang.loads import scale_parameter
from fp8moe_plugin.ops import torch_ops

RANKS_OPTION = "--tp-size"


class Fp8MoeLinearMethod(LinearMethodBase):
    """Keeps the checkpoint's layout: `weight` e4m3 `[N, K]`, and float32 scales, one per block or per row.

    Those of blocks are named `weight_scale_inv`; `Loads` renames those of compressed-tensors.
    """

    def __init__(self, quant_config: Any, prefix: str, warmup: str) -> None:
        self.quant_config = quant_config  # SGLang reads its block size, for MLA and shared experts
        self.prefix = prefix
        self.warmup = warmup
        self.scale = scale_parameter(quant_config.spec.dense)
        self.parameters = WEIGHT, self.scale

    # SGLang passes keyword arguments.
    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: MethodType,
        **rest: Any,
    ) -> None:
        split = output_size != sum(output_partition_sizes)
        widths = list(getattr(layer, "output_sizes", [output_size]))
        rank, ranks = compat.rank_of(layer)
        weights = self.quant_config.spec.dense
        kind = dense_format_refusal(weights)
        option = None if kind else RANKS_OPTION
        asked = input_size_per_partition, output_partition_sizes, weight_loader
        blocks = whole_blocks(self.prefix, layer, rank, ranks, *asked) if kind is None else asked
        inputs, outputs, loader = blocks
        part = DensePart(inputs, outputs, input_size, split, loader is not weight_loader, kind)
        server, refusal = place_dense(part, weights, Engine("SGLang", not self.quant_config.online))
        if server is Server.ENGINE:
            given = {
                "input_size_per_partition": input_size_per_partition,
                "output_partition_sizes": output_partition_sizes,
                "input_size": input_size,
                "output_size": output_size,
                "params_dtype": params_dtype,
                "weight_loader": weight_loader,
            }
            make = functools.partial(self.engine_layer, layer, **given, **rest)
            fallback = self.quant_config.loads.fallback
            method = fallback.take_dense(layer, self.prefix, refusal, option, make)
            fallback.note(self.prefix, "dense", f"it {refusal}", method)
            return
        if server is Server.NONE:
            raise unsupported_shape(self.prefix, refusal, option)
        layer.input_size_per_partition = inputs
        layer.output_size_per_partition = sum(outputs)
        load = _loader(self, input_size, widths, loader)
        load_weight = online.linear_loader(self.prefix, load) if self.quant_config.online else load
        for name, role, own in ((WEIGHT, Role.WEIGHT, load_weight), (self.scale, Role.SCALES, load)):
            parameter = _parameter(weights, role, sum(outputs), inputs, MethodType(own, layer))
            layer.register_parameter(name, parameter)
        getattr(layer, self.scale).format_ue8m0 = False  # for SGLang: the scales are not packed exponents
        if self.quant_config.spec.input_scales:  # not used, but SGLang's models load it
            unused = PerTensorScaleParameter(data=torch.ones(len(outputs)), weight_loader=weight_loader)
            layer.register_parameter("input_scale", unused)

    def engine_layer(self, layer: Any, **create: Any) -> Any:
        """Returns SGLang's own method, which has created the weights of the layer."""
        method = self.quant_config.engine_method(layer, self.prefix)
        method.create_weights(layer=layer, **create)
        return method

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the parameters and load the kernels, at startup and after each update of the weights.

        Raises:
            CheckpointError: a tensor is missing or holds NaN.
        """
        self.quant_config.loads.check_layer(self, layer)
        prepare_dense_kernels(layer, self.quant_config.spec.dense, self.quant_config.ue8m0, self.warmup)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        parameters = layer._parameters  # looked up by name in a module, each takes the host half a microsecond
        weight, scale = parameters["weight"], parameters[self.scale]
        return torch_ops.linear(x, weight, scale, bias, self.quant_config.ue8m0)


def _parameter(weights: WeightFormat, role: Role, n: int, k: int, load: MethodType) -> torch.nn.Parameter:
    """Returns the parameter of a weight `[n, k]` or of its scales, by whose class SGLang's loader splits tensors."""
    split: dict[str, Any] = {"data": unset(empty_tensor(weights, role, n, k)), "output_dim": 0, "weight_loader": load}
    if role is Role.WEIGHT:
        return marked(ModelWeightParameter(input_dim=1, **split), weights, role)
    if weights.weight_block is None:
        return marked(ChannelQuantScaleParameter(**split), weights, role)
    return marked(BlockQuantScaleParameter(input_dim=1, **split), weights, role)


WEIGHT_LOADER_V2_SUPPORTED.append(Fp8MoeLinearMethod.__name__)


def _loader(method: Fp8MoeLinearMethod, inputs: int, widths: list[int], load: MethodType) -> Callable[..., None]:
    """Returns a loader that checks the tensor, then calls SGLang's loader, which pads tensors that are too small.

    It raises `CheckpointError` for a tensor of another dtype or shape, and for scales that are not valid.

    Args:
        inputs: input channels on all ranks.
        widths: output channels of each fused projection on all ranks.
    """

    loads = method.quant_config.loads

    def check_and_load(
        layer: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None
    ) -> None:
        shard = () if loaded_shard_id is None else (loaded_shard_id,)
        projection = "".join(f" ({name})" for name in shard)
        what = f"{method.prefix}.{WEIGHT if role_of(param) is Role.WEIGHT else method.scale}{projection}"
        rows = rows_of_shard(layer, widths, loaded_shard_id)
        loaded_weight = per_row(param, loaded_weight, rows)
        loads.check_tensor(what, param, loaded_weight)
        loaded_weight = as_kept(param, loaded_weight)
        check_size(what, param, loaded_weight, rows, inputs)
        with shape_errors(method.prefix, loaded_weight):
            load(param, loaded_weight, *shard)
        loads.note(method, layer, f"{method.prefix}.weight{projection}", role_of(param))

    return check_and_load
