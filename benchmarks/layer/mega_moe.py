"""A layer of experts by our kernels and by the SM90 mega MoE of sgl-deep-gemm, with one rank, in turns on one GPU.

    python -m benchmarks.layer.mega_moe --out benchmarks/results/mega_moe-<date>.json

Mega MoE is one kernel for dispatch, both GEMMs and combine of expert parallelism, which SGLang starts with
`--moe-a2a-backend megamoe`. A process group and symmetric memory are left out: with one rank, the kernel reads and
writes a buffer of this process. Quantizing the tokens is a kernel before it, which counts. `capacity` is the number of
tokens that its buffer holds, from which it derives its tiles. DeepGEMM compiles with nvcc, once for each capacity.

Both get the same weights, tokens and routings. `us` is the median of the rounds, each of them CUDA-graph replays after
a pause; `relative_l2` the distance from float32 math on unquantized activations. It needs sgl-deep-gemm 0.1.5.post1,
which fits torch 2.11; releases since 0.2.5 have another kernel.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.layer.before_after import LAYERS
from benchmarks.report import installed, sources_sha256, write_report
from fp8moe_plugin.bench.layer import TOKENS, Case, Layer, make_case, make_ours, random_weights, relative_l2, time_graph
from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.checkpoint.shapes import GROUP, Experts, ceil_div
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.testing import captured

MEGA = "mega_moe"
PARTS = (torch.float8_e4m3fn, None, None, None, torch.float8_e4m3fn, None, torch.float8_e4m3fn, None)  # of the buffer


def align_capacity(tokens: int) -> int:
    """For how many tokens mega MoE makes its buffer."""
    from deep_gemm import _C

    step: int = _C.get_token_alignment_for_mega_moe()
    return ceil_div(tokens, step) * step


def make_mega(weights: ExpertWeights, experts: Experts, tokens: int) -> Layer:
    """Mega MoE with a buffer for so many tokens; its layout is that of `deep_gemm.SM90SymmBuffer`."""
    import deep_gemm
    from deep_gemm import _C

    capacity = align_capacity(tokens)
    sizes = experts.experts, capacity, experts.topk, experts.hidden, experts.intermediate
    nbytes, slices = _C.get_symm_buffer_size_for_sm90_mega_moe(1, *sizes, True, "swiglu")
    memory = torch.zeros(nbytes, dtype=torch.int8, device="cuda")
    parts = [deep_gemm._from_dlpack_if_needed(*pair) for pair in zip(slices(memory), PARTS, strict=True)]
    buffer = SimpleNamespace(
        buffer=memory,
        handle=SimpleNamespace(buffer_ptrs=[memory.data_ptr()]),
        group=SimpleNamespace(rank=lambda: 0),
        num_max_tokens_per_rank=capacity,
        num_experts=experts.experts,
        num_topk=experts.topk,
    )
    w13, w2 = deep_gemm.transform_weights_for_mega_moe_sm90(tuple(weights.w13), tuple(weights.w2))

    def layer(x: torch.Tensor, topk_weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        deep_gemm.mega_moe_pre_dispatch_sm90(x, ids, topk_weights, *parts[:4], num_tokens=len(x), group_size=GROUP)
        out = torch.empty_like(x)
        deep_gemm.fp8_mega_moe(out, w13, w2, buffer, recipe=(GROUP, GROUP, GROUP))
        return out

    return layer


def measure(layers: dict[str, Layer], case: Case, rounds: int) -> dict[str, dict[str, Any]]:
    """The figures of each layer."""
    errors = {name: relative_l2(layer, case) for name, layer in layers.items()}
    graphs = {
        name: captured([partial(layer, case.hidden_states, *routing) for routing in case.routings])
        for name, layer in layers.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds):
        for name, graph in graphs.items():
            taken[name].append(time_graph(graph) / len(case.routings))
    return {
        name: {"us": round(statistics.median(taken[name]), 2), "relative_l2": round(errors[name], 4)} for name in layers
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["dsv3-ep1"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    about = {name: installed(name) for name in ("sgl-deep-gemm", "fp8moe-plugin")}
    about["sources_sha256"] = sources_sha256()
    rows: list[dict[str, Any]] = []
    for name in options.layers:
        weights = random_weights(LAYERS[name], torch.device("cuda"))
        for tokens in options.tokens:
            case = make_case(LAYERS[name], weights, tokens)
            layers = {
                OURS: make_ours(False, LAYERS[name], weights, tokens),
                MEGA: make_mega(weights, LAYERS[name], tokens),
            }
            figures = measure(layers, case, options.rounds)
            point = {"layer": name, "tokens": tokens, "capacity": align_capacity(tokens)}
            rows += [point | {"backend": backend} | figures[backend] for backend in figures]
            print(name, tokens, *(f"{backend} {row['us']}" for backend, row in figures.items()), flush=True)
            write_report(options.out, about | {"rows": rows})


if __name__ == "__main__":
    main()
