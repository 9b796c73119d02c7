"""Check the gradients of experts' weights on one GPU, then time them next to DeepGEMM's, in one run.

    python -m benchmarks.layer.k_grouped_gemm --out benchmarks/results/k_grouped_gemm-<date>.json

Checks: shapes with empty groups and more than 2^31 elements against plain torch in float32, two calls bit for bit; a
wrong one ends the run. Times: the median of calls that take turns with DeepGEMM's, by events around each, with cold
L2. `in place`: C is D; otherwise both are whole tensors. Without DeepGEMM, or where it cannot compile its kernels, ours
alone are timed.
"""

import argparse
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer.operands import Pair, random_fp8, random_scales
from benchmarks.report import write_report
from fp8moe_plugin import ops
from fp8moe_plugin.ops import reference

GROUP = 128
FLUSH_BYTES = 2**28
PAUSE_CYCLES = 700_000  # of the GPU before a call, in which the host gets ahead
MOST_DIFFERENCE, MOST_ERROR = 1e-6, 5e-3  # as DeepGEMM's calc_diff; of an element, in root mean squares
PEERS = ("deep_gemm", "vllm.third_party.deep_gemm")


class Case(NamedTuple):
    a: Pair
    b: Pair
    c: torch.Tensor
    ks: list[int]
    layout: torch.Tensor

    def call(self, library: Any, d: torch.Tensor, c: torch.Tensor) -> Callable[[], Any]:
        return lambda: library.k_grouped_fp8_gemm_nt_contiguous(self.a, self.b, d, self.ks, self.layout, c)


def case(m: int, n: int, ks: list[int]) -> Case:
    total = sum(ks)
    a, b = ((random_fp8((rows * total,)), random_scales((total // GROUP, rows), max(ks)).t()) for rows in (m, n))
    c = torch.randn(len(ks), m, n, device="cuda")
    return Case(a, b, c, ks, torch.tensor(ks, dtype=torch.int32, device="cuda"))


def ragged(groups: int, k: int) -> list[int]:
    """As DeepGEMM's tests draw them: 0.7 to 1.3 times k, in multiples of 128."""
    gen = torch.Generator().manual_seed(groups)
    return (torch.randint(7 * k, 13 * k, (groups,), generator=gen) // 10 // GROUP * GROUP).tolist()


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(m: int, n: int, ks: list[int]) -> tuple[float, float]:
    """DeepGEMM's measure of the difference from plain torch, and the largest error in root mean squares."""
    given = case(m, n, ks)
    expected, apart, in_place, again = (torch.full_like(given.c, float("nan")) for _ in range(4))
    reference.k_grouped_gemm(given.a, given.b, tuple(ks), given.c, expected)
    given.call(ops, apart, given.c)()
    for d in (in_place, again):
        d.copy_(given.c)
        given.call(ops, d, d)()
    if not torch.equal(in_place, again) or not torch.equal(in_place, apart):
        raise SystemExit(f"WRONG: calls differ, {m}x{n} {ks}")
    x, y = in_place.double(), expected.double()
    difference = (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item()
    return difference, ((x - y).abs().max() / y.square().mean().sqrt()).item()


def check_all() -> dict[str, float]:
    shapes = [
        (7168, 2048, [8192, 0, 128, 4096]),
        (1000, 784, [0, 384, 0, 1152]),
        (1, 16, [128]),
        (256, 256, ragged(40, 1024)),
        (4096, 256, [2**19 - 128, 256, 256]),  # A of more than 2^31 elements
    ]
    found = [check(*shape) for shape in shapes]
    worst = {"difference": max(d for d, _ in found), "error": max(e for _, e in found)}
    if not (worst["difference"] < MOST_DIFFERENCE and worst["error"] < MOST_ERROR):
        raise SystemExit(f"WRONG: {worst}: {dict(zip(map(str, shapes), found, strict=True))}")
    return worst


# ---- times -----------------------------------------------------------------------------------------------------------


def turns_us(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median microseconds of each call, of calls that take turns."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        events = []
        for call in calls.values():
            flush.zero_()
            torch.cuda._sleep(PAUSE_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        for name, (begin, end) in zip(calls, events, strict=True):
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: round(sorted(measured)[rounds // 2], 1) for name, measured in times.items()}


def import_peer() -> Any:
    """DeepGEMM, if it is installed and can compile a kernel; else None."""
    for name in PEERS:
        try:
            peer = importlib.import_module(name)
            given = case(256, 256, [256])
            given.call(peer, given.c, given.c)()
            torch.cuda.synchronize()
        except Exception as failure:  # noqa: BLE001 (a peer may be absent or fail in any way; ours counts)
            print(f"{name}: {type(failure).__name__}: {str(failure)[:200]}")
        else:
            print(f"next to {name} {getattr(peer, '__version__', '')}")
            return peer
    return None


def time_case(libraries: dict[str, Any], name: str, given: Case, in_place: bool, rounds: int = 15) -> dict[str, Any]:
    c = given.c
    d = c if in_place else torch.empty_like(c)
    times = turns_us({library: given.call(libraries[library], d, c) for library in libraries}, rounds)
    _, m, n = c.shape
    row = {"case": name, "in_place": in_place, "us": times}
    row["tflops"] = {library: round(2 * m * n * sum(given.ks) / us / 1e6) for library, us in times.items()}
    print(row, f"x{times['deepgemm'] / times['ours']:.3f}" if "deepgemm" in times else "", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    worst = check_all()
    print("right", worst, flush=True)
    peer = import_peer()
    libraries = {"ours": ops} | ({"deepgemm": peer} if peer else {})
    rows = []
    for (groups, k), equal in itertools.product(((4, 8192), (8, 4096), (16, 2048)), (True, False)):
        given = case(7168, 2048, [k] * groups if equal else ragged(groups, k))
        kind = f"{groups}x7168x2048 K {k} {'equal' if equal else 'ragged'}"
        rows += [time_case(libraries, kind, given, in_place) for in_place in (True, False)]
    for groups, k in ((4, 8192), (8, 4096)):
        rows.append(time_case(libraries, f"{groups}x4096x7168 K {k} equal", case(4096, 7168, [k] * groups), True))
    if options.out:
        write_report(options.out, {"worst": worst, "peer": getattr(peer, "__version__", None), "rows": rows})


if __name__ == "__main__":
    main()
