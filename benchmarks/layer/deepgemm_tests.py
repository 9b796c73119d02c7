"""Run DeepGEMM's own tests for Hopper GPUs with our `fp8moe_plugin.deep_gemm` in its place, and with DeepGEMM itself.

    python -m benchmarks.layer.deepgemm_tests CHECKOUT --out benchmarks/results/deepgemm_tests-<date>.json

CHECKOUT is a clone of DeepGEMM, of which only Python files are read: tests/test_fp8_fp4.py, test_attention.py and
test_layout.py with their generators, and deep_gemm/testing and deep_gemm/utils. The library under test is what they
import as `deep_gemm`. A case is one element of what a test enumerates, with seeds of its own; where the test enumerates
nothing it is the whole test. BF16 GEMMs, FP4 and the comparison with cuBLAS are left out.

`us` is how long the GPU is busy with a whole call that the test times, by torch's profiler with a cold L2, including
copies and small kernels; `kernel_us` how long with the kernels that the test names, if there are any. With an --out
that exists, only cases without times are run again, so a run with --seconds is continued by the next.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import random
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from benchmarks.report import write_report
from fp8moe_plugin import deep_gemm as ours
from fp8moe_plugin import testing
from warmup.report import installed

FILES = ("test_fp8_fp4", "test_attention", "test_layout")
PEERS = ("deep_gemm", "vllm.third_party.deep_gemm")
CUBLAS = "nvjet"  # in the names of its kernels
SAMPLER = "sample_mqa_cases"  # gets the cases of a test in test_attention.py
LATER_NAMES = {"get_theoretical_mk_alignment_for_contiguous_layout": lambda expected_m=None: 128}
PASSED = "passed"
FAULT = "CUDA error"
Key = tuple[str, int]


# ---- a library under the tests ---------------------------------------------------------------------------------------


@dataclass
class Timer:
    """Stands in for the tests' `bench_kineto`: the times of a case."""

    rounds: int  # 0: call once, measure nothing
    whole: list[float] = field(default_factory=list)  # microseconds of each timed call
    kernels: list[float] = field(default_factory=list)  # of the kernels that the test names first

    def __call__(self, call: Callable[[], Any], kernel_names: str | tuple[str, ...], *_: Any, **__: Any) -> Any:
        names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
        times = [1.0] * len(names)
        if CUBLAS not in names:
            times = self.measure(call, names)
        return times[0] if isinstance(kernel_names, str) else tuple(times)

    def measure(self, call: Callable[[], Any], names: tuple[str, ...]) -> list[float]:
        if not self.rounds:
            call()
            return [1.0] * len(names)
        events = testing.profiled([call], self.rounds)
        whole = testing.median(testing.durations(events, None))
        named = [testing.median(testing.durations(events, name.strip("_"))) for name in names]
        self.whole.append(whole * 1e6)
        self.kernels.append((named[0] or whole) * 1e6)
        return [seconds or whole for seconds in named]

    def clear(self) -> None:
        self.whole.clear()
        self.kernels.clear()


class Tests(NamedTuple):
    """The test modules of a checkout, bound to a library."""

    modules: list[ModuleType]
    timer: Timer

    def function(self, test: str) -> Callable[[], None]:
        return getattr(self.module(test), test.split("::")[1])

    def module(self, test: str) -> ModuleType:
        return next(module for module in self.modules if module.__name__ == test.split("::")[0])


def load_tests(checkout: Path, library: Any, rounds: int) -> Tests:
    """Returns the tests, which find `library` when they import `deep_gemm`; no other module of this process does."""
    alias, timer = ModuleType("deep_gemm"), Timer(rounds)
    alias.__path__ = [str(checkout / "deep_gemm")]
    vars(alias)["__getattr__"] = lambda name: found(library, name)
    before = dict(sys.modules)
    places = [str(checkout / "tests"), *sys.path]
    try:
        for name in [name for name in sys.modules if name.split(".")[0] in ("deep_gemm", "generators", *FILES)]:
            del sys.modules[name]
        sys.modules |= {"deep_gemm": alias, "deep_gemm._C": alias}
        sys.path, places = places, sys.path
        helpers = importlib.import_module("deep_gemm.testing")
        vars(helpers)["bench_kineto"] = timer
        return Tests([importlib.import_module(name) for name in FILES], timer)
    finally:
        sys.path = places
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in ("deep_gemm", "generators", *FILES):
                del sys.modules[name]
        sys.modules |= before


