"""Replay CUDA graphs of an indexer's paged logits with changing lengths, and compare each result with eager calls.

    python -m benchmarks.layer.mqa_replays --out benchmarks/results/mqa_replays-<date>.json

There is one graph per batch and number of tokens, with `get_paged_mqa_logits_metadata` and `fp8_paged_mqa_logits`.
The steps take the graphs in turn. A step draws the lengths of the requests (every fifth one has ended and has none),
fills the graph's result with NaN, replays, and calls the ops on the same tensors: the logits of each request must be
equal in every bit, and what lies behind its length must still be NaN.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer.mqa_logits import MULTIPROCESSORS, PAGE, decode_case
from benchmarks.report import sources_sha256, write_report
from fp8moe_plugin import ops

SIZES = tuple(itertools.product((1, 8, 64, 256), (1, 2, 4)))  # requests, tokens of each
LONGEST, ENDED = 8192, 5


class Captured:
    """A graph, and what its steps found, counted on the device."""

    def __init__(self, batch: int, next_n: int) -> None:
        self.case, self.steps = decode_case([LONGEST] * batch, next_n), 0
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.logits()  # compiles and loads the kernels
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self.logits()

    def logits(self) -> torch.Tensor:
        case = self.case
        schedule = ops.get_paged_mqa_logits_metadata(case.context_lens, PAGE, MULTIPROCESSORS)
        tables = case.context_lens, case.block_table, schedule
        return ops.fp8_paged_mqa_logits(case.q, case.kv_cache, case.weights, *tables, LONGEST)

    def step(self, gen: torch.Generator) -> None:
        batch, next_n = self.case.q.shape[:2]
        lengths = torch.randint(1, LONGEST + 1, (batch,), generator=gen, device="cuda", dtype=torch.int32)
        lengths.masked_fill_(torch.randint(0, ENDED, (batch,), generator=gen, device="cuda") == 0, 0)
        self.case.context_lens.copy_(lengths[:, None].expand(batch, next_n))
        self.result.fill_(torch.nan)
        self.graph.replay()
        eager = self.logits()
        column = torch.arange(LONGEST, device="cuda")
        there = column < lengths.repeat_interleave(next_n)[:, None]
        same = self.result.view(torch.int32) == eager.view(torch.int32)
        self.wrong += torch.where(there, ~same | self.result.isnan(), ~self.result.isnan()).any()
        self.steps += 1

    def found(self) -> dict[str, Any]:
        batch, next_n = self.case.q.shape[:2]
        return {"batch": batch, "next_n": next_n, "steps": self.steps, "wrong": int(self.wrong)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    gen, graphs = torch.Generator("cuda").manual_seed(args.seed), [Captured(*size) for size in SIZES]
    begin = time.monotonic()
    for graph in itertools.islice(itertools.cycle(graphs), args.steps):
        graph.step(gen)
    rows = [graph.found() for graph in graphs]
    seconds, wrong = round(time.monotonic() - begin, 1), sum(row["wrong"] for row in rows)
    print(*rows, f"{args.steps} steps in {seconds} s, {wrong} wrong", sep="\n")
    if args.out:
        about = {"sources_sha256": sources_sha256(), "longest": LONGEST, "seconds": seconds}
        write_report(args.out, about | {"rows": rows})
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
