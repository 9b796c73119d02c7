"""Time the dense FP8 linear layer, compared with vLLM's CUTLASS GEMM and DeepGEMM, on one GPU, in one run.

    python -m benchmarks.layer.dense_gemm --out benchmarks/results/dense_gemm-<date>.json

`gemm` is the GEMM alone on quantized activations; `linear` quantizes BF16 activations first. Ours is `fp8_linear`, the
peers' is vLLM's quantization followed by their GEMM. Scales of activations are FP32 for all, one per token and 128
channels, with contiguous tokens (MN-major); the stride between groups is M floats for CUTLASS, and M rounded up to 16
bytes for ours and DeepGEMM. Scales of weights are `[N/128, K/128]` for all, as in a checkpoint.

A weight of less than 150 MB has copies that together exceed it, called in turn, so that none is found in L2. A time is
that of one call: the median of CUDA-graph replays after a pause (`burst`, the plain `_us`) and in steady state
(`sustained`). Results are compared with float32 arithmetic on the quantized operands, as a relative L2 distance.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer.operands import Pair, random_fp8, random_scales
from benchmarks.report import results_or_errors, write_report
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.ops import fp8_gemm_nt, fp8_linear, per_token_group_quant_fp8, reference
from fp8moe_plugin.testing import time_calls
from warmup.report import installed

SHAPES = {  # of DeepSeek-V3: weights [N, K]
    "q_a and kv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "kv_b": (32768, 512),
    "o": (7168, 16384),
    "shared expert, gate and up": (4096, 7168),
    "shared expert, down": (7168, 2048),
    "dense MLP, down": (7168, 18432),
    "dense MLP, gate and up": (36864, 7168),
}
COLD_BYTES = 150e6  # three times the L2 of an H200
CHECKED_ROWS = 64
WRONG = 0.01  # relative L2; rounding results to BF16 causes 0.002
TIMES = ("gemm_us", "gemm_sustained_us", "linear_us", "linear_sustained_us")


class Backend(NamedTuple):
    """One implementation; `Pair` is values and scales, first of the activations, then of the weights."""

    quantize: Callable[[torch.Tensor], Pair]
    gemm: Callable[[Pair, Pair], torch.Tensor]
    linear: Callable[[torch.Tensor, Pair], torch.Tensor]


def ours() -> Backend:
    def gemm(a: Pair, b: Pair) -> torch.Tensor:
        return fp8_gemm_nt(a, b, empty_result(a, b))

    return Backend(per_token_group_quant_fp8, gemm, lambda x, b: fp8_linear(x, *b))


def cutlass() -> Backend:
    from vllm import _custom_ops

    def gemm(a: Pair, b: Pair) -> torch.Tensor:
        return _custom_ops.cutlass_scaled_mm(a[0], b[0].T, a[1], b[1].T, torch.bfloat16)

    return peer(gemm, tma_aligned_scales=False)


def deepgemm() -> Backend:
    from vllm.utils.deep_gemm import fp8_gemm_nt as deepgemm_nt  # sets DeepGEMM up as in an engine

    def gemm(a: Pair, b: Pair) -> torch.Tensor:
        out = empty_result(a, b)
        deepgemm_nt(a, b, out, is_deep_gemm_e8m0_used=False)
        return out

    return peer(gemm, tma_aligned_scales=True)


def peer(gemm: Callable[[Pair, Pair], torch.Tensor], tma_aligned_scales: bool) -> Backend:
    """vLLM's quantization, then this GEMM, called as by vLLM's linear layers."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    def quantize(x: torch.Tensor) -> Pair:
        return fp8_utils.per_token_group_quant_fp8(
            x, GROUP, column_major_scales=True, tma_aligned_scales=tma_aligned_scales, use_ue8m0=False
        )

    return Backend(quantize, gemm, lambda x, b: gemm(quantize(x), b))


BACKENDS = {"fp8moe": ours, "cutlass": cutlass, "deepgemm": deepgemm}


def empty_result(a: Pair, b: Pair) -> torch.Tensor:
    return torch.empty((a[0].shape[0], b[0].shape[0]), dtype=torch.bfloat16, device=a[0].device)


