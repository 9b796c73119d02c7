"""Time the host cost of eager calls on one GPU: of the MoE layer and of the dense layer, as an engine calls them.

    python -m benchmarks.layer.host_cost --out benchmarks/results/host_cost-<date>.json

The layers are small enough for the GPU to keep up; otherwise the launch queue fills and the host waits, which is not
its cost. A figure is the median of single calls of the torch op, under inference mode, between two synchronizations.
`again`: the tensors are those of the previous call. `elsewhere`: tokens, ids and results are at addresses that have not
been used for a thousand calls. `launches`: the part in which the kernels are launched, nearly all of
it the driver's. `new_length`: the first call with another number of tokens, once the kernels are loaded.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import write_report
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.ops import devices, linear, moe, torch_ops
from fp8moe_plugin.plan.options import layer_options
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape, Output

HIDDEN, INTERMEDIATE, TOPK = 256, 128, 8
STEPS = ((1, 256), (300, 256), (512, 256), (4096, 64))  # tokens, experts: decode to prefill
DENSE_ROWS = (1, 64, 300, 1024)
CALLS, ROUNDS, ELSEWHERE = 200, 15, 1100


def host_us(call: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], rounds: int = ROUNDS) -> float:
    """Median microseconds until a call returns, with the next arguments each time."""
    arguments = iter(arguments)
    call(*next(arguments))
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        for args in itertools.islice(arguments, CALLS):
            begin = time.perf_counter_ns()
            call(*args)
            times.append(time.perf_counter_ns() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) / 1e3


def random_weights(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    *experts, n, k = sizes
    values = torch.randn(*experts, n, k, device="cuda").to(torch.float8_e4m3fn)
    return values, torch.rand(*experts, n // 128, k // 128, device="cuda")


def layer(tokens: int, experts: int) -> dict[str, Any]:
    w13, w2 = random_weights(experts, 2 * INTERMEDIATE, HIDDEN), random_weights(experts, HIDDEN, INTERMEDIATE)

    def arguments(tokens: int) -> tuple[Any, ...]:
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        weights, ids = torch.rand(tokens, experts, device="cuda").topk(TOPK)
        return options, x, None, *w13, *w2, weights, ids.int(), None, torch.empty_like(x)

    options = layer_options().text
    device, shape = devices.device_of(w2[0]), MoeShape(TOPK, HIDDEN, INTERMEDIATE, experts, experts)
    assert device is not None
    plan = device.backend.plan_layer(LayerSpec(shape), tokens, device.multiprocessors)
    scratch = torch.empty(plan.scratch, dtype=torch.uint8, device="cuda")
    run = moe.prepared_layer(device, plan, ids_64=False, mapped=False)
    tensors = (*arguments(tokens)[1:], scratch)
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    return times(torch_ops.fused_moe, tokens, arguments) | {
        "op": "fused_moe",
        "experts": experts,
        "launches": host_us(run, itertools.repeat((addresses,))),
    }


def dense(tokens: int) -> dict[str, Any]:
    weight = random_weights(HIDDEN, HIDDEN)

    def arguments(tokens: int) -> tuple[Any, ...]:
        return torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), *weight, None, False

    device, x = devices.device_of(weight[0]), arguments(tokens)[0]
    assert device is not None
    plan = device.backend.plan_dense(tokens, HIDDEN, HIDDEN, Output.BF16, device.multiprocessors, False)
    run, nbytes = linear.prepared_linear(device, plan, tokens, HIDDEN, HIDDEN, False, FP8_BLOCK)
    scratch, out = torch.empty(nbytes, dtype=torch.uint8, device="cuda"), torch.empty_like(x)
    addresses = tuple(tensor.data_ptr() for tensor in (x, *weight, out, scratch))
    launches = host_us(run, itertools.repeat((addresses,)))
    return times(torch_ops.linear, tokens, arguments) | {"op": "linear", "launches": launches}


def times(op: Callable[..., Any], tokens: int, arguments: Callable[[int], tuple[Any, ...]]) -> dict[str, Any]:
    elsewhere = [arguments(tokens) for _ in range(ELSEWHERE)]
    lengths = [arguments(tokens + i + 1) for i in range(3 * CALLS)]
    return {
        "tokens": tokens,
        "again": host_us(op, itertools.cycle(elsewhere[:1])),
        "elsewhere": host_us(op, itertools.cycle(elsewhere)),
        "new_length": host_us(op, iter(lengths), rounds=2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for found in itertools.chain((dense(n) for n in DENSE_ROWS), (layer(*step) for step in STEPS)):
            rows.append({name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()})
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.out:
        write_report(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
