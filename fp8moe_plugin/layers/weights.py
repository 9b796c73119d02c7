"""Quantization of weights to block FP8, and checks of a checkpoint's block-FP8 weights."""

import math

import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.reference import FP8_MAX, group_scales

LARGEST_SCALE = torch.finfo(torch.float32).max / FP8_MAX  # with larger ones, dequantized weights may overflow


def per_block_cast_to_fp8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each 128x128 block of a weight with a scale of its own, its largest magnitude / 448.

    Args:
        w: any float dtype of 16 bits or more, `[.., N, K]`; blocks at the right and bottom edges may be smaller.
    Returns:
        q, e4m3 `[.., N, K]`, and float32 scales `[.., ceil(N/128), ceil(K/128)]`, such that `w` is about `q * scale`.
    Raises:
        CheckpointError: `w` has another dtype, or holds NaN or infinity.
    """
    if not w.is_floating_point() or w.element_size() < 2:  # codes without their scales are another weight
        raise CheckpointError(
            f"The weight to quantize has dtype {w.dtype}, but must be float in 16 bits or more. If it is quantized "
            "already, pass it with its scales to from_fp8."
        )
    n, k = w.shape[-2:]
    padded = torch.nn.functional.pad(w.float(), (0, -k % GROUP, 0, -n % GROUP))
    blocks = padded.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    scales = group_scales(blocks.abs().amax((-3, -1)), ue8m0=False)
    if not scales.isfinite().all():
        raise CheckpointError(
            "The weight to quantize holds NaN or infinity: it is damaged or incomplete. Download it again."
        )
    q = (blocks / scales[..., :, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return q.flatten(-2).flatten(-3, -2)[..., :n, :k].contiguous(), scales


def per_row_cast_to_fp8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row of a finite weight `[.., N, K]` with a scale of its own.

    Returns:
        q, e4m3 `[.., N, K]`, and float32 scales `[.., N, 1]`.
    """
    scales = group_scales(w.abs().amax(-1, keepdim=True), ue8m0=False)
    return (w / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def check_sizes(name: str, weight: torch.Tensor, dims: int, n_multiple: int) -> None:
    """Raise `CheckpointError` unless `weight` has `dims` dimensions `[.., N, K]` of sizes that the kernels support."""
    if weight.dim() != dims:
        raise CheckpointError(
            f"{name} has shape {list(weight.shape)}, but must have {dims} dimensions. Check the layer's layout."
        )
    n, k = weight.shape[-2:]
    if 0 in weight.shape or n % n_multiple or k % GROUP:
        raise CheckpointError(
            f"{name} has shape {list(weight.shape)}, but the kernels need N > 0 to be a multiple of {n_multiple} and "
            f"K > 0 a multiple of {GROUP}. Pad the weight with zeros, or keep the layer unquantized."
        )


def check_fp8_weight(name: str, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Raise `CheckpointError` unless this is an e4m3 `[.., N, K]` with a valid float32 scale per 128x128 block."""
    if weight.dtype != FP8:
        raise CheckpointError(
            f"{name} has dtype {weight.dtype}, but block-FP8 weights are {FP8}. "
            "To quantize it, build the layer with from_bf16."
        )
    if scale is None:
        raise CheckpointError(
            f"{name} has no scales, which an FP8 weight needs. Pass the checkpoint's weight_scale_inv."
        )
    n, k = weight.shape[-2:]
    wanted = (*weight.shape[:-2], *FP8_BLOCK.scales.shape(n, k))
    if tuple(scale.shape) != wanted:
        raise CheckpointError(
            f"{name}'s scales have shape {list(scale.shape)}, but one per 128x128 block of {list(weight.shape)} makes "
            f"{list(wanted)}. Check that weight and scales come from the same layer, and check the block size."
        )
    if scale.dtype != torch.float32:
        raise CheckpointError(f"{name}'s scales have dtype {scale.dtype}, but must be float32. Convert them.")
    check_scale_values(f"{name}'s scales", scale)


def check_scale_values(what: str, scales: torch.Tensor) -> None:
    """Raise `CheckpointError` for scales that are not finite, negative or too large.

    Args:
        what: a plural noun for the scales, for the message.
    """
    low, high = (value.item() for value in scales.float().aminmax()) if scales.numel() else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(
            f"{what} hold NaN or infinity: the checkpoint is damaged, or was loaded only in part. Load it again."
        )
    if low < 0 or high > LARGEST_SCALE:
        raise CheckpointError(
            f"{what} range from {low:g} to {high:g}, but must be between 0 and {LARGEST_SCALE:.3g}: the checkpoint is "
            "damaged. Download it again."
        )


def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    """Returns a contiguous parameter without gradients."""
    return torch.nn.Parameter(tensor.contiguous(), requires_grad=False)
