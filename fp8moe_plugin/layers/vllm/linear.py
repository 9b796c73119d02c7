"""Dense block-FP8 layers of a vLLM model on our GEMM."""

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
)
from vllm.model_executor.parameter import BlockQuantScaleParameter

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.layers.kernels import prepare_kernels
from fp8moe_plugin.layers.vllm.loading import check_loaded, poison
from fp8moe_plugin.ops import torch_ops
from fp8moe_plugin.plan import linear_kernels
from fp8moe_plugin.shapes import GROUP, dense_refusal


@register_weight_loader_v2_supported_method
class Fp8MoeLinearMethod(LinearMethodBase):
    """The weights stay as the checkpoint has them: `weight` e4m3 `[N, K]`, `weight_scale_inv` float32 per block."""

    def __init__(self, ue8m0: bool, prefix: str, warmup: str) -> None:
        self.ue8m0 = ue8m0
        self.prefix = prefix
        self.warmup = warmup

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
        check_shape(self.prefix, input_size_per_partition, output_partition_sizes, split)
        block, loader = [GROUP, GROUP], extra_weight_attrs["weight_loader"]
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        layer.orig_dtype = params_dtype
        layer.weight_block_size = block
        weight = create_fp8_weight_parameter(sum(output_partition_sizes), input_size_per_partition, loader)
        scale = create_fp8_scale_parameter(
            BlockQuantScaleParameter, output_partition_sizes, input_size_per_partition, block, loader
        )
        for name, parameter in (("weight", weight), ("weight_scale_inv", scale)):
            poison(parameter)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        check_loaded(self.prefix, "weight", layer.weight)
        check_loaded(self.prefix, "weight_scale_inv", layer.weight_scale_inv)
        prepare_kernels(linear_kernels(self.ue8m0), layer.weight, self.warmup)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch_ops.linear(x, layer.weight, layer.weight_scale_inv, bias, self.ue8m0)


def check_shape(prefix: str, inputs: int, outputs: list[int], split: bool) -> None:
    """Raise `UnsupportedError` for a rank's part of a layer, described as for `dense_refusal`, that is not served."""
    refusal = dense_refusal(inputs, outputs, split)
    if refusal:
        raise UnsupportedError(
            f"{prefix} {refusal}. Use a smaller --tensor-parallel-size, or list the layer in the checkpoint's "
            "modules_to_not_convert and store it in BF16."
        )
