"""What torch.profiler says about a call: how long kernels run on the GPU, and what FP8 ops cost the host.

Times are microseconds in a `Counter`, so that two profiles can be subtracted: under `BUSY` how long at least one kernel
runs, under (`KERNEL`, name) a kernel's time, and under (`OP`, name) and (`CALLS`, name) the duration of an op on the
host and its calls. An op that runs inside another one of them is under (`NESTED`, name) instead.
"""

import contextlib
import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from fp8moe_plugin.compare.cells import SHORT, Cell

PROFILED_PREFILLS, PROFILED_STEPS = 3, 16

Times = Counter[tuple[str, str]]

KERNEL, OP, CALLS, NESTED = "kernel", "op", "calls", "nested"
BUSY = ("busy", "")
EXPERTS = "routed experts"  # the range around vLLM's modular kernel: quantization, both GEMMs, permutation, sum
FP8_OPS = re.compile(rf"fp8moe::|_C::\w*(scaled_mm|_quant)|vllm::\w*(fp8|block_scaled_mm)|{EXPERTS}$")
HOST_CATEGORIES = ("cpu_op", "user_annotation")


def profiled(call: Callable[[], Any]) -> Times:
    """Returns the times of one call, which runs on this process's GPU and CPU."""
    import torch
    from torch.profiler import profile, supported_activities

    with experts_annotated(), profile(activities=supported_activities()) as profiler:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return times(json.loads(path.read_text())["traceEvents"])


@contextlib.contextmanager
def experts_annotated() -> Iterator[None]:
    """Annotate the calls of vLLM's modular MoE kernel, through which every FP8 backend runs the routed experts."""
    from torch.profiler import record_function
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

    def annotated(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(EXPERTS):
                return method(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for name in ("apply", "apply_monolithic"):
            patches.enter_context(mock.patch.object(FusedMoEKernel, name, annotated(getattr(FusedMoEKernel, name))))
        yield


def times(events: list[dict[str, Any]]) -> Times:
    """Returns the times of a Chrome trace's events."""
    found: Times = Counter()
    kernels = [event for event in events if event.get("cat") == "kernel"]
    for kernel in kernels:
        found[KERNEL, kernel["name"]] += kernel["dur"]
    found[BUSY] = busy_us(kernels)
    until: dict[Any, float] = {}  # when the last outermost op of a thread ends
    ops = [e for e in events if e.get("cat") in HOST_CATEGORIES and FP8_OPS.match(e["name"])]
    for op in sorted(ops, key=lambda e: (e["ts"], -e["dur"])):
        if op["ts"] < until.get(op["tid"], 0.0):
            found[NESTED, op["name"]] += op["dur"]
            continue
        found[OP, op["name"]] += op["dur"]
        found[CALLS, op["name"]] += 1
        until[op["tid"]] = op["ts"] + op["dur"]
    return found


def busy_us(kernels: list[dict[str, Any]]) -> float:
    """Returns how long at least one of the kernels runs."""
    busy, until = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda e: e["ts"]):
        end = kernel["ts"] + kernel["dur"]
        busy += max(0.0, end - max(kernel["ts"], until))
        until = max(until, end)
    return busy


def of_cell(profiled: Callable[[Callable[[], Any]], Times], run: Callable[[Cell, int], Any], cell: Cell) -> Times:
    """Returns the times of one prefill or one decode step, by a `Clock`'s `run`."""
    profiled(lambda: run(cell, SHORT))  # the profiler's own first calls are slow
    if cell.tokens:
        prefills = profiled(lambda: [run(cell, 1) for _ in range(PROFILED_PREFILLS)])
        return per_unit(prefills, Counter(), PROFILED_PREFILLS)
    shorter, longer = (profiled(partial(run, cell, SHORT + steps)) for steps in (0, PROFILED_STEPS))
    return per_unit(longer, shorter, PROFILED_STEPS)


def per_unit(whole: Times, without: Times, units: int) -> Times:
    """Returns the times of one of `units` prefills or steps by which two profiled calls differ."""
    return Counter({key: (whole[key] - without[key]) / units for key in whole})


def summary(of_unit: Times, kernels: int = 12) -> dict[str, Any]:
    """Returns the figures of a row: `gpu_busy_ms`, `host_ops_ms`, and both by name in microseconds, longest first."""

    def by_name(kind: str) -> list[tuple[str, float]]:
        named = [(name, us) for (of, name), us in of_unit.items() if of == kind]
        return sorted(named, key=lambda item: -item[1])

    ops = by_name(OP)
    return {
        "gpu_busy_ms": round(of_unit[BUSY] / 1e3, 4),
        "host_ops_ms": round(sum(us for _, us in ops) / 1e3, 4),
        "host_ops": {name: {"calls": round(of_unit[CALLS, name], 2), "us": round(us, 1)} for name, us in ops},
        "host_nested_us": {name: round(us, 1) for name, us in by_name(NESTED)},
        "kernels_us": {name[:120]: round(us, 1) for name, us in by_name(KERNEL)[:kernels]},
    }
