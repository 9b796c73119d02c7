"""Time the logits of a router, alone and before a layer of Qwen3-30B, on one GPU.

    python -m benchmarks.layer.router_gemm --out benchmarks/results/router_gemm-<date>.json

`torch` is `torch.nn.functional.linear`, as vLLM calls it, `ours` is `router_gemm`: graphs replayed in turns, us of a
call. Alone, each call has weights of its own, together more than L2 holds. `layer` is the same before `routed_moe`.
`same_logits` is the share of equal logits, `same_ids` that of tokens with the same experts in the same order.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.layer.around_experts import CASES
from benchmarks.layer.before_after import replay_us
from benchmarks.report import write_report
from fp8moe_plugin.bench.layer import random_weights
from fp8moe_plugin.ops import choose_experts, routed_moe, router_gemm
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.testing import captured

CASE = CASES["qwen3-30b"]
ROUTERS = {"qwen3-30b": (2048, 128), "qwen3-235b": (4096, 128), "mixtral": (4096, 8), "deepseek-v3": (7168, 256)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
L2_BYTES = 80 << 20  # more than an H200's
LAYERS = 8
GEMMS = {"torch": linear, "ours": router_gemm}


def random_gates(count: int, experts: int, hidden: int) -> torch.Tensor:
    return torch.randn(count, experts, hidden, device="cuda").div(hidden**0.5).bfloat16()


def alone(name: str, tokens: int) -> dict[str, Any]:
    hidden, experts = ROUTERS[name]
    gates = random_gates(min(512, -(-L2_BYTES // (hidden * experts * 2))), experts, hidden)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    graphs = {kind: captured([partial(gemm, x, gate) for gate in gates]) for kind, gemm in GEMMS.items()}
    times = {f"{kind}_us": round(us / len(gates), 2) for kind, us in replay_us(graphs).items()}
    ours, theirs = router_gemm(x, gates[0]), linear(x, gates[0])
    topk = min(8, experts)
    ids = choose_experts(ours, topk)[1], choose_experts(theirs, topk)[1]
    same = {"same_logits": (ours == theirs).float().mean().item(), "same_ids": (ids[0] == ids[1]).all(1).float().mean()}
    return times | {key: round(float(value), 5) for key, value in same.items()}


def before_layer(weights: ExpertWeights, gates: torch.Tensor, tokens: int) -> dict[str, Any]:
    layer, topk = (*weights.w13, *weights.w2), CASE.experts.topk
    x = torch.randn(tokens, CASE.experts.hidden, device="cuda").bfloat16()
    out = torch.empty_like(x)

    def run(gemm: Any, gate: torch.Tensor) -> None:
        routed_moe(x, *layer, gemm(x, gate), topk, out=out)

    graphs = {kind: captured([partial(run, gemm, gate) for gate in gates]) for kind, gemm in GEMMS.items()}
    return {f"layer_{kind}_us": round(us / len(gates), 2) for kind, us in replay_us(graphs).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    weights, rows = random_weights(CASE.experts, torch.device("cuda")), []
    gates = random_gates(LAYERS, CASE.experts.experts, CASE.experts.hidden)
    for name in ROUTERS:
        for tokens in options.tokens:
            rows.append({"router": name, "tokens": tokens} | alone(name, tokens))
            if name == "qwen3-30b":
                rows[-1] |= before_layer(weights, gates, tokens)
            print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    write_report(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
