"""What fewer kernels around the routed experts would save at most, in CUDA graphs, on one GPU.

    python -m benchmarks.layer.around_experts --out benchmarks/results/around_experts-<date>.json

Three pairs of graphs, today's kernels and fewer, replayed in turns:

- `shared expert`: router, routed experts and a shared expert as vLLM runs them (up to STREAM_TOKENS tokens, the shared
  expert runs on a second stream), and the sum; or the shared expert as one more expert of `fused_moe`.
- `silu, quantize`: silu-and-mul and quantize before the down projection of a shared expert or a dense MLP; or
  `silu_mul_quant_fp8`, one kernel for both.
- `top-k`: the router's top-k kernel before `fused_moe`; or `fused_moe` alone, as if its first kernel chose the experts
  in no time.

A graph has CALLS layers, with routings and shared experts of their own. Its time is divided by CALLS. `step_ms` is the
time for which a GPU is busy with a decode step (up to 256 tokens) or a prefill of the engine that the layer was
measured in, between the measured numbers of tokens interpolated; none was measured with DeepSeek-V3 on eight GPUs.
`saved_percent` is what all layers of that step would save.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer.before_after import replay_us
from benchmarks.report import installed, write_report
from fp8moe_plugin.bench.layer import random_weights
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.ops import fp8_linear, fused_moe, per_token_group_quant_fp8, silu_mul_quant_fp8
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.testing import captured

TOKENS = (1, 8, 64, 2048)
CALLS = 8
DENSE = "dense MLP"
STREAM_TOKENS = 256  # VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
ENGINES = Path(__file__).parents[2] / "docs/experiments/results/engine_e2e-2026-11-24.json"
# DeepSeek-V3's first three layers, two of them with experts, on one H200, 2026-11-24.
DSV3_STEPS = {1: 1.08, 16: 2.23, 64: 3.10, 256: 4.40, 1024: 6.65, 8192: 35.0}


class Case(NamedTuple):
    experts: Experts
    dense: int  # intermediate channels of the dense MLP on a GPU, 0 for none
    shared: bool
    groups: tuple[int, int] | None  # of the router's experts: in all, and how many of them a token may choose


CASES = {
    "dsv3-tp8": Case(Experts(1, 256, 8, 7168, 256), 18432 // 8, True, (8, 4)),
    "qwen3-30b": Case(Experts(1, 128, 8, 2048, 768), 0, False, None),
    "dsv3-tp1": Case(Experts(1, 256, 8, 7168, 2048), 18432, True, (8, 4)),
}
Call = Callable[[], Any]


def steps(name: str) -> tuple[dict[int, float], int] | None:
    """Milliseconds of a step by its number of tokens, and how many of its layers have experts."""
    if name == "dsv3-tp1":
        return DSV3_STEPS, 2
    if name != "qwen3-30b":
        return None
    rows = json.loads(ENGINES.read_text())["rows"]
    busy = {row["cell"]: row["gpu_busy_ms"] for row in rows if row["engine"] == "fp8moe" and row["model"] == "qwen3"}
    decode = {tokens: busy[f"decode {tokens}"] for tokens in (1, 16, 64, 256)}
    return decode | {1024: busy["prefill 1x1024"], 8192: busy["prefill 4x2048"]}, 24


def interpolated(points: dict[int, float], tokens: int) -> float:
    for (low, a), (high, b) in itertools.pairwise(points.items()):
        if low <= tokens <= high:
            return a + (b - a) * (tokens - low) / (high - low)
    raise ValueError(f"{tokens} tokens are beyond {list(points)}")


def top_k(case: Case, logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's router: weights float32 and ids int32, `[T, topk]`."""
    from vllm import _custom_ops

    topk = case.experts.topk
    if case.groups:
        return _custom_ops.grouped_topk(logits, *case.groups, topk, True, 2.5, bias, 1)
    weights = torch.empty(len(logits), topk, device=logits.device)
    ids, rows = (torch.empty(len(logits), topk, device=logits.device, dtype=torch.int32) for _ in range(2))
    _custom_ops.topk_softmax(weights, ids, rows, logits, True)
    return weights, ids


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    out = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
    torch.ops._C.silu_and_mul(out, gate_up)
    return out


def expert(x: torch.Tensor, weights: ExpertWeights, index: int) -> torch.Tensor:
    """One expert as dense layers: what vLLM runs for a shared expert."""
    (w13, w13_scale), (w2, w2_scale) = weights
    inner = silu_and_mul(fp8_linear(x, w13[index], w13_scale[index]))
    return fp8_linear(inner, w2[index], w2_scale[index])


def time_pair(today: list[Call], fewer: list[Call]) -> tuple[float, float]:
    times = replay_us({"today": captured(today), "fewer": captured(fewer)})
    return times["today"] / len(today), times["fewer"] / len(fewer)


