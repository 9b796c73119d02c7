"""Random FP8 operands, and the time of a call on the GPU."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from fp8moe_plugin.bench.layer import captured

Pair = tuple[torch.Tensor, torch.Tensor]  # e4m3 values and their float32 scales


def random_fp8(shape: tuple[int, ...]) -> torch.Tensor:
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in out.view(-1).split(1 << 27):
        part.copy_((torch.randn(part.numel(), device="cuda") * 110).clamp_(-448, 448))
    return out


def random_scales(shape: tuple[int, ...], k: int) -> torch.Tensor:
    return (torch.rand(shape, device="cuda") + 0.5) / (110 * k**0.25)


def time_calls(call: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of a call in CUDA-graph replays: after a pause (burst), and during 0.4 s without one (sustained)."""
    graph = captured([call])
    graph.replay()
    torch.cuda.synchronize()

    def replays(count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return sorted(a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events))

    time.sleep(0.25)
    burst = replays(7)[3]
    sustained = replays(max(9, int(0.4e6 / burst)))
    return burst, sustained[len(sustained) // 2]
