"""Calls of the ops for the logits of an indexer, and the float64 math that their results are held against.

What no kernel may use is NaN: KV rows that no token has, rows behind a request's length, pages of nobody.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.ops import workspace
from tests import helpers as h

OPS = {  # of an indexer, under all their names
    *("fp8_mqa_logits", "fp8_fp4_mqa_logits", "fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits"),
    "get_paged_mqa_logits_metadata",
}
PAGE = 64
RANGES = ("all", "causal", "ragged", "outside")
JUNK = (2**31 - 1, -1, -(2**31), 10**6)  # behind a request's length in the block table
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8}


@dataclass
class Prefill:
    q: torch.Tensor
    kv: h.Quantized
    weights: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    def run(self, **options: object) -> torch.Tensor:
        return ops.fp8_mqa_logits(self.q, self.kv, self.weights, self.starts, self.ends, **options)

    @property
    def ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 `[M, 1]`: `start`, `end` of each token, clamped; equal where it has none."""
        n = len(self.kv[0])
        starts = self.starts.long().clamp(0, n).unsqueeze(1)
        return starts, self.ends.long().clamp(0, n).unsqueeze(1).maximum(starts)


def prefill(gen: torch.Generator, m: int, n: int, heads: int = 64, dim: int = 128, ranges: str = "all") -> Prefill:
    starts, ends = token_ranges(gen, m, n, ranges)
    k, scales = random_fp8(gen, n, dim), torch.rand(n, generator=gen, device=gen.device) + 0.5
    call = Prefill(random_fp8(gen, m, heads, dim), (k, scales), strided_weights(gen, m, heads), starts, ends)
    (first, behind), row = call.ranges, torch.arange(n, device=gen.device)
    nobodys = ~((row >= first) & (row < behind)).any(0)
    h.bits(k)[nobodys], scales[nobodys] = 0x7F, float("nan")
    return call


def token_ranges(gen: torch.Generator, m: int, n: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 starts and ends of `m` tokens over `n` KV rows."""
    token = torch.arange(m, device=gen.device)
    starts, ends = torch.zeros_like(token), torch.full_like(token, n)
    if kind == "causal":
        ends = (n - m + token + 1).clamp(min=1)
    elif kind == "ragged":  # requests one behind the other, each with its own KV; some tokens have none
        request = token * 3 // max(m, 1)
        starts, ends = request * n // 3, request * n // 3 + token % 7 * n // 21
    elif kind == "outside":  # ends beyond the KV, starts before it, ends before starts
        drawn = torch.randint(-n, 2 * n, (2, m), generator=gen, device=gen.device)
        starts, ends = drawn[0], drawn[1]
    return starts.int(), ends.int()


@dataclass
class Decode:
    q: torch.Tensor
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    kv: list[h.Quantized]  # of each request, in order

    def run(self, runs: int, most: int | None = None, **options: object) -> torch.Tensor:
        schedule = ops.get_paged_mqa_logits_metadata(self.context_lens, PAGE, runs)
        most = most or max([1, *self.lengths])
        tables = self.context_lens, self.block_table, schedule
        return ops.fp8_paged_mqa_logits(self.q, self.kv_cache, self.weights, *tables, most, **options)

    @property
    def lengths(self) -> list[int]:
        return self.context_lens[:, -1].tolist()


def decode(gen: torch.Generator, lengths: list[int], next_n: int = 1, heads: int = 64, dim: int = 128) -> Decode:
    batch, device = len(lengths), gen.device
    used = [-(-length // PAGE) for length in lengths]
    pages = sum(used) + 3
    order, width = torch.randperm(pages, generator=gen, device=device).int(), max([1, *used]) + 2
    table = torch.tensor(JUNK, dtype=torch.int32, device=device).repeat(batch, width)[:, : width + 1]
    page_bytes = PAGE * (dim + 4)
    memory = torch.full((pages, page_bytes + 48), 0xFF, dtype=torch.uint8, device=device)  # pages are apart
    kv = []
    for i, length in enumerate(lengths):
        own = order[sum(used[:i]) : sum(used[: i + 1])]
        table[i, : used[i]] = own
        values, scales = random_fp8(gen, used[i] * PAGE, dim), torch.rand(used[i] * PAGE, generator=gen, device=device)
        h.bits(values)[length:], scales[length:] = 0x7F, float("nan")
        values_of_pages = values.view(torch.uint8).view(used[i], PAGE * dim)
        scales_of_pages = scales.view(torch.uint8).view(used[i], PAGE * 4)
        memory[own.long(), :page_bytes] = torch.cat([values_of_pages, scales_of_pages], 1)
        kv.append((values[:length], scales[:length]))
    cache = memory.as_strided((pages, PAGE, 1, dim + 4), (page_bytes + 48, dim + 4, dim + 4, 1))
    lens = torch.tensor(lengths, dtype=torch.int32, device=device).view(-1, 1).repeat(1, next_n)
    lens[:, :-1] -= 1  # the last one counts
    q, weights = random_fp8(gen, batch, next_n, heads, dim), strided_weights(gen, batch * next_n, heads)
    return Decode(q, cache, weights, lens, table[:, :width], kv)


def spoilt_prefill(gen: torch.Generator, heads: int) -> tuple[Prefill, torch.Tensor]:
    """Returns a call with NaN in a query and in a KV row, and a mask of the logits that are NaN for it."""
    call = prefill(gen, 9, 150, heads)
    h.bits(call.q)[4, heads - 1, 5] = h.bits(call.kv[0])[100, 3] = 0x7F
    return call, nan_mask(9, 150, tokens=slice(4, 5), device=gen.device)


def spoilt_decode(gen: torch.Generator, next_n: int) -> tuple[Decode, torch.Tensor]:
    """Returns the same for paged KV. The NaN query is the last token of the second request."""
    call = decode(gen, [150, 150], next_n)
    h.bits(call.q)[1, next_n - 1, 7, 5] = 0x7F
    for request in range(2):
        page = int(call.block_table[request, 100 // PAGE])
        h.bits(call.kv_cache).flatten(1)[page, 100 % PAGE * call.q.shape[-1] + 3] = 0x7F
    return call, nan_mask(2 * next_n, 150, tokens=slice(2 * next_n - 1, None), device=gen.device)


def nan_mask(rows: int, columns: int, *, tokens: slice, device: torch.device) -> torch.Tensor:
    mask = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    mask[tokens], mask[:, 100] = True, True
    return mask


def random_fp8(gen: torch.Generator, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=gen, device=gen.device) * 4).to(h.FP8)


def strided_weights(gen: torch.Generator, rows: int, heads: int) -> torch.Tensor:
    """float32 `[rows, heads]` of both signs, whose rows are an odd distance apart."""
    return torch.randn(rows, heads + 5, generator=gen, device=gen.device)[:, 3 : heads + 3]


def scores(q: torch.Tensor, kv: h.Quantized, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 logits `[M, N]`, and those of the magnitudes of all factors: what an error is measured by.

    All heads at once: a slow checker and a GPU count kernels, not operations.
    """
    queries, k, w = q.double().transpose(0, 1), kv[0].double(), weights.double().T.unsqueeze(2)
    total, size = (queries @ k.T).relu_().mul_(w), (queries.abs() @ k.abs().T).mul_(w.abs())
    return total.sum(0) * kv[1], size.sum(0) * kv[1]


def assert_close(
    logits: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, there: torch.Tensor, what: str
) -> None:
    """Where they are there, up to sums and one rounding: tensor cores add up e4m3 products with about 13 bits."""
    error = (logits.double() - expected).abs()
    wrong = there & ~(error <= size * 2**-13 + expected.abs() * ROUNDING[logits.dtype])
    if wrong.any():
        token, column = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {int(there.sum())} are wrong, the first at token {token}, column {column}: "
            f"{logits[token, column].item()}, expected {expected[token, column].item()}"
        )


