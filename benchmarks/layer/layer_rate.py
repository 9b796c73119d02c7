"""Time a whole prefill layer, compared with DeepGEMM's two grouped GEMMs alone, on one GPU, in one run.

    python -m benchmarks.layer.layer_rate --out benchmarks/results/layer_rate-<date>.json

DeepSeek-V3's experts on one GPU. Our layer is `fused_moe` with uniformly random routing, from BF16 tokens to BF16
tokens. DeepGEMM gets its best case: the same number of rows for every expert, a multiple of 128, quantized and sorted
beforehand; no activation and no combine. `rate` is useful arithmetic, 6 x tokens x topk x hidden x intermediate.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer.grouped_gemm import (
    ALIGNMENT,
    EXPERTS,
    TOPK,
    random_weights,
    row_counts,
    time_deepgemm_contiguous,
)
from benchmarks.layer.operands import Pair
from benchmarks.report import write_report
from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.testing import time_calls

HIDDEN, INTERMEDIATE = 7168, 2048


def time_layer(tokens: int, w13: Pair, w2: Pair) -> tuple[float, float]:
    """Microseconds, burst and sustained."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    weights, experts = torch.rand(tokens, EXPERTS, device="cuda").topk(TOPK)
    ids = experts.int()
    out = torch.empty_like(x)
    return time_calls(lambda: fused_moe(x, *w13, *w2, weights, ids, out=out))


def measure(tokens: int, w13: Pair, w2: Pair) -> dict[str, Any]:
    import vllm.third_party.deep_gemm as deep_gemm

    layer = time_layer(tokens, w13, w2)
    gemms = [time_deepgemm_contiguous(deep_gemm, b, row_counts(tokens, even=True)) for b in (w13, w2)]
    flop = 6 * tokens * TOPK * HIDDEN * INTERMEDIATE
    row: dict[str, Any] = {"tokens": tokens}
    for mode, ours, peers in zip(("burst", "sustained"), layer, zip(*gemms, strict=True), strict=True):
        row[mode] = {
            "layer_us": ours,
            "deepgemm_us": peers,
            "layer_tflops": flop / ours / 1e6,
            "deepgemm_tflops": flop / sum(peers) / 1e6,
            "layer_over_deepgemm": sum(peers) / ours,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="32768", help="multiples of 4096, separated by commas")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    steps = [int(tokens) for tokens in args.tokens.split(",")]
    if any(tokens <= 0 or tokens * TOPK % (ALIGNMENT * EXPERTS) for tokens in steps):
        parser.error(
            f"--tokens {args.tokens}: must be multiples of {ALIGNMENT * EXPERTS // TOPK}: {ALIGNMENT} rows per expert"
        )
    torch.manual_seed(0)
    w13, w2 = random_weights(2 * INTERMEDIATE, HIDDEN), random_weights(HIDDEN, INTERMEDIATE)
    rows = []
    for tokens in steps:
        rows.append(measure(tokens, w13, w2))
        for mode in ("burst", "sustained"):
            found = rows[-1][mode]
            print(
                f"T={tokens:6} {mode:9} layer {found['layer_us']:8.0f} us, {found['layer_tflops']:5.0f} TFLOP/s; "
                f"DeepGEMM's GEMMs {sum(found['deepgemm_us']):8.0f} us, {found['deepgemm_tflops']:5.0f} TFLOP/s: "
                f"x{found['layer_over_deepgemm']:.3f}",
                flush=True,
            )
    if args.out:
        write_report(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
