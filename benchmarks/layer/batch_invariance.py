"""Time layers with and without batch invariance, on one GPU, in one run.

    python -m benchmarks.layer.batch_invariance --out benchmarks/results/batch_invariance-<date>.json

`us` is the default mode, `invariant_us` VLLM_BATCH_INVARIANT=1, `cost` the second over the first. MoE layers are routed
uniformly; dense layers are `fp8_linear` with weights of DeepSeek-V3. A time is the median of CUDA-graph replays in
turns. `same_bits`: both modes give the same result; false where the default divides K or takes the small-batch kernels.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer import dense_gemm
from benchmarks.layer.before_after import LAYERS
from benchmarks.report import write_report
from fp8moe_plugin.bench.layer import make_case, random_weights
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.ops import fp8_linear, fused_moe
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.testing import captured, invariance, replay_us

TOKENS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
DENSE_TOKENS = (1, 64, 256, 1024, 4096)
MOE = ("qwen3-30b", "dsv3-tp8")
DENSE = ("q_a and kv_a", "o", "shared expert, gate and up")
Call = Callable[[], torch.Tensor]


def moe_calls(experts: Experts, weights: ExpertWeights, tokens: int) -> list[Call]:
    """Calls with different routing, so that few weights are found in L2."""
    case = make_case(experts, weights, tokens)
    layer = (*weights.w13, *weights.w2)
    return [partial(fused_moe, case.hidden_states, *layer, *routing) for routing in case.routings]


def dense_calls(copies: list[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> list[Call]:
    x = torch.randn(tokens, copies[0][0].shape[1], device="cuda").bfloat16()
    return [partial(fp8_linear, x, *copy) for copy in copies]


def measure(name: str, tokens: int, calls: list[Call]) -> dict[str, Any]:
    graphs, results = {}, []
    for wanted, key in ((False, "us"), (True, "invariant_us")):
        with invariance(wanted):
            graphs[key] = captured(calls)
            results.append(calls[0]())
    times = {key: round(us / len(calls), 2) for key, us in replay_us(graphs).items()}
    cost = round(times["invariant_us"] / times["us"], 3)
    row = {"layer": name, "tokens": tokens} | times | {"cost": cost, "same_bits": torch.equal(*results)}
    print(
        f"{name:28} {tokens:6} {row['us']:9.1f} {row['invariant_us']:12.1f} {cost:6.2f}  {row['same_bits']}", flush=True
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    print("layer                        tokens        us  invariant_us   cost  same bits")
    for name in MOE:
        weights = random_weights(LAYERS[name], torch.device("cuda"))
        rows += [measure(name, tokens, moe_calls(LAYERS[name], weights, tokens)) for tokens in TOKENS]
    for name in DENSE:
        copies = dense_gemm.random_weights(*dense_gemm.SHAPES[name])
        rows += [measure(name, tokens, dense_calls(copies, tokens)) for tokens in DENSE_TOKENS]
    if args.out:
        write_report(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
