"""Time layers with and without batch invariance, on one GPU, in one run.

    python -m benchmarks.layer.batch_invariance --out benchmarks/results/batch_invariance-<date>.json

`us` is the default mode, `invariant_us` VLLM_BATCH_INVARIANT=1, `cost` the second over the first. MoE layers are those
of `graph_replays`, uniformly routed; dense layers are `fp8_linear` with weights of DeepSeek-V3. A time is the median of
CUDA-graph replays after a pause. `same_bits`: both modes give the same result; false where the default divides K or
takes the small-batch kernels.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer.dense_gemm import SHAPES as DENSE_SHAPES
from benchmarks.layer.dense_gemm import random_weights
from benchmarks.layer.graph_replays import SHAPES, Shape, draw, random_layer
from benchmarks.report import write_report
from fp8moe_plugin.bench.layer import time_calls
from fp8moe_plugin.ops import fp8_linear, fused_moe
from fp8moe_plugin.settings import BATCH_INVARIANT, batch_invariant

TOKENS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
DENSE_TOKENS = (1, 64, 256, 1024, 4096)
DENSE = ("q_a and kv_a", "o", "shared expert, gate and up")
Call = Callable[[], torch.Tensor]


@contextmanager
def invariance(wanted: bool) -> Iterator[None]:
    """Make layers batch-invariant or not, whatever the environment says."""
    before = os.environ.get(BATCH_INVARIANT)
    os.environ[BATCH_INVARIANT] = str(int(wanted))
    batch_invariant.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del os.environ[BATCH_INVARIANT]
        else:
            os.environ[BATCH_INVARIANT] = before
        batch_invariant.cache_clear()


def moe_calls(generator: torch.Generator, shape: Shape, layer: Any, tokens: int) -> list[Call]:
    """Calls with different routing, so that few weights are found in L2."""
    calls = 16 if tokens <= 128 else 4 if tokens <= 1024 else 1
    steps = [draw(generator, shape, tokens, "uniform") for _ in range(calls)]
    return [partial(fused_moe, x, *layer, weights, ids) for x, weights, ids in steps]


def dense_calls(copies: list[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> list[Call]:
    x = torch.randn(tokens, copies[0][0].shape[1], device="cuda").bfloat16()
    return [partial(fp8_linear, x, *copy) for copy in copies]


def measure(name: str, tokens: int, calls: list[Call]) -> dict[str, Any]:
    times, results = {}, []
    for wanted, key in ((False, "us"), (True, "invariant_us")):
        with invariance(wanted):
            times[key] = round(time_calls(calls), 2)
            results.append(calls[0]())
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
    generator, rows = torch.Generator("cuda").manual_seed(0), []
    print("layer                        tokens        us  invariant_us   cost  same bits")
    for name, shape in SHAPES.items():
        layer = random_layer(shape)
        rows += [measure(name, tokens, moe_calls(generator, shape, layer, tokens)) for tokens in TOKENS]
    for name in DENSE:
        copies = random_weights(*DENSE_SHAPES[name])
        rows += [measure(name, tokens, dense_calls(copies, tokens)) for tokens in DENSE_TOKENS]
    if args.out:
        write_report(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
