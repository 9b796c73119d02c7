"""Time the layer on our Triton kernels beside vLLM's Triton backend, in turns, on one GPU.

    python -m benchmarks.layer.triton_backend --out benchmarks/results/moe_layer_triton_backend-<date>.json

`ratio` is vLLM's time by ours. With `--tiles`, each point also has our time in every other kind of tile, from which
`TRITON_FEW_ROWS` and `TRITON_SMALL_BATCH` were chosen; `small` are the kernels for small batches.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["FP8MOE_BACKEND"] = "triton"

import torch

from benchmarks.layer.before_after import LAYERS, TOKENS
from benchmarks.report import write_report
from fp8moe_plugin.bench.layer import Case, make_case, make_ours, random_weights
from fp8moe_plugin.bench.peers import Layer, make_peer, set_up_vllm
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.launches.backend import Plan as LayerPlan
from fp8moe_plugin.launches.triton import Triton
from fp8moe_plugin.launches.triton.layer import layer_launches
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.plan.spec import LayerSpec
from fp8moe_plugin.plan.triton.catalog import EXPERT_TILE_ROWS
from fp8moe_plugin.plan.triton.plans import TritonStepPlan, triton_small_batch_step, triton_step
from fp8moe_plugin.testing import captured, replay_us

SMALL_BATCH_UP_TO = 16  # tokens for which --tiles times the kernels for small batches
OURS, PEER = "triton", "vllm"
PEER_BACKEND = "triton"  # in `bench.peers`

Plan = Callable[..., TritonStepPlan]


def capture(layer: Layer, case: Case) -> tuple[torch.cuda.CUDAGraph, float]:
    """Returns a graph of a layer's calls, and its relative L2 distance from float32 math."""
    out = layer(case.hidden_states, *case.routings[0])[: len(case.expected)].float()
    error = ((out - case.expected).norm() / case.expected.norm()).item()
    return captured([partial(layer, case.hidden_states, *routing) for routing in case.routings]), error


def planned_by(plan: Plan, make: Callable[[], Any]) -> Any:
    """Returns what `make` returns if the layer has such plans."""
    planned = Triton.plan_layer

    def plan_layer(self: Triton, spec: LayerSpec, tokens: int, multiprocessors: int) -> LayerPlan:
        step = plan(self.target, spec, tokens)
        return LayerPlan(step, step.scratch.nbytes, partial(layer_launches, step))

    Triton.plan_layer = plan_layer
    try:
        return make()
    finally:
        Triton.plan_layer = planned


def measure(experts: Experts, weights: ExpertWeights, tokens: int, tiles: bool) -> dict[str, Any]:
    case = make_case(experts, weights, tokens)
    ours = make_ours(experts, weights, tokens)
    made = {OURS: capture(ours, case), PEER: capture(make_peer(PEER_BACKEND, experts, weights, tokens), case)}
    if tiles:
        kinds: dict[str, Plan] = {str(height): partial(triton_step, height=height) for height in EXPERT_TILE_ROWS}
        if tokens <= SMALL_BATCH_UP_TO:
            kinds["small"] = triton_small_batch_step
        for name, plan in kinds.items():
            made[name] = planned_by(plan, lambda: capture(ours, case))
    times = replay_us({name: graph for name, (graph, _) in made.items()})
    point: dict[str, Any] = {"tokens": tokens}
    for name, us in times.items():
        point[f"{name}_us"] = round(us / len(case.routings), 2)
    errors = {f"{name}_error": round(made[name][1], 5) for name in (OURS, PEER)}
    return point | {"ratio": round(times[PEER] / times[OURS], 3), **errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["dsv3-tp8", "qwen3-30b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with set_up_vllm():
        for name in options.layers:
            weights = random_weights(LAYERS[name], torch.device("cuda"))
            results[name] = []
            for tokens in options.tokens:
                results[name].append(measure(LAYERS[name], weights, tokens, options.tiles))
                print(name, *(f"{key} {value}" for key, value in results[name][-1].items()), flush=True)
                torch.cuda.empty_cache()
            write_report(options.out, results)


if __name__ == "__main__":
    main()
