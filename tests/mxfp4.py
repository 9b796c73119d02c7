"""Experts in MXFP4: random ones, the same in block FP8, and packed for the kernels."""

from typing import NamedTuple

import torch

from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.layers.recode import block_fp8
from fp8moe_plugin.ops.fp4_blocks import SPAN, Fp4Blocks
from fp8moe_plugin.ops.mxfp4 import Steps, steps_of, write_down, write_half
from tests.helpers import Layer

BIAS = 127


class Projection(NamedTuple):
    codes: torch.Tensor  # uint8 [N, K/2]
    exponents: torch.Tensor  # uint8 [N, K/32]


def random_projection(gen: torch.Generator, n: int, k: int, span: int) -> Projection:
    """Exponents of a block differ by at most `span`, those of its rows by 3; the largest weights are about K^-0.5.

    The largest of a block may be up to 4 times smaller. The first of several blocks of rows has no further steps.
    """
    of_rows = torch.randint(max(span - 3, 0) + 1, (n, 1), generator=gen)
    if n > 128:
        of_rows[:128] %= SPAN - 3
    below = of_rows + torch.randint(min(span, 3) + 1, (n, k // 32), generator=gen)
    of_blocks = torch.randint(3, (-(-n // 128), -(-k // 128)), generator=gen)
    below += of_blocks.repeat_interleave(128, 0)[:n].repeat_interleave(4, 1)[:, : k // 32]
    exponents = (BIAS - k.bit_length() // 2 - 1 - below).to(torch.uint8)
    return Projection(torch.randint(256, (n, k // 2), generator=gen, dtype=torch.uint8), exponents)


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


def random_experts(gen: torch.Generator, experts: int, hidden: int, intermediate: int, span: int) -> Experts:
    sizes = (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)
    return Experts([tuple(random_projection(gen, *size, span) for size in sizes) for _ in range(experts)])


def _recoded(projection: Projection) -> tuple[torch.Tensor, torch.Tensor]:
    return block_fp8("w", projection.codes, projection.exponents.view(torch.float8_e8m0fnu))


def _empty(experts: int, steps: list[Steps], parts: int, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = parts * 128 * len(steps[0].base), 128 * (steps[0].base.shape[1] - steps[0].extra)
    shapes = (tensor.shape(n, k, extra) for tensor in (PACKED_MXFP4.weight, PACKED_MXFP4.scales))
    weight, scales = (
        torch.empty(experts, *shape, dtype=torch.uint8 if i == 0 else None) for i, shape in enumerate(shapes)
    )
    return weight.fill_(0xA5), scales.fill_(float("nan"))
