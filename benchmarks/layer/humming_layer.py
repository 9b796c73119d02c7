"""Time the layer beside layers made of Humming's GEMMs, in turns on one GPU.

    python -m benchmarks.layer.humming_layer --out benchmarks/results/humming_layer-<date>.json

`humming` and `humming-contiguous` have block scales, as our layer, in the two layouts of Humming that vLLM uses:
indexed under tensor parallelism, contiguous under expert parallelism. `humming-vllm` is what vLLM makes of the same
checkpoint with `--moe-backend humming`. What a layer consists of is in `benchmarks.layer.humming`.

All get the same weights, tokens and routings. `us` is the median of CUDA-graph replays in turns, `relative_l2` the
distance from float32 math on unquantized activations.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer import humming
from benchmarks.layer.before_after import LAYERS
from benchmarks.report import results_or_errors, write_report
from fp8moe_plugin.bench.layer import WRONG, Maker, make_case, make_ours, random_weights, relative_l2
from fp8moe_plugin.bench.peers import set_up_vllm
from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.testing import captured, replay_us
from warmup.report import installed

TOKENS = (1, 16, 64, 256, 1024, 2048, 4096)
PEERS = {
    "humming": (humming.W8A8, humming.INDEXED),
    "humming-contiguous": (humming.W8A8, humming.CONTIGUOUS),
    "humming-vllm": (humming.W8A16, humming.INDEXED),
}
MAKERS: dict[str, Maker] = {OURS: make_ours}
MAKERS |= {name: partial(humming.make_humming, *how) for name, how in PEERS.items()}


def measure(experts: Experts, weights: ExpertWeights, tokens: int) -> dict[str, dict[str, Any]]:
    """Returns the figures of each backend, or its error."""
    case = make_case(experts, weights, tokens)
    layers = []  # keeps what the graphs read

    def capture(make: Maker) -> dict[str, Any]:
        layer = make(experts, weights, tokens)
        layers.append(layer)
        error = relative_l2(layer, case)
        if not error < WRONG:
            raise ArithmeticError(f"the result is wrong: relative L2 distance {error:.2g} from float32 math")
        graph = captured([partial(layer, case.hidden_states, *routing) for routing in case.routings])
        return {"relative_l2": round(error, 4), "graph": graph}

    results = results_or_errors(MAKERS, capture)
    graphs = {name: result.pop("graph") for name, result in results.items() if "graph" in result}
    for name, us in replay_us(graphs).items():
        results[name]["us"] = round(us / len(case.routings), 2)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    humming.check_installed()
    jobs = [
        job
        for name in options.layers
        for how in PEERS.values()
        for job in humming.layer_jobs(*how, LAYERS[name], options.tokens)
    ]
    print(f"{len(jobs)} kernels of Humming to compile, {humming.compile_ahead(jobs)} failed", flush=True)
    about = {name: installed(name) for name in ("humming-kernels", "vllm", "fp8moe-plugin")}
    rows: list[dict[str, Any]] = []
    with set_up_vllm():
        for name in options.layers:
            weights = random_weights(LAYERS[name], torch.device("cuda"))
            for tokens in options.tokens:
                results = measure(LAYERS[name], weights, tokens)
                rows += [{"layer": name, "tokens": tokens, "backend": k} | result for k, result in results.items()]
                print(name, tokens, *(f"{k} {r.get('us', r.get('error'))}" for k, r in results.items()), flush=True)
                torch.cuda.empty_cache()
                write_report(options.out, about | {"rows": rows})
            del weights


if __name__ == "__main__":
    main()
