"""A dense linear layer in block FP8, for any engine."""

import torch

from fp8moe_plugin.checkpoint.shapes import N_MULTIPLE
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.scale_format import ScaleFormat
from fp8moe_plugin.layers.weights import check_fp8_weight, check_sizes, frozen, per_block_cast_to_fp8
from fp8moe_plugin.ops import torch_ops


class FP8Linear(ScaleFormat):
    """`x @ weight.T + bias`, where x is quantized per token and group of 128 channels.

    Attributes:
        weight: e4m3 `[N, K]`; N is a multiple of 8, K of 128.
        weight_scale: float32 `[ceil(N/128), K/128]`.
        bias: bfloat16 `[N]` or None.
        ue8m0: whether activation scales are rounded up to powers of two. Part of the state dict, see `ScaleFormat`.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, ue8m0: bool
    ) -> None:
        super().__init__()
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != torch.bfloat16):
            raise CheckpointError(
                f"bias is {bias.dtype} {list(bias.shape)}, but a weight of shape {list(weight.shape)} requires "
                f"torch.bfloat16 {[weight.shape[0]]}. Convert it, or check that both come from one layer."
            )
        self.weight = frozen(weight)
        self.weight_scale = frozen(weight_scale)
        self.bias = None if bias is None else frozen(bias)
        self.ue8m0 = ue8m0

    @classmethod
    def from_fp8(
        cls,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        ue8m0: bool = False,
    ) -> "FP8Linear":
        """Build the layer from a block-FP8 checkpoint's tensors; shapes as above.

        Raises:
            CheckpointError: scales are missing, not finite, or of the wrong shape; the weight's sizes are not
                supported; or the bias does not match.
        """
        check_sizes("weight", weight, 2, N_MULTIPLE)
        check_fp8_weight("weight", weight, weight_scale)
        assert weight_scale is not None
        return cls(weight, weight_scale, bias, ue8m0)

    @classmethod
    def from_bf16(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> "FP8Linear":
        """Build the layer from a weight `[N, K]`, quantizing it per 128x128 block.

        Args:
            weight: any float dtype of 16 bits or more.
        Raises:
            CheckpointError: the weight's sizes or dtype are not supported, it is not finite, or the bias does not
                match.
        """
        check_sizes("weight", weight, 2, N_MULTIPLE)
        return cls(*per_block_cast_to_fp8(weight), bias, ue8m0=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map bfloat16 `[.., K]` to bfloat16 `[.., N]`. Raises `InvalidInputError` for other dtypes and shapes."""
        return torch_ops.linear(x, self.weight, self.weight_scale, self.bias, self.ue8m0)
