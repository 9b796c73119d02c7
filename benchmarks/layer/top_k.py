"""Time layers that choose their experts themselves, compared with vLLM's top-k before `fused_moe`, on one GPU.

    python -m benchmarks.layer.top_k --out benchmarks/results/top_k-<date>.json

`vllm` is vLLM's top-k kernel and `fused_moe`, `ours` is `routed_moe`, and `alone` is `fused_moe` of ids that are there:
graphs of CALLS layers of Qwen3-30B with logits of their own, replayed in turns. `same_ids` is the share of tokens whose
experts and their order are those of vLLM's kernel; `weights` is the largest relative difference of their weights;
`bits` says whether `routed_moe` has the bits of `fused_moe` with the ids of `choose_experts`.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer.around_experts import CASES, top_k
from benchmarks.layer.before_after import replay_us
from benchmarks.report import installed, write_report
from fp8moe_plugin.bench.layer import random_weights
from fp8moe_plugin.ops import choose_experts, fused_moe, routed_moe
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.testing import captured

CASE = CASES["qwen3-30b"]
TOKENS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
CALLS = 8


def measure(weights: ExpertWeights, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    experts, gen = CASE.experts, torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, experts.hidden, device="cuda", generator=gen).bfloat16()
    logits = [torch.randn(tokens, experts.experts, device="cuda", generator=gen).to(dtype) for _ in range(CALLS)]
    layer, out, no_bias = (*weights.w13, *weights.w2), torch.empty_like(x), torch.empty(0, device="cuda")

    def vllm(given: torch.Tensor) -> None:
        fused_moe(x, *layer, *top_k(CASE, given, no_bias), out=out)

    topk = experts.topk
    graphs = {
        "vllm": captured([partial(vllm, given) for given in logits]),
        "ours": captured([partial(routed_moe, x, *layer, given, topk, out=out) for given in logits]),
        "alone": captured([partial(fused_moe, x, *layer, *top_k(CASE, given, no_bias), out=out) for given in logits]),
    }
    times = {f"{name}_us": round(us / CALLS, 2) for name, us in replay_us(graphs).items()}
    same, errors, bits = 0, [], True
    for given in logits:
        (w, ids), (expected_w, expected_ids) = choose_experts(given, topk), top_k(CASE, given, no_bias)
        equal = (ids == expected_ids).all(1)
        same += equal.sum().item()
        errors += ((w - expected_w) / expected_w)[equal].abs().flatten().tolist()
        results = routed_moe(x, *layer, given, topk), fused_moe(x, *layer, w, ids)
        bits &= torch.equal(*(result.view(torch.int16) for result in results))
    return times | {"same_ids": round(same / tokens / CALLS, 5), "weights": max(errors, default=None), "bits": bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import vllm._custom_ops  # noqa: F401 (registers vLLM's kernels)

    torch.manual_seed(0)
    weights, rows = random_weights(CASE.experts, torch.device("cuda")), []
    for tokens in options.tokens:
        for dtype in (torch.float32, torch.bfloat16):
            row = {"layer": "qwen3-30b", "tokens": tokens, "logits": str(dtype).removeprefix("torch.")}
            rows.append(row | measure(weights, tokens, dtype))
            print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    write_report(options.out, {"vllm": installed("vllm"), "rows": rows})


if __name__ == "__main__":
    main()
