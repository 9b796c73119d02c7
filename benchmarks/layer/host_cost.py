"""Time the host cost of eager calls on one GPU: of the whole layer, and of one prepared launch.

    python -m benchmarks.layer.host_cost --out benchmarks/results/host_cost-<date>.json

The layers are small enough for the GPU to keep up; otherwise the launch queue fills and the host waits, which is not
its cost. A figure is the median of 200 single calls between two synchronizations. `again`: the tensors are those of the
previous call. `elsewhere`: the result goes to an address that the op does not remember. The launch is that of a kernel
with one block that has been launched before; `driver` is the part in `cuLaunchKernelEx`.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import write_report
from fp8moe_plugin.jit import launcher
from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.plan import combine_key

HIDDEN, INTERMEDIATE, TOPK = 256, 128, 8
STEPS = ((1, 256), (512, 256), (4096, 64))  # tokens, experts: decode, decode with counted experts, prefill
CALLS, ROUNDS = 200, 15
MORE_THAN_REMEMBERED = 1100  # calls; more than ops.moe_launches.layer_launches caches


def host_us(call: Callable[[], Any]) -> float:
    """Median microseconds until a call returns."""
    call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        for _ in range(CALLS):
            begin = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) / 1e3


def random_weights(experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.randn(experts, n, k, device="cuda").to(torch.float8_e4m3fn)
    return values, torch.rand(experts, n // 128, k // 128, device="cuda")


def layer_us(tokens: int, experts: int) -> dict[str, float]:
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    weights, ids = torch.rand(tokens, experts, device="cuda").topk(TOPK)
    w13, w2 = random_weights(experts, 2 * INTERMEDIATE, HIDDEN), random_weights(experts, HIDDEN, INTERMEDIATE)
    ids = ids.int()
    results = torch.empty(MORE_THAN_REMEMBERED, tokens, HIDDEN, dtype=torch.bfloat16, device="cuda").unbind()

    def time_into(outs: Iterator[torch.Tensor]) -> float:
        return host_us(lambda: fused_moe(x, *w13, *w2, weights, ids, out=next(outs)))

    return {"again": time_into(itertools.repeat(results[0])), "elsewhere": time_into(itertools.cycle(results))}


def launch_us() -> tuple[float, float]:
    """Microseconds of a launch, and of the driver's part of it."""
    rows, out = (torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    slots, weights = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.zeros(1, 1, device="cuda")
    addresses = tuple(tensor.data_ptr() for tensor in (rows, slots, weights, out))
    key, device = combine_key(), rows.get_device()
    whole = host_us(lambda: launcher.launch(key, 1, (*addresses, HIDDEN // 8, 1), device))
    return whole, host_us(launcher._thread.prepared[id(key), device, False, 1].call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = []
    for tokens, experts in STEPS:
        found = layer_us(tokens, experts)
        layers.append({"tokens": tokens, "experts": experts, "host_us": found})
        print(f"layer, T={tokens:4}  {found['again']:6.1f} us again, {found['elsewhere']:6.1f} elsewhere", flush=True)
    launch, driver = launch_us()
    print(f"launch         {launch:6.1f} us, of which the driver {driver:.1f}")
    if args.out:
        write_report(args.out, {"layers": layers, "launch_us": launch, "driver_us": driver})


if __name__ == "__main__":
    main()
