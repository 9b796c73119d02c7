"""What kernels read and write, as addresses: creating a tensor costs the host as much as a launch.

An op that makes its launches once and calls them often gives slots in place of addresses (`jit.launch.Slot`).

A tile table is int32 `[capacity, 4]` with one entry `(expert, row_begin, row_end, first)` for each row tile. The rows
are those of the tile's whole expert, and `first` is the index of that expert's first tile: entry i is tile `i - first`
of its expert, as `plan.tiles.row_tiles` cuts it. Only the first `num_tiles[0]` entries are written. `num_tiles[1:5]`
are two pairs of counters with which GEMMs hand out tiles; they are zero before and after each GEMM.

`done_counters`, int32 `[1 + capacity * n]`, lets GEMM 2 of the experts start before GEMM 1 ends: it holds the number of
finished blocks of GEMM 1, then n counters for each row tile (`plan.scratch.row_counters`). The first of them counts
stored columns. In tiles of `MANY_ROWS_TILE` rows each of two math warpgroups counts for itself. Whatever writes the
table zeroes `done_counters`, so a table is valid for one launch of GEMM 1.
"""

from typing import Any, NamedTuple, TypeVar

import torch

from fp8moe_plugin.checkpoint.shapes import GROUP
from fp8moe_plugin.jit.launch import Address, Slot
from fp8moe_plugin.ops import workspace
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.transpose_scales import transpose_scales
from fp8moe_plugin.plan.tiles import scale_pitch

Quantized = tuple[torch.Tensor, torch.Tensor]  # e4m3 values and their float32 scales
Scratch = TypeVar("Scratch", bound=tuple[Any, ...])  # a layout of plan.scratch
ScalesAndStrides = tuple[torch.Tensor, int, int]  # scales; their strides by group and by k block, in elements


class ExpertWeights(NamedTuple):
    """The values and the scales of a layer's two weights, as `fused_moe` takes them."""

    w13: Quantized
    w2: Quantized

    def of_expert(self, e: int) -> "ExpertWeights":
        return ExpertWeights((self.w13[0][e], self.w13[1][e]), (self.w2[0][e], self.w2[1][e]))


class Extent(NamedTuple):
    """What a matrix takes in memory, in elements; TMA reads zeros from `columns` to the end of the last K block."""

    columns: int
    pitch: int  # from row to row, a multiple of 16


class Rows(NamedTuple):
    """e4m3 `[rows, k]` and its scales, with the strides of these by group and by k block, in elements."""

    values: Address
    rows: int
    k: int  # a multiple of 128
    scales: Address
    scale_group: int
    scale_k_block: int
    extent: "Extent | None" = None  # None: the rows are contiguous

    @classmethod
    def k_major(cls, values: Address, scales: Address, rows: int, k: int) -> "Rows":
        """Rows with scales as `empty_scales` lays them out."""
        return cls(values, rows, k, scales, 0, scale_pitch(rows))

    @classmethod
    def row_major(cls, values: Address, scales: Address, rows: int, k: int) -> "Rows":
        """Rows that a GEMM gathers: their scales are contiguous `[rows, k / 128]`."""
        return cls(values, rows, k, scales, 0, 0)


class Weights(NamedTuple):
    """e4m3 `[experts, n, k]` and its scales; a dense weight is one expert."""

    values: Address
    experts: int
    n: int
    k: int  # a multiple of 128
    scales: Address
    extent: Extent | None = None  # None: contiguous


class Tiles(NamedTuple):
    """A tile table, see the module's docstring; without one (0) a GEMM is dense."""

    table: Address = 0
    num_tiles: Address = 0
    done_counters: Address = 0  # 0: GEMM 2 of the experts waits for the end of GEMM 1


class Router(NamedTuple):
    """What the kernels must know about the router's ids and weights besides their addresses."""

    ids_64: bool  # ids are int64, otherwise int32
    # Every token also has the last of the layer's experts, with weight 1. Ids and weights have no column for it.
    shared_expert: bool = False
    routed_scale: float = 1.0  # multiplies the weights


# The tensors of a call of `fused_moe`, in the order of `LayerAddresses`.
LayerTensors = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor,
]


class LayerAddresses(NamedTuple):
    """The addresses of a call's `LayerTensors` and of its scratch; 0 for no expert map."""

    hidden_states: Address
    w13: Address
    w13_scale: Address
    w2: Address
    w2_scale: Address
    topk_weights: Address
    topk_ids: Address
    expert_map: Address
    out: Address
    scratch: Address


LAYER_SLOTS = LayerAddresses(*map(Slot, range(len(LayerAddresses._fields))))


def placed(layout: Scratch, scratch: Address) -> Scratch:
    """The pieces of a layout of `plan.scratch` as addresses, in memory that begins at `scratch`."""
    return type(layout)(*(scratch + offset for offset in layout))


def k_major(q: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor | None = None) -> ScalesAndStrides:
    """The scales of `[rows, k]` or `[groups, max_m, k]` as the kernels read them: in place if possible, else a copy.

    Rows are numbered across all groups. Those from `counts[g]` on may be left out; `[rows, k]` is one group.
    """
    row, k_block = scales.stride()[-2:]
    group = scales.stride(0) - q.shape[1] if q.dim() == 3 else 0
    last = sum((size - 1) * stride for size, stride in zip(scales.shape, scales.stride(), strict=True))
    room = scales.untyped_storage().nbytes() // scales.element_size() - scales.storage_offset()
    in_steps_of_16_bytes = scales.data_ptr() % 16 == group % 4 == k_block % 4 == 0 and last // 4 * 4 + 4 <= room
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


def in_rows(q: torch.Tensor) -> tuple[torch.Tensor, Extent]:
    """`[.., rows, k]` as TMA reads it, with rows of all groups numbered through: in place if possible, else a copy."""
    k, rows = q.shape[-1], q.shape[-2]
    pitch = q.stride(-2) if rows > 1 else q.stride(0) if q.shape[0] > 1 else k
    evenly = q.dim() == 2 or q.shape[0] == 1 or q.stride(0) == rows * pitch
    if evenly and pitch >= k and pitch % 16 == 0:
        return q, Extent(k, pitch)
    return q.contiguous(), Extent(k, k)


def whole_k_blocks(q: torch.Tensor) -> torch.Tensor:
    """`[.., k]` as Triton kernels read it: contiguous, with zeros up to whole K blocks. In place if possible."""
    missing = -q.shape[-1] % GROUP
    padded = torch.nn.functional.pad(q.view(torch.uint8), (0, missing)).view(FP8) if missing else q
    return padded.contiguous()


def empty_quantized(rows: int, k: int, device: torch.device) -> Quantized:
    """Uninitialized e4m3 `[rows, k]` and its scales."""
    return workspace.empty((rows, k), FP8, device), empty_scales(rows, k // GROUP, device)


def empty_scales(rows: int, k_blocks: int, device: torch.device) -> torch.Tensor:
    """Uninitialized float32 scales `[rows, k_blocks]`, K-major: k blocks are a multiple of 16 bytes apart."""
    return workspace.empty((k_blocks, scale_pitch(rows)), torch.float32, device)[:, :rows].t()
