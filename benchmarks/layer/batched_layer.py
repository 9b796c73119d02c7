"""Time `batched_experts` beside what vLLM runs for DeepEP's low-latency mode with DeepGEMM, in turns on one GPU.

    python -m benchmarks.layer.batched_layer --out benchmarks/results/batched_layer-<date>.json

DeepGEMM's side is vLLM's `BatchedDeepGemmExperts`: a masked GEMM, SwiGLU with quantization, a masked GEMM, and rows per
expert that vLLM rounds up to a multiple of 16. Both get the same weights, and tokens in DeepEP's layout: a slab for
each expert with room for any step, scales of consecutive rows next to each other. An expert's rows follow a Poisson
distribution. `relative_l2` is the distance from float32 math on dequantized operands. DeepGEMM compiles a kernel for
each shape and number of rows at first use.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer.operands import random_fp8
from benchmarks.report import results_or_errors, write_report
from fp8moe_plugin.bench.layer import WRONG, float32_layer, random_weights
from fp8moe_plugin.bench.machine import check_machine
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.ops import batched_experts
from fp8moe_plugin.ops.operands import ExpertWeights, Quantized
from fp8moe_plugin.testing import captured, replay_us
from warmup.report import installed

ROWS = (4, 8, 16, 24, 32, 48, 64, 128)  # of each expert, on average
OURS, DEEPGEMM = "fp8moe", "deepgemm"
CALLS = 4  # in a graph, so that its launch does not count
DEEPGEMM_ROWS = 16  # vLLM rounds rows up to a multiple of it


class Slabs(NamedTuple):
    experts: Experts  # of one rank
    rows: int  # of each expert's slab: ranks times 128 tokens


SHAPES = {
    "V3 EP8": Slabs(Experts(1, 32, 8, 7168, 2048), 1024),
    "V3 EP32": Slabs(Experts(1, 8, 8, 7168, 2048), 4096),
    "Qwen3-30B EP4": Slabs(Experts(1, 32, 8, 2048, 768), 512),
}
Call = Callable[[torch.Tensor], Any]  # writes the result to bfloat16 [E, rows of a slab, H]


def tokens_of(slabs: Slabs) -> Quantized:
    """Returns e4m3 `[E, M, H]` and its scales `[E, M, H/128]` with consecutive rows next to each other."""
    shape = slabs.experts.experts, slabs.rows, slabs.experts.hidden
    scales = (torch.rand(shape[0], shape[2] // 128, shape[1], device="cuda") + 0.5) / 110
    return random_fp8(shape), scales.mT


def make_ours(tokens: Quantized, weights: ExpertWeights, counts: torch.Tensor, rows: int) -> Call:
    return lambda out: batched_experts(*tokens, *weights.w13, *weights.w2, counts, expected_m=rows, out=out)


def make_deepgemm(tokens: Quantized, weights: ExpertWeights, counts: torch.Tensor, rows: int) -> Call:
    from vllm.model_executor.layers.fused_moe.experts.batched_deep_gemm_moe import persistent_masked_m_silu_mul_quant
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT, fp8_m_grouped_gemm_nt_masked, is_deep_gemm_e8m0_used

    is_deep_gemm_e8m0_used()  # finds DeepGEMM, which the next line needs
    DeepGemmQuantScaleFMT.init_oracle_cache()
    expected = -(-rows // DEEPGEMM_ROWS) * DEEPGEMM_ROWS
    slabs = tokens[0].shape[:2]
    gate_up = torch.empty(*slabs, weights.w13[0].shape[1], dtype=torch.bfloat16, device="cuda")

    def call(out: torch.Tensor) -> None:
        fp8_m_grouped_gemm_nt_masked(tokens, weights.w13, gate_up, counts, expected)
        q = persistent_masked_m_silu_mul_quant(gate_up, counts, quant_scale_fmt=DeepGemmQuantScaleFMT.from_oracle())
        fp8_m_grouped_gemm_nt_masked(q, weights.w2, out, counts, expected)

    return call


MAKERS = {OURS: make_ours, DEEPGEMM: make_deepgemm}


def relative_l2(out: torch.Tensor, tokens: Quantized, weights: ExpertWeights, counts: torch.Tensor) -> float:
    """Returns the distance of the busiest expert's rows from float32 math."""
    busiest = int(counts.argmax())
    used = slice(int(counts[busiest]))
    q, scales = (part[busiest, used] for part in tokens)
    x = (q.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2)
    ids = torch.full((len(x), 1), busiest, device="cuda")
    expected = float32_layer(weights, x, torch.ones_like(ids), ids)
    return float((out[busiest, used].float() - expected).norm() / expected.norm())


def measure(tokens: Quantized, weights: ExpertWeights, rows: int) -> dict[str, Any]:
    """Returns the figures of both for a number of rows per expert."""
    expected_rows = torch.full((tokens[0].shape[0],), float(rows), device="cuda")
    counts = torch.poisson(expected_rows).clamp(1, tokens[0].shape[1]).int()

    def capture(make: Callable[..., Call]) -> dict[str, Any]:
        out = torch.empty(tokens[0].shape, dtype=torch.bfloat16, device="cuda")
        call = make(tokens, weights, counts, rows)
        call(out)
        if not (error := relative_l2(out, tokens, weights, counts)) < WRONG:  # true for NaN, too
            raise ArithmeticError(f"the result is wrong: relative L2 distance {error:.2g} from float32 math")
        return {"graph": captured([partial(call, out)] * CALLS), "relative_l2": round(error, 5), "out": out}

    found = results_or_errors(MAKERS, capture)
    times = replay_us({name: result["graph"] for name, result in found.items() if "graph" in result})
    errors = {name: result["error"] for name, result in found.items() if "error" in result}
    distances = {name: result["relative_l2"] for name, result in found.items() if "relative_l2" in result}
    return {"us": {name: round(us / CALLS, 2) for name, us in times.items()}, "relative_l2": distances} | (
        {"errors": errors} if errors else {}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of each expert, on average")
    parser.add_argument("--out", type=Path, required=True, help="the report, rewritten after each shape")
    options = parser.parse_args()
    check_machine()
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "1")
    torch.manual_seed(0)
    points: list[dict[str, Any]] = []
    for name, slabs in SHAPES.items():
        tokens, weights = tokens_of(slabs), random_weights(slabs.experts, torch.device("cuda"))
        for rows in options.rows:
            points.append({"shape": name, "rows_per_expert": rows} | measure(tokens, weights, rows))
            print(*points[-1].values(), flush=True)
        write_report(options.out, {"vllm": installed("vllm"), "rows": points})
        del tokens, weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