def assert_prefill(call: Prefill, logits: torch.Tensor, memory: torch.Tensor, *, width: int = 0, clean: bool) -> None:
    """`logits` in `memory`, which was poisoned: right in each token's range, and written nowhere else."""
    m, n = len(call.q), len(call.kv[0])
    assert logits.shape == (m, width or n)
    assert logits.stride() == (memory.shape[1], 1)
    expected, size = scores(call.q, call.kv, call.weights)
    (starts, ends), column = call.ranges, torch.arange(width or n, device=logits.device)
    row = column + starts if width else column.expand(m, n)  # of the KV
    there = (row >= starts) & (row < ends)
    if n:
        expected, size = (of_row.gather(1, row.clamp(max=n - 1)) for of_row in (expected, size))
        assert_close(logits, expected, size, there, "logits")
    left = memory.clone()
    if clean:
        assert (logits[~there] == float("-inf")).all(), "columns outside of the tokens' ranges are not -inf"
        there = torch.ones_like(there)
    h.bits(left)[:, : logits.shape[1]].masked_fill_(there, -1)
    assert h.untouched(left), "logits outside of the tokens' ranges are written"


def assert_decode(call: Decode, logits: torch.Tensor, memory: torch.Tensor, most: int | None = None) -> None:
    """The same for paged KV."""
    next_n, left = call.q.shape[1], memory.clone()
    assert logits.shape == (call.q.shape[0] * next_n, most or max([1, *call.lengths]))
    for i, (values, scales) in enumerate(call.kv):
        tokens, length = slice(i * next_n, (i + 1) * next_n), min(len(scales), logits.shape[1])
        if length:
            kv, row = (values[:length], scales[:length]), logits[tokens, :length]
            assert_close(row, *scores(call.q[i], kv, call.weights[tokens]), torch.ones_like(row).bool(), f"request {i}")
        h.bits(left)[tokens, :length] = -1
    assert h.untouched(left), "logits behind the requests' lengths are written"


@contextmanager
def poisoned_results() -> Iterator[list[torch.Tensor]]:
    """All that the ops allocate is poisoned, and listed."""
    made: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(h.poisoned(*shape, dtype=dtype, device=device))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "empty", empty)
        yield made
