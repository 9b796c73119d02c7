"""Experts in MXFP4 in the order in which the kernels read them: packed by rearranging codes, unpacked in plain torch.

A *step* is 128 channels of K of 128 rows of weights: a chunk of `CHUNK_BYTES` and a float32 base. A weight is a code
times 2^(q - `LARGEST_Q`) times 2^`LARGEST_EXPONENT` times the base, with one q of 0 to 14 for each row and 32 channels.
e4m3 represents the first three exactly, so no weight is ever rounded. Below q = 3 they may be subnormal e4m3 numbers,
whose products wgmma adds up less precisely.

In a tensor without room for further steps, all steps of a row block have the same base, so that a kernel may multiply
sums by it in place of products. Where the exponents of a row block span more than `SPAN`, each step has a base of its
own, and the tensor has room for at least one further step. If those of a block of 128x128 do, the block has further
steps, in which the codes of other groups are zero. They follow the regular steps. All row blocks of a tensor have room
for the same number of them, so an expert's part of a tensor has one size, and engines may move it as they move any
other.

The layouts of an expert's tensors, for K of `k_blocks` blocks with room for `extra` further steps:

    w2           uint8 [N / 128, steps, CHUNK_BYTES] for steps = k_blocks + extra
    w2 scales    float32 [N / 128, steps + extra]: the bases, then the K block of each further step
    w13          uint8 [I / 128, steps, 2, CHUNK_BYTES]: 128 channels have 2 chunks, each of 64 rows of the gate and 64
                 of the up projection. The first half of the further steps belongs to the gate, the other half to up.
    w13 scales   float32 [2, I / 128, steps + extra], of the gate and of the up projection

The tensors' own shapes are those of `PACKED_MXFP4`. csrc/formats/mxfp4_chunks.cuh has the order of bytes in a chunk.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import CHUNK_BYTES, CODE_BYTES
from fp8moe_plugin.ops.fp4_blocks import (
    CODES,
    E2M1,
    EXPONENTS,
    LARGEST_EXPONENT,
    SPAN,
    Fp4Blocks,
    bases,
    nonzero_groups,
)
from fp8moe_plugin.ops.mxfp4_words import codes_of, swizzled, words
from fp8moe_plugin.ops.tables import table

LARGEST_Q = SPAN
_largest_d = table(lambda device: torch.tensor(8 * LARGEST_Q, dtype=torch.int32, device=device))
UNUSED_BELOW, UNUSED_BASE, UNUSED_K_BLOCK = LARGEST_Q, 1.0, 0.0  # of steps that hold zeros


class Steps(NamedTuple):
    """The steps of a matrix of weights, regular ones first."""

    codes: torch.Tensor  # uint8 [row blocks, steps, 128, 64], two codes per byte as in the checkpoint
    below: torch.Tensor  # uint8 or int32 [row blocks, steps, 128, 4]: `LARGEST_Q` - q
    base: torch.Tensor  # float32 [row blocks, steps]
    k_block: torch.Tensor  # float32 [row blocks, further steps]

    @property
    def extra(self) -> int:
        return self.k_block.shape[1]


# ---- packing -------------------------------------------------------------------------------------------------------


def steps_of(blocks: Fp4Blocks, largest: int | None = None) -> Steps:
    """Divides a weight into steps. It waits for the device unless `largest` is given.

    Args:
        largest: a number that no exponent exceeds or is more than `SPAN` below.
    """
    packed, exponent = (tensor.transpose(1, 2) for tensor in blocks)
    rows, k_blocks = packed.shape[:2]
    if largest is not None:
        below = (largest - exponent).clamp_(max=SPAN)  # zeros at the edges are further below
        base = bases(exponent.new_full((rows, k_blocks), largest))
        return Steps(packed, below, base, base.new_empty(rows, 0))
    nonzero = nonzero_groups(blocks.codes).transpose(1, 2)
    of_row_blocks = _step(packed, exponent, nonzero, torch.ones_like(nonzero), (1, 2, 3))
    if of_row_blocks.taken.all():
        codes, below, base, _ = of_row_blocks
        return Steps(codes, below, base.expand(rows, k_blocks), base.new_empty(rows, 0))
    first = _step(packed, exponent, nonzero, torch.ones_like(nonzero))
    left = ~first.taken
    used, further = torch.zeros(rows, dtype=torch.int64, device=packed.device), []
    while left.any():
        row, k_block = left.flatten(2).any(-1).nonzero(as_tuple=True)
        count = torch.bincount(row, minlength=rows)
        slot = used[row] + torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
        step = _step(packed, exponent, nonzero, left)
        further.append((row, slot, k_block, step))
        used += count
        left = left & ~step.taken
    extra = max(1, int(used.max()))
    padding = (0, 0, 0, 0, 0, extra)
    result = Steps(
        torch.nn.functional.pad(first.codes, padding),
        torch.nn.functional.pad(first.below, padding, value=UNUSED_BELOW),
        torch.nn.functional.pad(first.base, (0, extra), value=UNUSED_BASE),
        torch.full((rows, extra), UNUSED_K_BLOCK, device=packed.device),
    )
    for row, slot, k_block, step in further:
        for to, values in zip(result, step[:3], strict=False):
            to[row, k_blocks + slot] = values[row, k_block]
        result.k_block[row, slot] = k_block.float()
    return result


class _Step(NamedTuple):
    codes: torch.Tensor
    below: torch.Tensor
    base: torch.Tensor
    taken: torch.Tensor  # groups that are in it


def _step(
    codes: torch.Tensor,
    exponent: torch.Tensor,
    nonzero: torch.Tensor,
    left: torch.Tensor,
    block: tuple[int, ...] = (2, 3),
) -> _Step:
    """Returns a step of each block. It takes those of the groups left that are zero or whose exponents fit.

    Args:
        block: dimensions whose groups have the same base.
    """
    largest = torch.where(left & nonzero, exponent, 0).amax(block, keepdim=True).int()
    below = largest - exponent
    taken = left & (~nonzero | (below <= SPAN))
    codes = torch.where(taken.repeat_interleave(CODES // EXPONENTS, -1), codes, 0)
    return _Step(codes, below.clamp(0, SPAN), bases(largest[..., 0, 0]), taken)


# ---- chunks --------------------------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """Views of chunks. The rows of a slab, 64 rows of weights, are 16 * warp + 8 * half + lane.

    Words are in the order of `swizzled` codes.
    """

    words: torch.Tensor  # uint8 [.., slab 2, warp 4, half 2, lane 8, wgmma 2, 2, thread 4, byte 4]
    d: torch.Tensor  # uint8 [.., slab 2, warp 4, half 2, lane 8, group 4]: 8 q

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Chunks":
        """Returns views of uint8 `[.., CHUNK_BYTES]`."""
        codes, d = tensor.split((CODE_BYTES, CHUNK_BYTES - CODE_BYTES), -1)
        in_memory = codes.unflatten(
            -1, (2, 2, 4, 8, 4, 2, 2, 4)
        )  # slab, wgmma / 2, warp, lane, thread, wgmma % 2, half
        return cls(
            in_memory.movedim((-8, -6, -2, -5, -7, -3, -4, -1), tuple(range(-8, 0))),
            d.unflatten(-1, (2, 4, 8, 2, 4)).transpose(-3, -2),
        )

    def of_half(self, half: int) -> "Chunks":
        return Chunks(self.words.select(-6, half), self.d.select(-3, half))

    def write(self, steps: Steps, rows: tuple[int, ...]) -> None:
        """Write 128 rows of each step; `rows`: the sizes of the views' dimensions of rows."""
        in_order = swizzled(steps.codes).transpose(1, 2)  # of the checkpoint
        to = self.words.view(torch.int32)[..., 0].movedim(1, -4)  # steps after rows, likewise
        torch.bitwise_or(*(part.view(to.shape) for part in words(in_order)), out=to)
        torch.sub(_largest_d(to.device), steps.below.unflatten(2, rows), alpha=8, out=self.d)

    def values(self, rows: int) -> torch.Tensor:
        """Returns float32 `[.., 128, 128]`, without the base; `rows`: dimensions of rows of the views."""
        codes = swizzled(codes_of(self.words.flatten(-4, -3)).flatten(-1 - rows, -2))
        q = (self.d // 8).flatten(-1 - rows, -2).repeat_interleave(GROUP // EXPONENTS, -1)
        pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        return _values(codes.device)[pairs.int()] * torch.exp2(q - (LARGEST_Q - LARGEST_EXPONENT + 0.0))


def _values(device: torch.device) -> torch.Tensor:
    positive = torch.tensor(E2M1)
    return torch.cat([positive, -positive]).to(device)


DOWN_ROWS, HALF_ROWS = (2, 4, 2, 8), (2, 2, 4, 8)  # slab, warp, half, lane; chunk, slab, warp, lane


# ---- an expert's tensors -------------------------------------------------------------------------------------------


def further_steps(weight: torch.Tensor, scales: torch.Tensor) -> int:
    """Returns how many further steps the tensors of an expert or of a layer have room for."""
    return scales.shape[-1] - weight.shape[-1] // CHUNK_BYTES


def write_down(weight: torch.Tensor, scales: torch.Tensor, steps: Steps) -> None:
    """Write a weight to the tensors of w2 of an expert, or of several, which have room for its further steps."""
    weight, scales = weight.flatten(0, -2), scales.flatten(0, -2)
    steps, extra = _placed(steps, 0, further_steps(weight, scales)), further_steps(weight, scales)
    Chunks.of(weight.unflatten(-1, (-1, CHUNK_BYTES))).write(steps, DOWN_ROWS)
    regular = scales.shape[-1] - extra
    scales[:, :regular] = steps.base
    if extra:
        scales[:, regular:] = steps.k_block


def write_half(weight: torch.Tensor, scales: torch.Tensor, half: int, steps: Steps) -> None:
    """Write a gate (half 0) or an up projection to the tensors of w13 of an expert, or of several.

    Each half has room for half of the steps. Nothing else is written, so both may arrive in any order.
    """
    extra = further_steps(weight, scales)
    own = _placed(steps, half * (extra // 2), extra)
    Chunks.of(_pairs(weight.flatten(0, -2))).of_half(half).write(own, HALF_ROWS)
    regular, of_halves = scales.shape[-1] - extra, scales.unflatten(-2, (2, -1)).movedim(-3, 0)
    blocks = of_halves.shape[1:-1]
    of_halves[half, ..., :regular] = own.base.unflatten(0, blocks)
    if extra:
        slots = slice(half * (extra // 2), (half + 1) * (extra // 2))
        of_halves[..., regular:][..., slots] = own.k_block[:, slots].unflatten(0, blocks)


def _placed(steps: Steps, first: int, extra: int) -> Steps:
    """Returns steps with room for `extra` further ones. Their own further steps begin at number `first`."""
    regular, last = steps.base.shape[1] - steps.extra, extra - first - steps.extra

    def place(tensor: torch.Tensor, begin: int, value: float) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[1] = begin + extra
        placed = tensor.new_full(shape, value)
        placed[:, :begin], placed[:, begin + first : begin + extra - last] = tensor[:, :begin], tensor[:, begin:]
        return placed

    if extra == steps.extra:
        return steps
    return Steps(
        place(steps.codes, regular, 0),
        place(steps.below, regular, UNUSED_BELOW),
        place(steps.base, regular, UNUSED_BASE),
        place(steps.k_block, 0, UNUSED_K_BLOCK),
    )


def _pairs(weight: torch.Tensor) -> torch.Tensor:
    """Returns w13 of an expert as `[I / 128, steps, 2, CHUNK_BYTES]`."""
    blocks, width = weight.shape
    return weight.view(blocks // 2, width // CHUNK_BYTES, 2, CHUNK_BYTES)


def dequantize(weight: torch.Tensor, scales: torch.Tensor, gate_up: bool) -> torch.Tensor:
    """Returns float32 `[N, K]`, exactly, from the tensors of an expert's w2 or, with `gate_up`, of its w13."""
    if not gate_up:
        values = Chunks.of(weight.unflatten(-1, (-1, CHUNK_BYTES))).values(len(DOWN_ROWS))
        return _added(values, scales)
    pairs, of_halves = Chunks.of(_pairs(weight)), scales.unflatten(0, (2, -1))
    return torch.cat([_added(pairs.of_half(half).values(len(HALF_ROWS)), of_halves[half]) for half in (0, 1)])


def _added(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns float32 `[N, K]` from values `[N / 128, steps, 128, 128]` and scales `[N / 128, steps + extra]`."""
    steps = values.shape[1]
    extra = scales.shape[1] - steps
    scaled = values * scales[:, :steps, None, None]
    total, k_block = scaled[:, : steps - extra].clone(), scales[:, steps:].long()
    row = torch.arange(len(total), device=total.device)
    for slot in range(extra):
        total[row, k_block[:, slot]] += scaled[:, steps - extra + slot]
    return total.transpose(1, 2).flatten(2).flatten(0, 1)


def widened(
    weight: torch.Tensor, scales: torch.Tensor, gate_up: bool, further: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns copies of w2 or w13 of experts with room for `further` further steps, at least as many as there are."""
    parts = 2 if gate_up else 1
    experts, rows, width = weight.shape
    steps, before = width // CHUNK_BYTES, further_steps(weight, scales)
    sizes = [steps - before, *[before // parts] * parts]
    more = (further - before) // parts

    def spread(slots: Sequence[torch.Tensor], value: float) -> Iterator[torch.Tensor]:
        for part in slots:
            yield from (part, part.new_full((*part.shape[:2], more, *part.shape[3:]), value))

    chunks, *slots = weight.view(experts, rows // parts, steps, parts * CHUNK_BYTES).split(sizes, 2)
    bases, *slot_bases = scales[..., :steps].split(sizes, 2)
    k_blocks = scales[..., steps:].split(sizes[1:], 2)
    return (
        torch.cat([chunks, *spread(slots, 0)], 2).reshape(experts, rows, -1),
        torch.cat([bases, *spread(slot_bases, UNUSED_BASE), *spread(k_blocks, UNUSED_K_BLOCK)], 2),
    )
