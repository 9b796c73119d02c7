"""Time the experts on tokens that DeepEP has quantized and sorted, compared with vLLM's batched DeepGEMM, on one GPU.

    python -m benchmarks.layer.batched_experts --out benchmarks/results/batched_experts-<date>.json

Ours is `batched_experts`, the peer is `apply` of vLLM's `BatchedDeepGemmExperts`. Both get the same weights and the
slabs of DeepEP's low-latency mode: `max_m` rows for each local expert, scales with contiguous rows, and counts on the
device, drawn as for tokens routed uniformly over the experts of all ranks. Both get the average rows per expert
(`expected_m`), the peer rounded up to a multiple of 16 as in an engine. Between its GEMMs the peer rounds scales up to
powers of two, vLLM's default; VLLM_USE_DEEP_GEMM_E8M0=0 turns that off.

A time is that of one call: the median of replays of a CUDA graph with a call for each of several counts, after a pause
(`burst`, the plain `us`) and in steady state (`sustained`). Weights of less than 150 MB have copies that together
exceed it, called in turn, so that none is found in L2. Errors are relative L2 distances from float32 arithmetic on the
dequantized slabs and weights, without rounding in between.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer.operands import Pair
from benchmarks.report import installed, results_or_errors, sources_sha256, write_report
from fp8moe_plugin.bench.peers import vllm_layer
from fp8moe_plugin.checkpoint.shapes import GROUP, Experts, ceil_div
from fp8moe_plugin.layers.weights import per_block_cast_to_fp8
from fp8moe_plugin.ops import batched_experts, per_token_group_quant_fp8, reference
from fp8moe_plugin.testing import time_calls


class Shape(NamedTuple):
    local_experts: int
    experts: int  # of all ranks
    hidden: int
    intermediate: int
    topk: int


class Layer(NamedTuple):
    """The weights of the local experts, in the order `batched_experts` takes them."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


SHAPES = {
    "dsv3-ep8": Shape(32, 256, 7168, 2048, 8),
    "dsv3-ep32": Shape(8, 256, 7168, 2048, 8),
    "qwen3-30b-ep8": Shape(16, 128, 2048, 768, 8),
}
MAX_M = (256, 1024)
ROOM = 4  # a slab must hold this many times the average
COLD_BYTES = 150e6  # three times the L2 of an H200
CHECKED_EXPERTS, CHECKED_ROWS = 8, 8
WRONG = 0.06  # relative L2; rounding to FP8 between the GEMMs causes about half of it
Backend = Callable[[int, torch.Tensor], torch.Tensor]  # calls, each with a copy of the weights and counts


def ours(shape: Shape, slab: Pair, layers: list[Layer], expected_m: int) -> Backend:
    out = torch.empty(slab[0].shape, dtype=torch.bfloat16, device=slab[0].device)

    def call(copy: int, counts: torch.Tensor) -> torch.Tensor:
        return batched_experts(*slab, *layers[copy], counts, expected_m=expected_m, out=out)

    return call


def deepgemm(shape: Shape, slab: Pair, layers: list[Layer], expected_m: int) -> Backend:
    """The peer, called as by vLLM's modular kernel: the result is in the memory of the first workspace."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.batched_deep_gemm_moe import BatchedDeepGemmExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata

    max_m, device = slab[0].shape[1], slab[0].device
    estimate = engine_estimate(expected_m, max_m)
    whole = Experts(1, shape.experts, shape.topk, shape.hidden, shape.intermediate)
    config = vllm_layer(whole, shape.local_experts, max_m)
    experts = []
    for layer in layers:
        quantized = fp8_w8a8_moe_quant_config(layer.w13_scale, layer.w2_scale, block_shape=[GROUP, GROUP])
        experts.append(BatchedDeepGemmExperts(config, quantized, max_num_tokens=max_m, num_dispatchers=1))
        experts[-1].estimate_expected_m = lambda **_: estimate  # without an engine it would use max_m
    sizes = (max_m, 2 * shape.intermediate, shape.hidden, shape.topk, shape.experts, shape.local_experts)
    shapes = experts[0].workspace_shapes(*sizes, None, MoEActivation.SILU)
    numels = [math.prod(each) for each in shapes]
    common = torch.empty(max(numels[0], numels[2]), dtype=torch.bfloat16, device=device)
    workspace13, output = common[: numels[0]].view(shapes[0]), common[: numels[2]].view(shapes[2])
    workspace2 = torch.empty(shapes[1], dtype=torch.bfloat16, device=device)
    topk_ids = torch.zeros(1, shape.topk, dtype=torch.int64, device=device)  # only its width is read
    topk_weights = topk_ids.float()

    def call(copy: int, counts: torch.Tensor) -> torch.Tensor:
        experts[copy].apply(
            output=output,
            hidden_states=slab[0],
            w1=layers[copy].w13,
            w2=layers[copy].w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=MoEActivation.SILU,
            global_num_experts=shape.experts,
            expert_map=None,
            a1q_scale=slab[1],
            a2_scale=None,
            workspace13=workspace13,
            workspace2=workspace2,
            expert_tokens_meta=ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None),
            apply_router_weight_on_input=False,
        )
        return output

    return call


BACKENDS = {"fp8moe": ours, "deepgemm": deepgemm}


def engine_estimate(expected_m: int, max_m: int) -> int:
    """The result of vLLM's `estimate_expected_m` in an engine with this many rows per expert on average."""
    return min(max_m, max(16, ceil_div(expected_m, 16) * 16))


