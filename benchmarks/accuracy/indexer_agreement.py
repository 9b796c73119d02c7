"""The indexer's logits in an engine of vLLM: our ops beside DeepGEMM, in the same calls and by the same greedy tokens.

    python -m benchmarks.checkpoints.synthetic --preset dsv32-3layer --moe-layers 1 --experts 16 --out DIR
    python -m benchmarks.accuracy.indexer_agreement --model DIR --out benchmarks/results/indexer_agreement-<date>.json

First, each call of the logits is computed by both, on the arguments of the engine. For every row with more positions
than the indexer selects, `selected_apart` counts positions that only one of both would select, and `not_ties` those
among them whose logit is further from the last selected one than the difference of the two computations explains.

Then the engine answers the prompts four times, in turns with our logits and DeepGEMM's. `equal` is the number of tokens
that agree before the first difference, per prompt; a pair of answers by the same logits shows what vLLM itself varies.
"""

import argparse
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import read_config
from benchmarks.report import write_report

PROMPTS, GENERATED = (7000, 3000, 2500, 5000), 32
NAMES = ("_fp8_fp4_mqa_logits_impl", "_fp8_fp4_paged_mqa_logits_impl", "_get_paged_mqa_logits_metadata_impl")
Op = Callable[..., torch.Tensor]


class Logits:
    """vLLM's look-up of the ops. The engine calls ours or DeepGEMM's, or both on the same arguments to compare them."""

    def __init__(self, selects: int) -> None:
        import vllm.utils.deep_gemm as look_up

        self.selects, self.rows = selects, []
        self.look_up, self.ours = look_up, tuple(getattr(look_up, name) for name in NAMES)
        self.theirs: tuple[Op, ...] = tuple(vars(op)["theirs"] for op in self.ours)

    def use(self, ops: tuple[Op, ...]) -> None:
        for name, op in zip(NAMES, ops, strict=True):
            setattr(self.look_up, name, op)

    def use_both(self) -> None:
        self.use((self.prefill, self.paged, self.metadata))

    def prefill(self, q: Any, kv: Any, weights: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, **more: Any) -> Any:
        mine, other = (ops[0](q, kv, weights, ks, ke, **more) for ops in (self.ours, self.theirs))
        self.compare("prefill", mine, other, ks[:, None], ke[:, None])
        return mine

    def metadata(self, *args: Any) -> torch.Tensor:
        self.their_metadata = self.theirs[2](*args)
        return self.ours[2](*args)

    def paged(
        self, q: Any, kv: Any, weights: Any, lens: torch.Tensor, table: Any, plan: Any, *rest: Any, **more: Any
    ) -> Any:
        mine = self.ours[1](q, kv, weights, lens, table, plan, *rest, **more)
        other = self.theirs[1](q, kv, weights, lens, table, self.their_metadata, *rest, **more)
        self.compare("paged", mine, other, 0, lens.reshape(-1, 1))
        return mine

    def compare(self, op: str, mine: torch.Tensor, other: torch.Tensor, begin: Any, end: torch.Tensor) -> None:
        at = torch.arange(mine.shape[1], device=mine.device)
        valid = (begin <= at) & (at < end)
        mine, other = (logits.masked_fill(~valid, -torch.inf) for logits in (mine, other))
        off = (mine - other).masked_fill(~valid, 0).abs().amax(1)
        long = valid.sum(1) > self.selects
        row = {"op": op, "rows": len(mine), "rows_that_select": int(long.sum()), "columns": mine.shape[1]}
        row["largest_difference"] = off.max().item()
        row["largest_logit"] = mine.masked_fill(~valid, 0).abs().max().item()
        row |= self.selected(mine[long], other[long], off[long]) if row["rows_that_select"] else {}
        self.rows.append(row)

    def selected(self, mine: torch.Tensor, other: torch.Tensor, off: torch.Tensor) -> dict[str, int]:
        best = mine.topk(self.selects)
        chosen = torch.zeros_like(mine, dtype=torch.bool).scatter_(1, best.indices, True)
        apart = chosen ^ torch.zeros_like(chosen).scatter_(1, other.topk(self.selects).indices, True)
        # Logits that are off by at most `off` move the last selected one by `off`, too.
        far = (mine - best.values[:, -1:]).abs() > 2 * off[:, None]
        return {"selected_apart": int(apart.sum()), "not_ties": int((apart & far).sum())}


def answers(llm: Any, vocab: int, tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(2, vocab) for _ in range(length)]} for length in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]


def equal(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a DeepSeek-V3.2 checkpoint")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its look-up is replaced in this process
    from vllm import LLM

    llm = LLM(
        model=str(args.model),
        quantization="fp8moe",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=len(PROMPTS),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=4 << 30,
    )
    config = read_config(args.model)
    logits = Logits(config["index_topk"])
    logits.use_both()
    answers(llm, config["vocab_size"], GENERATED)
    given = []
    for name, ops in (("ours", logits.ours), ("deepgemm", logits.theirs)) * 2:
        logits.use(ops)
        given.append((name, answers(llm, config["vocab_size"], GENERATED)))
    pairs = [
        {"one": one, "other": other, "equal": [equal(a, b) for a, b in zip(x, y, strict=True)], "of": GENERATED}
        for (one, x), (other, y) in itertools.combinations(given, 2)
    ]
    print(*pairs, *logits.rows[:4], *logits.rows[-2:], sep="\n")
    for op in ("prefill", "paged"):
        rows = [row for row in logits.rows if row["op"] == op]
        apart, far = (sum(row.get(key, 0) for row in rows) for key in ("selected_apart", "not_ties"))
        print(f"{op}: {len(rows)} calls, {apart} positions selected by one alone, {far} of them no ties")
    if args.out:
        write_report(args.out, {"answers": pairs, "rows": logits.rows})


if __name__ == "__main__":
    main()
