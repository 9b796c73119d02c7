"""Layouts of tensors for the kernels: some layouts are read in place, tensors of others are copied."""

from typing import NamedTuple

import torch

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.launches.operands import Extent
from fp8moe_plugin.ops import workspace
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.transpose_scales import transpose_scales
from fp8moe_plugin.plan.scratch import scale_pitch

Quantized = tuple[torch.Tensor, torch.Tensor]  # e4m3 values and their float32 scales
ScalesAndStrides = tuple[torch.Tensor, int, int]  # scales; their strides by group and by k block, in elements


# The tensors of a call of `fused_moe`, in the order of `LayerAddresses`.
LayerTensors = tuple[
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor,
]


class ExpertWeights(NamedTuple):
    """The values and the scales of a layer's two weights, and their biases, see `fused_moe`."""

    w13: Quantized
    w2: Quantized
    biases: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(
        cls,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> "ExpertWeights":
        """Returns the tensors of a call; there are both biases or none."""
        biases = None if w13_bias is None or w2_bias is None else (w13_bias, w2_bias)
        return cls((w13, w13_scale), (w2, w2_scale), biases)

    def of_expert(self, e: int) -> "ExpertWeights":
        return ExpertWeights.of(*(tensor[e] for pair in (self.w13, self.w2, self.biases or ()) for tensor in pair))


def k_major(q: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor | None = None) -> ScalesAndStrides:
    """Returns the scales of `[rows, k]` or `[groups, max_m, k]` in K-major layout: in place if possible, else a copy.

    Rows are numbered across all groups. A copy may omit the rows from `counts[g]` on; `[rows, k]` is one group.
    """
    row, k_block = scales.stride()[-2:]
    group = scales.stride(0) - q.shape[1] if q.dim() == 3 else 0
    last = sum((size - 1) * stride for size, stride in zip(scales.shape, scales.stride(), strict=True))
    available = scales.untyped_storage().nbytes() // scales.element_size() - scales.storage_offset()
    in_steps_of_16_bytes = scales.data_ptr() % 16 == group % 4 == k_block % 4 == 0 and last // 4 * 4 + 4 <= available
    # Triton kernels compute offsets of K blocks in 32 bits.
    near = max(abs(group), k_block * scales.shape[-1]) < 2**31
    if (row == 1 or q.shape[-2] == 1) and in_steps_of_16_bytes and near:
        return scales, group, k_block
    copy = empty_scales(q.numel() // q.shape[-1], scales.shape[-1], scales.device)
    in_order = copy.view(scales.shape)
    if counts is None:
        in_order.copy_(scales)
    else:
        transpose_scales(scales, in_order, counts)
    return copy, 0, copy.stride(1)


def strided(scales: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Returns the scales of `[groups, max_m, k]` and their strides from group to group, K block and row.

    Rows are numbered across all groups, as by `k_major`. Kernels compute the offset of a row in 32 bits: scales that
    are further apart are copied.
    """
    (groups, max_m, k_blocks), strides = scales.shape, scales.stride()
    group, row, k_block = (stride if size > 1 else 0 for size, stride in zip(scales.shape, strides, strict=True))
    if max(group, groups * max_m * row, k_blocks * k_block) >= 2**31:
        return strided(scales.clone(memory_format=torch.contiguous_format))
    return scales, group - max_m * row, k_block, row


def in_rows(q: torch.Tensor) -> tuple[torch.Tensor, Extent]:
    """Returns `[.., rows, k]` as one matrix of all groups' rows for TMA: in place if possible, else a copy."""
    k, rows = q.shape[-1], q.shape[-2]
    pitch = q.stride(-2) if rows > 1 else q.stride(0) if q.shape[0] > 1 else k
    evenly = q.dim() == 2 or q.shape[0] == 1 or q.stride(0) == rows * pitch
    if evenly and pitch >= k and pitch % 16 == 0:
        return q, Extent(k, pitch)
    return q.contiguous(), Extent(k, k)


def whole_k_blocks(q: torch.Tensor) -> torch.Tensor:
    """Returns `[.., k]` contiguous and zero-padded to whole K blocks, for Triton kernels: in place if possible."""
    missing = -q.shape[-1] % GROUP
    padded = torch.nn.functional.pad(q.view(torch.uint8), (0, missing)).view(FP8) if missing else q
    return padded.contiguous()


def empty_quantized(rows: int, k: int, device: torch.device) -> Quantized:
    """Returns uninitialized e4m3 `[rows, k]` and its scales."""
    return workspace.empty((rows, k), FP8, device), empty_scales(rows, k // GROUP, device)


def empty_scales(rows: int, k_blocks: int, device: torch.device) -> torch.Tensor:
    """Returns uninitialized float32 scales `[rows, k_blocks]`, K-major: K blocks are a multiple of 16 bytes apart."""
    return workspace.empty((k_blocks, scale_pitch(rows)), torch.float32, device)[:, :rows].t()
