"""Time dense FP8 layers with one scale per output channel beside vLLM's CUTLASS GEMM, in turns on one GPU.

    python -m benchmarks.layer.channel_gemm --out benchmarks/results/channel_gemm-<date>.json

`us` is `fp8_linear`, which quantizes bfloat16 activations with a scale per token and 128 channels; `gemm_us` is its
GEMM alone. `cutlass_us` is vLLM's quantization with a scale per token and `cutlass_scaled_mm`; `cutlass_gemm_us` the
latter alone. Where the layer has a bias, the times with quantization include it. `relative_l2` is the distance from
float32 math on each one's own quantized operands.

A weight of less than 150 MB has copies that together exceed it, called in turn, so that none is found in L2. Each graph
holds a call per copy.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer.dense_gemm import CHECKED_ROWS, WRONG, random_weights
from benchmarks.report import results_or_errors, write_report
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.launches.operands import Rows, Weights
from fp8moe_plugin.ops import devices, fp8_linear, per_token_group_quant_fp8
from fp8moe_plugin.ops.operands import Quantized, k_major
from fp8moe_plugin.ops.signature import addresses_of
from fp8moe_plugin.plan.spec import Output
from fp8moe_plugin.testing import captured, replay_us
from warmup.report import installed


class Layer(NamedTuple):
    n: int
    k: int
    bias: bool = False
    unpadded: tuple[int, int] | None = None  # N and K of vLLM's share, where ours is padded to whole blocks


LAYERS = {  # of GLM-4.7
    "TP8, qkv": Layer(1792, 5120, bias=True),
    "TP8, MLP, gate and up; whole, shared expert, gate and up": Layer(3072, 5120),
    "TP8, o and MLP, down; whole, shared expert, down": Layer(5120, 1536),
    "TP8, shared expert, gate and up": Layer(512, 5120, unpadded=(384, 5120)),
    "TP8, shared expert, down": Layer(5120, 256, unpadded=(5120, 192)),
    "whole, qkv": Layer(14336, 5120, bias=True),
    "whole, o and MLP, down": Layer(5120, 12288),
    "whole, MLP, gate and up": Layer(24576, 5120),
}
ROWS = (1, 16, 64, 256, 1024, 4096, 8192)
OURS, CUTLASS = "fp8moe", "cutlass"
TIMES = ("us", "gemm_us")


class Calls(NamedTuple):
    """One implementation on some activations; each call takes a weight `[N, K]` and its scales `[N, 1]`."""

    a: Quantized
    gemm: Callable[[Quantized], torch.Tensor]
    linear: Callable[[Quantized], torch.Tensor]


def ours(x: torch.Tensor, n: int, bias: torch.Tensor | None) -> Calls:
    a, (m, k) = per_token_group_quant_fp8(x), x.shape
    device = devices.device_of(x)
    assert device is not None, "needs a Hopper GPU"
    plan = device.backend.plan_dense(m, n, k, Output.BF16, device.multiprocessors, False, FP8_CHANNEL)
    scales, *strides = k_major(*a)
    values, a_scales, weight, weight_scale, out = map(Slot, range(5))
    rows = Rows(values, m, k, a_scales, *strides)
    run = device.prepare(plan.launches(rows, Weights(weight, 1, n, k, weight_scale, format=FP8_CHANNEL), out))

    def gemm(b: Quantized) -> torch.Tensor:
        result = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
        run(addresses_of((a[0], scales, *b, result)))
        return result

    return Calls(a, gemm, lambda b: fp8_linear(x, *b, bias))


def cutlass(x: torch.Tensor, n: int, bias: torch.Tensor | None) -> Calls:
    from vllm import _custom_ops

    quantize = partial(_custom_ops.scaled_fp8_quant, use_per_token_if_dynamic=True)

    def multiply(a: Quantized, b: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _custom_ops.cutlass_scaled_mm(a[0], b[0].T, a[1], b[1], torch.bfloat16, bias)

    a = quantize(x)
    return Calls(a, partial(multiply, a), lambda b: multiply(quantize(x), b, bias))


BACKENDS = {OURS: ours, CUTLASS: cutlass}


def relative_l2(calls: Calls, b: Quantized, bias: torch.Tensor | None) -> float:
    """Returns the larger distance of both calls' results from float32 math on the quantized operands."""
    rows = slice(None, None, max(1, len(calls.a[0]) // CHECKED_ROWS))
    group = calls.a[0].shape[1] // calls.a[1].shape[1]
    a = calls.a[0][rows].float() * calls.a[1][rows].repeat_interleave(group, 1)
    product = a @ (b[0].float() * b[1]).T

    def distance(out: torch.Tensor, want: torch.Tensor) -> float:
        return ((out[rows].float() - want).norm() / want.norm()).item()

    of_linear = distance(calls.linear(b), product if bias is None else product + bias.float())
    return max(distance(calls.gemm(b), product), of_linear)


def measure(layer: Layer, weights: list[Quantized], count: int) -> dict[str, Any]:
    """Returns the figures of both implementations for `count` rows; `weights` are the copies, used in turn."""
    x = torch.randn(count, layer.k, device="cuda").bfloat16()
    kept = []  # what the graphs read

    def capture(name: str) -> dict[str, Any]:
        n, k = (name == CUTLASS and layer.unpadded) or (layer.n, layer.k)
        bias = torch.randn(n, device="cuda").bfloat16() if layer.bias else None
        copies = weights if n == layer.n and k == layer.k else [part(weight, n, k) for weight in weights]
        calls = BACKENDS[name](x[:, :k].contiguous(), n, bias)
        kept.append((calls, copies, bias))
        if not (error := relative_l2(calls, copies[0], bias)) < WRONG:  # true for NaN, too
            raise ArithmeticError(f"the result is wrong: relative L2 distance {error:.2g} from float32 math")
        graphs = [captured([partial(call, copy) for copy in copies]) for call in (calls.linear, calls.gemm)]
        return dict(zip(TIMES, graphs, strict=True)) | {"relative_l2": round(error, 5)}

    results = results_or_errors({name: name for name in BACKENDS}, capture)
    found = results[OURS] | {f"{CUTLASS}_{name}": value for name, value in results[CUTLASS].items()}
    times = replay_us({name: value for name, value in found.items() if name.endswith(TIMES)})
    return found | {name: round(us / len(weights), 2) for name, us in times.items()}


def part(weight: Quantized, n: int, k: int) -> Quantized:
    return weight[0][:n, :k].contiguous(), weight[1][:n].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of activations")
    parser.add_argument("--out", type=Path, required=True, help="the report, rewritten after each layer")
    options = parser.parse_args()
    torch.manual_seed(0)
    about = {name: installed(name) for name in ("vllm", "fp8moe-plugin")}
    points: list[dict[str, Any]] = []
    for name, layer in LAYERS.items():
        weights = random_weights(layer.n, layer.k, block=(1, layer.k))
        for count in options.rows:
            found = measure(layer, weights, count)
            sizes = {"n": layer.n, "k": layer.k, "bias": layer.bias, "weight_copies": len(weights)}
            points.append({"layer": name, "rows": count} | sizes | found)
            print(
                f"{layer.n}x{layer.k} {count:5} rows", *(f"{key} {value}" for key, value in found.items()), flush=True
            )
            torch.cuda.empty_cache()
        del weights
        write_report(options.out, about | {"rows": points})


if __name__ == "__main__":
    main()
