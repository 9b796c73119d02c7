"""Experts in MXFP4: random ones, the same in block FP8, and packed for the kernels."""

from typing import NamedTuple

import torch

from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.layers.recode import block_fp8
from fp8moe_plugin.ops.fp4_blocks import SPAN, Fp4Blocks
from fp8moe_plugin.ops.mxfp4 import Steps, further_steps, steps_of, write_down, write_half
from fp8moe_plugin.ops.pack_mxfp4 import PARTS, pack_mxfp4
from tests.helpers import Layer

BIAS = 127
GARBAGE = 0xA5
# Of projections that pack_mxfp4 packs; the exponents of each differ by at most `SPAN`.
CLOSE_EXPONENTS = {
    "of one number": lambda gen, shape: torch.full(shape, 120),
    "as far apart as may be": lambda gen, shape: 100 + SPAN * torch.randint(2, shape, generator=gen),
    "random": lambda gen, shape: torch.randint(113, 114 + SPAN, shape, generator=gen),
    "the smallest": lambda gen, shape: torch.randint(SPAN + 1, shape, generator=gen),
    "near zero": lambda gen, shape: torch.randint(4, shape, generator=gen),
    "the largest": lambda gen, shape: torch.randint(254 - SPAN, 255, shape, generator=gen),
    "one above the others": lambda gen, shape: 60 + SPAN * (torch.arange(shape.numel()) % 997 == 7).view(shape),
}
# Rows and channels of a projection, and blocks of them in its tensors: whole blocks, one row and one group, the 2,880
# channels of gpt-oss, the share of the last rank, and of a rank without channels.
PACKED_SIZES = [
    ((256, 384), (2, 3)),
    ((1, 32), (1, 1)),
    ((320, 2880), (3, 23)),
    ((200, 64), (2, 2)),
    ((0, 256), (2, 2)),
    ((256, 0), (2, 2)),
]


class Projection(NamedTuple):
    codes: torch.Tensor  # uint8 [N, K/2]
    exponents: torch.Tensor  # uint8 [N, K/32]


def pack_close(
    weight: torch.Tensor, scales: torch.Tensor, shard_id: str, codes: torch.Tensor, exponents: torch.Tensor
) -> None:
    """Pack projections whose exponents differ by at most `SPAN`; they may be on a GPU."""
    largest = int(exponents.view(torch.uint8).max()) if exponents.numel() else 0
    pack_mxfp4(weight, scales, shard_id, codes, exponents, largest)


def random_projection(gen: torch.Generator, n: int, k: int, span: int, apart: int = 2) -> Projection:
    """Exponents of a block differ by at most `span`, those of its rows by 3; the largest weights are about K^-0.5.

    The largest exponents of blocks differ by at most `apart`, those of projections by 2. Those of a row block differ by
    at most `SPAN` unless either is more. The first of several row blocks has no further steps.
    """
    of_rows = torch.randint(max(span - 3, 0) + 1, (n, 1), generator=gen)
    if n > 128:
        of_rows[:128] %= SPAN - 3 - min(apart, 2)
    below = of_rows + torch.randint(min(span, 3) + 1, (n, k // 32), generator=gen)
    of_blocks = torch.randint(apart + 1, (-(-n // 128), -(-k // 128)), generator=gen)
    below += of_blocks.repeat_interleave(128, 0)[:n].repeat_interleave(4, 1)[:, : k // 32]
    if max(span, apart) <= SPAN:
        below.clamp_(max=SPAN)
    below += of_blocks.sum() % 3  # of the projection
    exponents = (BIAS - k.bit_length() // 2 - 1 - below).to(torch.uint8)
    return Projection(torch.randint(256, (n, k // 2), generator=gen, dtype=torch.uint8), exponents)


def random_projections(gen: torch.Generator, experts: int, rows: int, k: int, exponents: str) -> Projection:
    """Returns a projection of each expert, as one matrix; `exponents`: a name in `CLOSE_EXPONENTS`."""
    codes = torch.randint(256, (experts * rows, k // 2), generator=gen, dtype=torch.uint8)
    shape = torch.Size((experts * rows, k // 32))
    return Projection(codes, CLOSE_EXPONENTS[exponents](gen, shape).to(torch.uint8))


def garbage(experts: int, shard_id: str, blocks: tuple[int, int], further: int) -> list[torch.Tensor]:
    """Returns tensors of experts, weight and scales, that hold neither zeros nor numbers.

    Args:
        blocks: of rows and of channels of a projection.
        further: further steps of a projection that there is room for.
    """
    _, parts = PARTS[shard_id]
    sizes = parts * blocks[0] * 128, blocks[1] * 128, parts * further
    weight, scales = (tensor.shape(*sizes) for tensor in (PACKED_MXFP4.weight, PACKED_MXFP4.scales))
    found = [
        torch.full((experts, *weight), GARBAGE, dtype=torch.uint8),
        torch.full((experts, *scales), float("nan")),
    ]
    assert further_steps(*found) == parts * further
    return found


class Experts(NamedTuple):
    """The projections of each expert: gate, up and down."""

    projections: list[tuple[Projection, Projection, Projection]]

    def in_fp8(self) -> Layer:
        """Returns the same weights in block FP8."""
        w13, w2 = [], []
        for gate, up, down in self.projections:
            halves = [_recoded(half) for half in (gate, up)]
            w13.append(tuple(torch.cat(parts) for parts in zip(*halves, strict=True)))
            w2.append(_recoded(down))
        return Layer(*map(torch.stack, zip(*w13, strict=True)), *map(torch.stack, zip(*w2, strict=True)))

    def packed(self) -> Layer:
        steps = [[steps_of(Fp4Blocks.of(*projection)) for projection in expert] for expert in self.projections]
        gates = [half for expert in steps for half in expert[:2]]
        w13 = _empty(len(steps), gates, 2, 2 * max(half.extra for half in gates))
        w2 = _empty(len(steps), downs := [expert[2] for expert in steps], 1, max(down.extra for down in downs))
        for e, (gate, up, down) in enumerate(steps):
            write_half(w13[0][e], w13[1][e], 1, up)
            write_half(w13[0][e], w13[1][e], 0, gate)
            write_down(w2[0][e], w2[1][e], down)
        return Layer(*w13, *w2)


def random_experts(
    gen: torch.Generator, experts: int, hidden: int, intermediate: int, span: int, apart: int = 2
) -> Experts:
    sizes = (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)
    return Experts([tuple(random_projection(gen, *size, span, apart) for size in sizes) for _ in range(experts)])


def _recoded(projection: Projection) -> tuple[torch.Tensor, torch.Tensor]:
    return block_fp8("w", projection.codes, projection.exponents.view(torch.float8_e8m0fnu))


def _empty(experts: int, steps: list[Steps], parts: int, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = parts * 128 * len(steps[0].base), 128 * (steps[0].base.shape[1] - steps[0].extra)
    shapes = (tensor.shape(n, k, extra) for tensor in (PACKED_MXFP4.weight, PACKED_MXFP4.scales))
    weight, scales = (
        torch.empty(experts, *shape, dtype=torch.uint8 if i == 0 else None) for i, shape in enumerate(shapes)
    )
    return weight.fill_(GARBAGE), scales.fill_(float("nan"))
