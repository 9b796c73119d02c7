"""Time layers of experts beside vLLM's backends, in turns on one GPU: the first figures of README.md.

    python -m benchmarks.layer.moe_layer --out benchmarks/results/moe_layer-<date>.json
    python -m benchmarks.layer.moe_layer --skew 1.5 --out benchmarks/results/moe_layer-skew-<date>.json

`fp8moe-warmup bench` measures the layer of a checkpoint in the same way (`fp8moe_plugin/bench/layer.py`). `us` is the
time of a layer, `err` the relative L2 distance from float32 math, `first_s` the time of the first call, which may
include compilation.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer import before_after
from benchmarks.report import write_report
from fp8moe_plugin.bench.layer import make_ours, measure, random_weights
from fp8moe_plugin.bench.machine import check_machine
from fp8moe_plugin.bench.peers import PEERS, make_peer, set_up_vllm
from fp8moe_plugin.bench.result import OURS, BenchRow
from fp8moe_plugin.checkpoint.shapes import Experts
from warmup.report import installed

LAYERS = before_after.LAYERS | {
    "qwen3-235b-tp4": Experts(1, 128, 8, 4096, 384),
    "mixtral": Experts(1, 8, 2, 4096, 14336),
    "dsv3-ep8": Experts(1, 32, 1, 7168, 2048),  # of eight ranks: about one local expert for each token that arrives
}
MAKERS = {OURS: make_ours} | {name: partial(make_peer, name) for name in PEERS}


def point(layer: str, row: BenchRow) -> dict[str, Any]:
    found = {"shape": layer, "peer": row.backend, "T": row.tokens, "floor_us": row.floor_us}
    if row.error:
        return found | {"error": row.error}
    return found | {"us": row.us, "err": row.relative_l2, "first_s": row.first_call_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(before_after.LAYERS))
    parser.add_argument("--peers", nargs="+", choices=MAKERS, default=[OURS, "triton", "deepgemm"])
    parser.add_argument("--tokens", type=int, nargs="+", default=before_after.TOKENS)
    parser.add_argument("--skew", type=float, default=0.0, help="how unequally tokens choose experts")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    check_machine()
    makers = {name: MAKERS[name] for name in options.peers}
    points: list[dict[str, Any]] = []
    with set_up_vllm():
        for name in options.layers:
            weights = random_weights(LAYERS[name], torch.device("cuda"))
            rows = measure(
                makers, LAYERS[name], weights, options.tokens, partial(print, name, flush=True), options.skew
            )
            points += [point(name, row) for row in rows]
            write_report(options.out, {"vllm": installed("vllm"), "skew": options.skew, "rows": points})
            del weights
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
