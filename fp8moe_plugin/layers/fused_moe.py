"""The experts of a mixture-of-experts layer in block FP8, for any engine. Routing is left to the engine."""

import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.layers.scale_format import ScaleFormat
from fp8moe_plugin.layers.weights import check_fp8_weight, check_sizes, frozen, per_block_cast_to_fp8
from fp8moe_plugin.ops import torch_ops
from fp8moe_plugin.plan.options import layer_options

OPTIONS = {ue8m0: layer_options(ue8m0=ue8m0).text for ue8m0 in (False, True)}


class FP8MoE(ScaleFormat):
    """For each token, the weighted sum over its experts e of `w2[e] @ (silu(gate) * up)`, `gate, up = w13[e] @ token`.

    Attributes:
        w13: e4m3 `[E, 2I, H]`, the gate rows, then the up rows; H and I are multiples of 128.
        w13_scale: float32 `[E, 2I/128, H/128]`.
        w2: e4m3 `[E, H, I]`.
        w2_scale: float32 `[E, H/128, I/128]`.
        ue8m0: whether activation scales are rounded up to powers of two. Part of the state dict, see `ScaleFormat`.
    """

    def __init__(
        self, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor, ue8m0: bool
    ) -> None:
        super().__init__()
        self.w13, self.w13_scale = frozen(w13), frozen(w13_scale)
        self.w2, self.w2_scale = frozen(w2), frozen(w2_scale)
        self.ue8m0 = ue8m0

    @classmethod
    def from_fp8(
        cls,
        w13: torch.Tensor,
        w13_scale: torch.Tensor | None,
        w2: torch.Tensor,
        w2_scale: torch.Tensor | None,
        ue8m0: bool = False,
    ) -> "FP8MoE":
        """Build the layer from a block-FP8 checkpoint's tensors, stacked over the experts; shapes as above.

        Raises:
            CheckpointError: scales are missing, not finite, or of the wrong shape; w13 and w2 do not match; or their
                sizes are not supported.
        """
        _check_pair(w13, w2)
        check_fp8_weight("w13", w13, w13_scale)
        check_fp8_weight("w2", w2, w2_scale)
        assert w13_scale is not None
        assert w2_scale is not None
        return cls(w13, w13_scale, w2, w2_scale, ue8m0)

    @classmethod
    def from_bf16(cls, w13: torch.Tensor, w2: torch.Tensor) -> "FP8MoE":
        """Build the layer from `[E, 2I, H]` and `[E, H, I]`, quantizing them per 128x128 block.

        Args:
            w13, w2: any float dtype of 16 bits or more.
        Raises:
            CheckpointError: w13 and w2 do not match, their sizes or dtypes are not supported, or they are not finite.
        """
        _check_pair(w13, w2)
        return cls(*per_block_cast_to_fp8(w13), *per_block_cast_to_fp8(w2), ue8m0=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the experts; returns bfloat16 `[T, H]`.

        Args:
            hidden_states: bfloat16 `[T, H]`.
            topk_weights: float32 `[T, k]`.
            topk_ids: int32 or int64 `[T, k]`; entries of -1 contribute nothing.
            expert_map: int32 `[global experts]`, the local index of each expert or -1; None if `topk_ids` are local.
        Raises:
            InvalidInputError: wrong dtype, shape, stride or device.
        """
        out = torch.empty_like(hidden_states, dtype=torch.bfloat16)
        weights = (self.w13, self.w13_scale, self.w2, self.w2_scale, None, None)
        torch_ops.fused_moe(OPTIONS[self.ue8m0], hidden_states, None, *weights, topk_weights, topk_ids, expert_map, out)
        return out


def _check_pair(w13: torch.Tensor, w2: torch.Tensor) -> None:
    check_sizes("w2", w2, 3, GROUP)
    experts, hidden, intermediate = w2.shape
    if tuple(w13.shape) != (experts, 2 * intermediate, hidden):
        raise CheckpointError(
            f"w13 has shape {list(w13.shape)}, but w2 of shape {list(w2.shape)} requires "
            f"{[experts, 2 * intermediate, hidden]}: gate rows, then up rows. Check that both come from one layer."
        )