def found(library: Any, name: str) -> Any:
    """Returns a function of the library, or of its extension; an older release gets what the tests' release added."""
    for place in (library, getattr(library, "_C", None)):
        if hasattr(place, name):
            value = getattr(place, name)
            return value if library is ours or not callable(value) else tolerant(value)
    if library is not ours and name in LATER_NAMES:
        return LATER_NAMES[name]
    raise AttributeError(name)


def tolerant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of an older DeepGEMM, which does not know options that are off."""

    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError:
            return function(*args, **{name: value for name, value in options.items() if value not in (None, False)})

    return call


def import_peer(name: str | None) -> Any:
    """DeepGEMM, or None if it cannot be imported."""
    for peer in (name,) if name else PEERS:
        try:
            return importlib.import_module(peer)
        except Exception as failure:  # noqa: BLE001 (it may be absent or fail in any way; ours counts)
            print(f"{peer}: {type(failure).__name__}: {str(failure)[:200]}")
    return None


# ---- cases -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    test: str  # "file::function"
    number: int
    label: str
    enumerator: str | None  # the function of the test's module that yields the cases
    value: Any

    @property
    def key(self) -> Key:
        return self.test, self.number


def all_cases(tests: Tests) -> list[Case]:
    """In an order in which each test gets its turn, wherever the run ends."""
    placed: list[tuple[float, Case]] = []
    for module in tests.modules:
        for name, function in vars(module).items():
            if name.startswith("test_") and getattr(function, "__module__", "") == module.__name__:
                cases = list(cases_of(module, name))
                random.Random(0).shuffle(cases)
                placed += [((i + 1) / (len(cases) + 1), case) for i, case in enumerate(cases)]
    return [case for _, case in sorted(placed, key=lambda pair: pair[0])]


def cases_of(module: ModuleType, name: str) -> Iterator[Case]:
    test, used = f"{module.__name__}::{name}", inspect.unwrap(vars(module)[name]).__code__.co_names
    enumerator = next((used for used in used if used.startswith("enumerate_") or used == SAMPLER), None)
    values = enumerated(module, name, enumerator) if enumerator else []
    for i, value in enumerate(values):
        yield Case(test, i, label(value), enumerator, value)
    if not values:
        yield Case(test, 0, "all", None, None)


def enumerated(module: ModuleType, name: str, enumerator: str) -> list[Any]:
    """Returns the cases of the test, which runs without any of them; no case if its first function is missing."""
    original, values = vars(module)[enumerator], []

    def record(*args: Any, **options: Any) -> list[Any]:
        values.extend(original(*args, **options))
        return []

    with replaced(module, enumerator, record), contextlib.suppress(ZeroDivisionError, AttributeError), quiet():
        seed()
        vars(module)[name]()  # a mean over no case divides by zero
    return values


@contextlib.contextmanager
def replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = vars(module)[name]
    vars(module)[name] = value
    try:
        yield
    finally:
        vars(module)[name] = before


def quiet() -> contextlib.redirect_stdout[io.StringIO]:
    return contextlib.redirect_stdout(io.StringIO())


def seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


def label(value: Any) -> str:
    """Returns the values of a case as text, but for objects that have none."""
    parts = value if isinstance(value, tuple) else (value,)
    shown = (part.name if isinstance(part, Enum) else str(part).removeprefix("torch.") for part in parts)
    return ", ".join(text for text in shown if " object at " not in text)


# ---- running ---------------------------------------------------------------------------------------------------------


def run(case: Case, tests: Tests) -> dict[str, Any]:
    """Returns the status of a case with one library, and its mean times."""
    module, timer = tests.module(case.test), tests.timer
    timer.clear()
    one = contextlib.nullcontext()
    if case.enumerator:
        one = replaced(module, case.enumerator, lambda *_, **__: [case.value])
    seed()
    try:
        with one, quiet():
            tests.function(case.test)()
        result: dict[str, Any] = {"status": PASSED}
    except Exception as failure:  # noqa: BLE001 (whatever a test raises is its result)
        result = {"status": textwrap.shorten(f"{type(failure).__name__}: {failure}", 200)}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if timer.whole:
        result["us"] = round(sum(timer.whole) / len(timer.whole), 2)
        result["kernel_us"] = round(sum(timer.kernels) / len(timer.kernels), 2)
    return result


def run_case(case: Case, both: dict[str, Tests]) -> dict[str, Any]:
    row: dict[str, Any] = {"test": case.test, "number": case.number, "case": case.label}
    for prefix, tests in both.items():
        row |= {prefix + key: value for key, value in run(case, tests).items()}
    return row


def line(row: dict[str, Any]) -> str:
    times = f"{row['us']:9.1f} us, DeepGEMM {row.get('deepgemm_us', 0):9.1f}" if "us" in row else ""
    peer = row.get("deepgemm_status", PASSED)
    return f"{row['test']} {row['case']}: {row['status']} {times}{'' if peer == PASSED else f' (DeepGEMM: {peer})'}"


def kept(path: Path | None, timed: bool) -> dict[Key, dict[str, Any]]:
    """Returns the rows of earlier runs that need not run again: if `timed`, those with times."""
    rows = json.loads(path.read_text())["rows"] if path and path.is_file() else []
    return {(row["test"], row["number"]): row for row in rows if not timed or "us" in row}


def summary(rows: list[dict[str, Any]], cases: int) -> dict[str, Any]:
    """Returns how many cases pass, and which fail that DeepGEMM passes."""
    owed = [row for row in rows if row["status"] != PASSED and row.get("deepgemm_status") == PASSED]
    return {
        "cases": cases,
        "run": len(rows),
        "passed": sum(row["status"] == PASSED for row in rows),
        "deepgemm_passed": sum(row.get("deepgemm_status") == PASSED for row in rows),
        "passed_by_deepgemm_alone": len(owed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a clone of DeepGEMM")
    parser.add_argument("--out", type=Path, help="the report; what it has is not run again")
    parser.add_argument("--peer", help=f"DeepGEMM's module; default: the first of {', '.join(PEERS)}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after so many")
    parser.add_argument("--rounds", type=int, default=10, help="calls per time; 0: no times")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th case, from the i-th on")
    parser.add_argument("--only", default="", help="tests whose name contains one of these, separated by commas")
    args = parser.parse_args()
    begin, (part, parts) = time.monotonic(), map(int, args.part.split("/"))
    both = {"": load_tests(args.checkout, ours, args.rounds)}
    if peer := import_peer(args.peer):
        both["deepgemm_"] = load_tests(args.checkout, peer, args.rounds)
    cases = [case for case in all_cases(both[""]) if any(name in case.test for name in args.only.split(","))]
    rows, done = kept(args.out, timed=False), kept(args.out, timed=args.rounds > 0)
    for case in cases[part::parts]:
        if time.monotonic() - begin > args.seconds:
            break
        if case.key in done:
            continue
        rows[case.key] = run_case(case, both)
        print(line(rows[case.key]), flush=True)
        if args.out:
            found = [rows[key] for key in sorted(rows)]
            write_report(args.out, about(peer) | summary(found, len(cases)) | {"rows": found})
        if FAULT in line(rows[case.key]):
            raise SystemExit("A kernel has failed, so nothing else runs on the GPU in this process. Run it again.")
    print(summary(list(rows.values()), len(cases)))


def about(peer: Any) -> dict[str, Any]:
    versions = {name: installed(name) for name in ("vllm", "fp8moe-plugin")}
    return versions | {"deepgemm": getattr(peer, "__version__", None)}


if __name__ == "__main__":
    main()