def shared_expert(case: Case, weights: ExpertWeights, x: torch.Tensor, logits: list[torch.Tensor]) -> list[float]:
    """Microseconds of today's layer and of one with the shared expert among the others, and their relative L2."""
    experts, tokens = case.experts.experts, len(x)
    routed = ExpertWeights(*((values[:experts], scales[:experts]) for values, scales in weights))
    gate = torch.randn(experts, x.shape[1], device="cuda").bfloat16()
    bias, side = torch.zeros(experts, device="cuda"), torch.cuda.Stream()
    routings = [top_k(case, given, bias) for given in logits]
    with_shared = [
        (
            torch.cat([w, torch.ones(tokens, 1, device="cuda")], 1),
            torch.cat([ids, torch.full((tokens, 1), experts + i, device="cuda", dtype=torch.int32)], 1),
        )
        for i, (w, ids) in enumerate(routings)
    ]
    outs = [torch.empty_like(x) for _ in range(2)]

    def route() -> None:
        top_k(case, torch.mm(x, gate.T, out_dtype=torch.float32), bias)

    def today(i: int) -> None:
        main = torch.cuda.current_stream()
        apart = tokens <= STREAM_TOKENS
        if apart:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                shared = expert(x, weights, experts + i)
        else:
            shared = expert(x, weights, experts + i)
        route()
        fused_moe(x, *routed.w13, *routed.w2, *routings[i], out=outs[0])
        if apart:
            main.wait_stream(side)
        outs[0].add_(shared)

    def fewer(i: int) -> None:
        route()
        fused_moe(x, *weights.w13, *weights.w2, *with_shared[i], out=outs[1])

    times = time_pair([partial(today, i) for i in range(CALLS)], [partial(fewer, i) for i in range(CALLS)])
    error = (outs[0].float() - outs[1].float()).norm() / outs[0].float().norm()
    return [*times, error.item()]


def silu_quantize(tokens: int, channels: int) -> list[float]:
    """Microseconds of silu-and-mul and quantize, of one kernel, and of silu-and-mul alone."""
    inputs = [torch.randn(tokens, 2 * channels, device="cuda").bfloat16() for _ in range(CALLS)]
    counts = torch.tensor([tokens], device="cuda", dtype=torch.int32)

    def both(x: torch.Tensor) -> None:
        per_token_group_quant_fp8(silu_and_mul(x))

    fused: list[Call] = [partial(silu_mul_quant_fp8, x[None], counts) for x in inputs]
    times = time_pair([partial(both, x) for x in inputs], fused)
    return [*times, time_pair([partial(silu_and_mul, x) for x in inputs], fused)[0]]


def without_top_k(case: Case, weights: ExpertWeights, x: torch.Tensor, logits: list[torch.Tensor]) -> list[float]:
    """Microseconds of top-k and `fused_moe`, of `fused_moe`, and of top-k alone."""
    bias, experts = torch.zeros(case.experts.experts, device="cuda"), case.experts.experts
    (w13, w13_scale), (w2, w2_scale) = weights
    routed = w13[:experts], w13_scale[:experts], w2[:experts], w2_scale[:experts]
    out = torch.empty_like(x)

    def both(given: torch.Tensor) -> None:
        fused_moe(x, *routed, *top_k(case, given, bias), out=out)

    alone: list[Call] = [partial(fused_moe, x, *routed, *top_k(case, given, bias), out=out) for given in logits]
    times = time_pair([partial(both, given) for given in logits], alone)
    return [*times, time_pair([partial(top_k, case, given, bias) for given in logits], alone)[0]]


def row(part: str, name: str, tokens: int, today: float, fewer: float, **more: float) -> dict[str, Any]:
    found: dict[str, Any] = {"part": part, "layer": name, "tokens": tokens}
    saved = today - fewer
    found |= {"today_us": round(today, 2), "fewer_us": round(fewer, 2), "saved_us": round(saved, 2)}
    if measured := steps(name):
        step_ms = interpolated(measured[0], tokens)
        layers = 1 if part.endswith(DENSE) else measured[1]
        found |= {"step_ms": round(step_ms, 3), "saved_percent": round(saved * layers / step_ms / 10, 2)}
    found |= {key: round(value, 4) for key, value in more.items()}
    print(*(f"{key} {value}" for key, value in found.items()), flush=True)
    return found


def measure(name: str, case: Case, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    experts = case.experts
    copies = CALLS if case.shared else 0
    weights = random_weights(replace(experts, experts=experts.experts + copies), torch.device("cuda"))
    gen, rows = torch.Generator("cuda").manual_seed(0), []
    for count in tokens:
        x = torch.randn(count, experts.hidden, device="cuda", generator=gen).bfloat16()
        logits = [torch.randn(count, experts.experts, device="cuda", generator=gen) for _ in range(CALLS)]
        if case.shared:
            today, fewer, error = shared_expert(case, weights, x, logits)
            rows.append(row("shared expert", name, count, today, fewer, relative_l2=error))
        for part, channels in (("shared expert", experts.intermediate * case.shared), (DENSE, case.dense)):
            if channels:
                today, fewer, silu = silu_quantize(count, channels)
                rows.append(row(f"silu, quantize: {part}", name, count, today, fewer, silu_us=silu))
        today, fewer, alone = without_top_k(case, weights, x, logits)
        rows.append(row("top-k", name, count, today, fewer, top_k_us=alone))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import vllm._custom_ops  # noqa: F401 (registers vLLM's kernels)

    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for name in options.cases:
        rows += measure(name, CASES[name], options.tokens)
        torch.cuda.empty_cache()
        write_report(options.out, {"vllm": installed("vllm"), "rows": rows})


if __name__ == "__main__":
    main()