def measure(backend: Backend, x: torch.Tensor, weights: list[Pair]) -> dict[str, Any]:
    """Returns the times and errors of one backend; `weights` are the copies, used in turn."""
    a, b = backend.quantize(x), weights[0]
    rows = slice(None, None, max(1, len(x) // CHECKED_ROWS))
    errors = {
        "gemm_relative_l2": relative_l2(backend.gemm(a, b)[rows], (a[0][rows], a[1][rows]), b),
        "linear_relative_l2": relative_l2(backend.linear(x, b)[rows], reference.quantize(x[rows]), b),
    }
    if not all(error < WRONG for error in errors.values()):  # true for NaN, too
        raise ArithmeticError(f"wrong results: {errors}")
    gemm = time_in_turn(lambda copy: backend.gemm(a, copy), weights)
    linear = time_in_turn(lambda copy: backend.linear(x, copy), weights)
    return dict(zip(TIMES, gemm + linear, strict=True)) | errors | {"scale_strides": list(a[1].stride())}


def relative_l2(out: torch.Tensor, a: Pair, b: Pair) -> float:
    want = reference.gemm(a, b)
    return ((out.float() - want).norm() / want.norm()).item()


def time_in_turn(call: Callable[[Pair], Any], weights: list[Pair]) -> tuple[float, float]:
    """Microseconds of a call, burst and sustained, in graphs with one call per copy of the weight."""

    def calls() -> None:
        for copy in weights:
            call(copy)

    burst, sustained = time_calls(calls)
    return burst / len(weights), sustained / len(weights)


def random_weights(n: int, k: int, block: tuple[int, int] = (GROUP, GROUP)) -> list[Pair]:
    """Returns copies of a weight `[N, K]` with a scale per block."""
    copies = math.floor(COLD_BYTES / (n * k)) + 1
    scales = (ceil_div(n, block[0]), k // block[1])
    return [(random_fp8((n, k)), random_scales(scales, k)) for _ in range(copies)]


def measure_all(x: torch.Tensor, weights: list[Pair]) -> dict[str, dict[str, Any]]:
    return results_or_errors(BACKENDS, lambda make: measure(make(), x, weights))


def line(result: dict[str, Any]) -> str:
    if "error" in result:
        return str(result["error"])
    return (
        f"gemm {result['gemm_us']:7.1f} us, sustained {result['gemm_sustained_us']:7.1f}, error "
        f"{result['gemm_relative_l2']:.1e}; linear {result['linear_us']:7.1f}, sustained "
        f"{result['linear_sustained_us']:7.1f}, error {result['linear_relative_l2']:.1e}"
    )


def best_peer_over_ours(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    peers = [result for name, result in results.items() if name != "fp8moe" and "error" not in result]
    if "error" in results["fp8moe"] or not peers:
        return {}
    return {time: min(result[time] for result in peers) / results["fp8moe"][time] for time in TIMES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="4096", help="rows of activations, separated by commas")
    parser.add_argument("--out", type=Path, help="the report, rewritten after each shape")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for layer, (n, k) in SHAPES.items():
        weights = random_weights(n, k)
        for tokens in map(int, args.tokens.split(",")):
            case = {"layer": layer, "n": n, "k": k, "tokens": tokens, "weight_copies": len(weights)}
            print(f"{n}x{k} ({layer}), {tokens} tokens, {len(weights)} copies of the weight", flush=True)
            results = measure_all(torch.randn(tokens, k, device="cuda").bfloat16(), weights)
            for name, result in results.items():
                rows.append(case | {"backend": name} | result)
                print(f"  {name:8} {line(result)}", flush=True)
            if found := best_peer_over_ours(results):
                ratios.append(case | found)
                shown = [f"{found[time]:.2f}" for time in TIMES]
                print(
                    f"  best peer / ours: gemm x{shown[0]}, sustained x{shown[1]}; "
                    f"linear x{shown[2]}, sustained x{shown[3]}",
                    flush=True,
                )
        del weights
        torch.cuda.empty_cache()
        if args.out:
            versions = {name: installed(name) for name in ("vllm", "fp8moe-plugin")}
            write_report(args.out, versions | {"rows": rows, "best_peer_over_ours": ratios})


if __name__ == "__main__":
    main()
