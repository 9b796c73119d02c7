"""Time the experts of models of 2026 with their activations, beside vLLM's backends on the same weights, in turns.

    python -m benchmarks.layer.models_layer --out benchmarks/results/models_layer-<date>.json

All experts are on one GPU. `peers` has the microseconds of each backend, or why it cannot compute the layer.
`without limit` is our layer with plain SwiGLU, which is as fast if the limit costs nothing.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.report import write_report
from fp8moe_plugin.bench.layer import check_machine, make_ours, measure, random_weights
from fp8moe_plugin.bench.peers import PEERS, make_peer, set_up_vllm
from fp8moe_plugin.bench.result import OURS, BenchRow
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from warmup.report import installed


class Layer(NamedTuple):
    experts: Experts
    activation: Activation = SILU
    ue8m0: bool = False


MODELS = {
    "DeepSeek-V4-Flash": Layer(Experts(1, 256, 6, 4096, 2048), Activation(limit=10.0), ue8m0=True),
    "GLM-5.3-Flash": Layer(Experts(1, 288, 8, 4096, 2048), Activation(limit=10.0)),
    "MiniMax-M3": Layer(Experts(1, 128, 4, 6144, 3072), Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)),
    "Qwen3.6-35B-A3B": Layer(Experts(1, 256, 8, 2048, 512)),
    "Qwen3.8-Flash-Next": Layer(Experts(1, 512, 10, 2560, 640)),
    "Laguna-S-2.1": Layer(Experts(1, 256, 10, 3072, 1024)),
}
TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
WITHOUT_LIMIT = "without limit"


def measure_model(name: str, peers: list[str], tokens: list[int]) -> list[dict[str, Any]]:
    experts, activation, ue8m0 = MODELS[name]
    spec = LayerSpec(MoeShape.of(experts, experts.experts), ue8m0=ue8m0, activation=activation)
    makers: dict[str, Any] = {OURS: partial(make_ours, spec=spec)}
    makers |= {peer: partial(make_peer, peer, activation=activation) for peer in peers}
    if activation.kind == SILU.kind and activation.limit:  # random gates do not reach the limit
        makers[WITHOUT_LIMIT] = partial(make_ours, spec=spec._replace(activation=SILU))
    weights = random_weights(experts, torch.device("cuda"))
    show = partial(print, name, flush=True)
    rows = measure(makers, experts, weights, tokens, show, activation=activation)
    return [point(name, [row for row in rows if row.tokens == count]) for count in tokens]


def point(name: str, rows: list[BenchRow]) -> dict[str, Any]:
    results = {row.backend: row.error or round(row.us or 0, 2) for row in rows}
    about = {"model": name, "format": "block-FP8", "tokens": rows[0].tokens, "us": results.pop(OURS)}
    errors = {row.backend: round(row.relative_l2, 4) for row in rows if row.relative_l2 is not None}
    return about | {"peers": results, "relative_l2": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["triton", "deepgemm"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    check_machine()
    points: list[dict[str, Any]] = []
    with set_up_vllm():
        for name in options.models:
            points += measure_model(name, options.peers, options.tokens)
            write_report(options.out, {"vllm": installed("vllm"), "rows": points})
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
