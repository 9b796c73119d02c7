"""Helpers for tests and benchmarks: distances of results, times of calls on the GPU, batch invariance."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fp8moe_plugin.settings import BATCH_INVARIANT, batch_invariant, variable_set

Call = Callable[[], Any]
FLUSH_BYTES = 2**28  # several times the L2 of a Hopper GPU
FLUSH_KERNEL = "bitwise_not"  # in the name of the kernel that flushes L2, and thus marks where a call begins
PAUSE_S = 0.25  # before a burst, so that what ran before does not leave the GPU at its power limit
SUSTAINED_US = 0.4e6
REPLAYS = 25  # of each graph that takes turns


def calc_diff(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the distance of two tensors of any shape: 0 if they are equal or all zero, 2 if one is the negative.

    One minus their product over the mean of their squares, in float64; half the square of a small relative L2 distance.
    NaN if one of them holds NaN.
    """
    x, y = actual.double(), expected.double()
    squares = (x * x + y * y).sum().item()
    return 1 - 2 * (x * y).sum().item() / squares if squares else 0.0


def bench_kineto(
    call: Call, kernel_names: str | tuple[str, ...] | None = None, rounds: int = 30
) -> float | tuple[float, ...]:
    """Median seconds of a call's kernels, by torch's profiler (Kineto), with a cold L2.

    Durations are added: overlapping kernels, such as those that start early (PDL), count more than they take together.
    A call must not launch `bitwise_not`, by which the flushes of L2 are recognized.

    Args:
        kernel_names: count only kernels with this in their name; with several names, a time for each. None: all that
            the call launches, copies included.
        rounds: how many calls are timed, after one that is not.
    Returns:
        A float, or a tuple for a tuple of names; 0 for a name that no kernel has.
    """
    if isinstance(kernel_names, tuple):
        events = profiled([call], rounds)
        return tuple(median(durations(events, name)) for name in kernel_names)
    return median(durations(profiled([call], rounds), kernel_names))


def profiled(calls: Sequence[Call], rounds: int) -> list[tuple[str, float]]:
    """Returns names and seconds of the kernels of calls that run in turns, in order. L2 is flushed before each call."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__
    from torch.profiler import ProfilerActivity, profile

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            for call in calls:
                flush.bitwise_not_()
                call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us() / 1e6) for event in events]


def durations(events: Iterable[tuple[str, float]], kernel_name: str | None) -> list[float]:
    """Seconds of each call in `profiled`, of kernels with this in their name; None: of all."""
    totals: list[float] = []
    for name, seconds in events:
        if FLUSH_KERNEL in name:
            totals.append(0.0)
        elif totals and (kernel_name is None or kernel_name in name):
            totals[-1] += seconds
    return totals


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph that holds each call once, captured after each has run once."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graphs: Mapping[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Median microseconds of a replay of each graph, replayed in turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: median(values) for name, values in times.items()}


def time_calls(call: Call) -> tuple[float, float]:
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
        return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]

    time.sleep(PAUSE_S)
    burst = median(replays(7))
    return burst, median(replays(max(9, int(SUSTAINED_US / burst))))


@contextmanager
def invariance(wanted: bool) -> Iterator[None]:
    """Make layers batch-invariant or not, whatever the environment says."""
    batch_invariant.cache_clear()
    try:
        with variable_set(BATCH_INVARIANT, str(int(wanted))):
            yield
    finally:
        batch_invariant.cache_clear()
