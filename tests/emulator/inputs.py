"""Operands of the GEMMs, slabs of rows by expert: what no kernel may use is NaN."""

from dataclasses import dataclass

import torch

from tests import helpers as h
from tests.steps import TileTensors


@dataclass(frozen=True)
class Slabs:
    """`[G, max_m, K]` rows, of which the first `counts[g]` of each group are there."""

    counts: list[int]
    a: h.Quantized

    @property
    def max_m(self) -> int:
        return self.a[0].shape[1]

    @property
    def masked_m(self) -> torch.Tensor:
        return torch.tensor(self.counts, dtype=torch.int32)


def slabs(gen: torch.Generator, counts: list[int], k: int) -> Slabs:
    q, scales = h.random_quantized(gen, len(counts), max(counts) + 3, k)
    for group, count in enumerate(counts):
        q[group, count:].view(torch.uint8).fill_(0x7F)
        scales[group, count:] = float("nan")
    return Slabs(counts, (q, scales))


def exact(gen: torch.Generator, *shape: int, rows_of_scale: int = 1) -> h.Quantized:
    """e4m3 `[.., N, K]` and float32 `[.., ceil(N / rows_of_scale), K / 128]`, whose products any order sums up alike.

    Small integers, and scales that are powers of two.
    """
    *groups, n, k = shape
    q = torch.randint(-3, 4, shape, generator=gen).float().to(h.FP8)
    exponents = torch.randint(-4, -1, (*groups, -(-n // rows_of_scale), k // h.GROUP), generator=gen)
    return q, torch.exp2(exponents)


def empty_rows(rows: Slabs, n: int) -> torch.Tensor:
    return h.poisoned(len(rows.counts), rows.max_m, n, dtype=torch.bfloat16, device=torch.device("cpu"))


def assert_product(
    out: torch.Tensor, rows: Slabs, a: h.Quantized, b: h.Quantized, bias: torch.Tensor | None = None
) -> None:
    """The rows that are there are those of `a @ b.T`, plus `bias`, expert by expert, and no others are written."""
    for group, count in enumerate(rows.counts):
        expected = h.product((a[0][group, :count], a[1][group, :count]), (b[0][group], b[1][group]))
        expected = expected if bias is None else expected + bias[group].double()
        assert_close(out[group, :count], expected, f"expert {group}")
        assert h.untouched(out[group, count:]), f"expert {group}: rows behind its {count} are written"


def assert_close(out: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """`out` is `expected`, summed up in float32 and rounded once."""
    size = expected.square().mean(-1, keepdim=True).sqrt()
    close = (out.double() - expected).abs() <= expected.abs() * 2**-8 + size * 1e-5
    for at in map(tuple, (~close).nonzero().tolist()):
        wrong = f"{int((~close).sum())} of {out.numel()} elements are wrong"
        raise AssertionError(f"{what}: {wrong}, the first at {at}: {out[at]:.5g}, not {expected[at]:.5g}")


def assert_counters_at_zero(tiles: TileTensors) -> None:
    assert tiles.num_tiles[1:].tolist() == [0, 0, 0, 0]