def random_layers(generator: torch.Generator, shape: Shape) -> list[Layer]:
    """Copies of a layer, drawn independently, that together do not fit into L2."""

    def weight(n: int, k: int) -> Pair:
        options: dict[str, Any] = {"generator": generator, "device": generator.device}
        drawn = (torch.randn(n, k, **options) * k**-0.5 for _ in range(shape.local_experts))
        values, scales = zip(*map(per_block_cast_to_fp8, drawn), strict=True)
        return torch.stack(values), torch.stack(scales)

    nbytes = shape.local_experts * 3 * shape.hidden * shape.intermediate
    sizes = ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
    return [Layer(*weight(*sizes[0]), *weight(*sizes[1])) for _ in range(math.floor(COLD_BYTES / nbytes) + 1)]


def random_slab(generator: torch.Generator, shape: Shape, max_m: int) -> Pair:
    """e4m3 `[E, max_m, H]` and float32 scales `[E, max_m, H/128]`, laid out as DeepEP does."""
    size = (shape.local_experts, max_m, shape.hidden)
    x = torch.randn(size, dtype=torch.bfloat16, generator=generator, device=generator.device)
    values, scales = per_token_group_quant_fp8(x)
    return values, scales.transpose(1, 2).contiguous().transpose(1, 2)


def random_counts(generator: torch.Generator, shape: Shape, expected_m: int) -> torch.Tensor:
    """int32 `[E]`: the rows of each local expert, `expected_m` on average."""
    tokens = expected_m * shape.experts // shape.topk
    drawn = torch.rand(tokens, shape.experts, generator=generator, device=generator.device)
    counts = drawn.topk(shape.topk).indices.flatten().bincount(minlength=shape.experts)
    return counts[: shape.local_experts].int()


def relative_l2(out: torch.Tensor, slab: Pair, layer: Layer, counts: list[int]) -> float:
    """Relative L2 distance from float32 arithmetic, for some rows of some experts."""
    busy = [e for e, count in enumerate(counts) if count]
    found, wanted = [], []
    for e in busy[:: ceil_div(len(busy), CHECKED_EXPERTS)]:
        rows = slice(0, counts[e], ceil_div(counts[e], CHECKED_ROWS))
        gate, up = reference.gemm((slab[0][e, rows], slab[1][e, rows]), (layer.w13[e], layer.w13_scale[e])).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        wanted.append(inner @ reference.dequantize_blocks(layer.w2[e], layer.w2_scale[e]).T)
        found.append(out[e, rows].float())
    want = torch.cat(wanted)
    return ((torch.cat(found) - want).norm() / want.norm()).item()


def measure(backend: Backend, slab: Pair, layers: list[Layer], drawn: list[torch.Tensor]) -> dict[str, Any]:
    """The times and the error of one backend; `drawn` are the counts, used in turn."""
    error = relative_l2(backend(0, drawn[0]), slab, layers[0], drawn[0].tolist())
    if not error < WRONG:  # true for NaN, too
        raise ArithmeticError(f"its results are wrong: relative L2 {error}")

    def calls() -> None:
        for i, counts in enumerate(drawn):
            backend(i % len(layers), counts)

    burst, sustained = (us / len(drawn) for us in time_calls(calls))
    return {"us": burst, "sustained_us": sustained, "relative_l2": error}


def measure_all(
    shape: Shape, slab: Pair, layers: list[Layer], drawn: list[torch.Tensor], expected_m: int
) -> dict[str, dict[str, Any]]:
    return results_or_errors(BACKENDS, lambda make: measure(make(shape, slab, layers, expected_m), slab, layers, drawn))


def line(result: dict[str, Any]) -> str:
    if "error" in result:
        return str(result["error"])
    return f"{result['us']:7.1f} us, sustained {result['sustained_us']:7.1f}, error {result['relative_l2']:.4f}"


def peer_over_ours(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    if any("error" in result for result in results.values()):
        return {}
    return {time: results["deepgemm"][time] / results["fp8moe"][time] for time in ("us", "sustained_us")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--expected-m", default="1,8,32,64,128,256", help="rows per expert on average")
    parser.add_argument("--out", type=Path, help="the report, rewritten after each shape")
    args = parser.parse_args()
    names = args.shapes.split(",")
    if unknown := set(names) - set(SHAPES):
        parser.error(f"no such shape: {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    averages = [int(average) for average in args.expected_m.split(",")]
    generator = torch.Generator("cuda").manual_seed(0)
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for name in names:
        shape = SHAPES[name]
        layers = random_layers(generator, shape)
        for max_m in MAX_M:
            slab = random_slab(generator, shape, max_m)
            for expected_m in (average for average in averages if average * ROOM <= max_m):
                drawn = [random_counts(generator, shape, expected_m) for _ in range(16 if expected_m <= 64 else 4)]
                active = sum(int((counts > 0).sum()) for counts in drawn) / len(drawn)
                case = {"shape": name, "max_m": max_m, "expected_m": expected_m, "active_experts": active}
                print(f"{name}, slabs of {max_m}, {expected_m} rows per expert, {active:.1f} experts", flush=True)
                results = measure_all(shape, slab, layers, drawn, expected_m)
                for backend, result in results.items():
                    rows.append(case | {"backend": backend} | result)
                    print(f"  {backend:8} {line(result)}", flush=True)
                if found := peer_over_ours(results):
                    ratios.append(case | found)
                    print(f"  peer / ours: x{found['us']:.2f}, sustained x{found['sustained_us']:.2f}", flush=True)
            del slab
            torch.cuda.empty_cache()
        del layers
        torch.cuda.empty_cache()
        if args.out:
            about = {"vllm": installed("vllm"), "sources_sha256": sources_sha256()}
            write_report(args.out, about | {"rows": rows, "peer_over_ours": ratios})


if __name__ == "__main__":
    main()
