"""Time layers of experts in MXFP4 beside the same weights in block FP8, and beside other kernels, in turns on one GPU.

    python -m benchmarks.layer.mxfp4_layer --out benchmarks/results/mxfp4_layer-<date>.json

`us` is our layer from packed MXFP4, `fp8_us` the one from block FP8, which represents these weights exactly. Both round
activations of DeepSeek-V4 in the same way. `peers`: see `benchmarks.layer.fp4_peers`. gpt-oss's layers have biases as
well, which are left out.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer.fp4_peers import FP4_PEERS, compile_humming, make_packed, make_peers
from benchmarks.report import write_report
from fp8moe_plugin.bench.layer import make_ours, measure
from fp8moe_plugin.bench.machine import check_machine
from fp8moe_plugin.bench.packed import in_block_fp8, random_mxfp4
from fp8moe_plugin.bench.peers import set_up_vllm
from fp8moe_plugin.bench.result import OURS, BenchRow
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from warmup.report import installed

V4, OAI = Activation(limit=10.0), Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)


class Shape(NamedTuple):
    experts: Experts
    activation: Activation = V4
    ue8m0: bool = True


SHAPES = {
    "V4-Flash EP1": Shape(Experts(1, 256, 6, 4096, 2048)),
    "V4-Flash TP8": Shape(Experts(1, 256, 6, 4096, 256)),
    "V4-Pro EP8": Shape(Experts(1, 48, 1, 7168, 3072)),  # about one local expert for each token that arrives
    "gpt-oss-120b": Shape(Experts(1, 128, 4, 2944, 2944), OAI, ue8m0=False),  # 2880, in whole blocks
}
TOKENS = (1, 8, 16, 64, 256, 1024, 4096, 8192, 16384)
IN_FP8 = "block-FP8"


def measure_shape(name: str, peers: list[str], tokens: list[int]) -> list[dict[str, Any]]:
    experts, activation, ue8m0 = SHAPES[name]
    spec = LayerSpec(MoeShape.of(experts, experts.experts), ue8m0=ue8m0, activation=activation)
    stored = random_mxfp4(experts, torch.device("cuda"))
    makers = {OURS: make_packed(stored, spec), IN_FP8: partial(make_ours, spec=spec)}
    makers |= make_peers(peers, experts, stored, activation)
    show = partial(print, name, flush=True)
    rows = measure(makers, experts, in_block_fp8(stored), tokens, show, activation=activation)
    return [point(name, [row for row in rows if row.tokens == count]) for count in tokens]


def point(name: str, rows: list[BenchRow]) -> dict[str, Any]:
    results = {row.backend: row.error or round(row.us or 0, 2) for row in rows}
    ours = {"us": results.pop(OURS), "fp8_us": results.pop(IN_FP8)}
    errors = {row.backend: round(row.relative_l2, 4) for row in rows if row.relative_l2 is not None}
    return {"shape": name, "tokens": rows[0].tokens} | ours | {"peers": results, "relative_l2": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--peers", nargs="+", choices=FP4_PEERS, default=list(FP4_PEERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    check_machine()
    compile_humming(options.peers, [SHAPES[name][:2] for name in options.shapes], options.tokens)
    points: list[dict[str, Any]] = []
    about = {name: installed(name) for name in ("vllm", "humming-kernels", "flashinfer-python")}
    with set_up_vllm():
        for name in options.shapes:
            points += measure_shape(name, options.peers, options.tokens)
            write_report(options.out, about | {"rows": points})
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
