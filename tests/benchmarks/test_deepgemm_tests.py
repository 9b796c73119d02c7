"""DeepGEMM's tests run with either library, on a checkout whose tests are small and of our own."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.layer import deepgemm_tests
from benchmarks.layer.deepgemm_tests import PASSED, all_cases, load_tests, run_case

FILES = {
    "deep_gemm/__init__.py": "raise ImportError('the library itself is not for import')",
    "deep_gemm/testing/__init__.py": "def bench_kineto(fn, name): raise AssertionError('not replaced')",
    "deep_gemm/utils/__init__.py": "from .._C import double, get_theoretical_mk_alignment_for_contiguous_layout",
    "tests/generators.py": """
import enum, random
class Kind(enum.Enum):
    A = 1
def enumerate_sizes():
    for n in (3, 4, 5):
        yield Kind.A, n, object()
""",
    "tests/test_fp8_fp4.py": """
import deep_gemm
from deep_gemm.testing import bench_kineto
from generators import enumerate_sizes
import functools
times = []
def decorated(test):
    @functools.wraps(test)
    def run():
        test()
    return run
@decorated
def test_double():
    for kind, n, _ in enumerate_sizes():
        if deep_gemm.double(n, ensure=False) != 2 * n:
            raise ArithmeticError(f'{n} is wrong')
        times.append(bench_kineto(lambda: deep_gemm.double(n), 'double_', suppress=True))
        assert bench_kineto(lambda: 1 / 0, ('nvjet', 'reduce')) == (1.0, 1.0)
    print(sum(times) / len(times))
""",
    "tests/test_attention.py": """
import deep_gemm
def sample_mqa_cases(name, cases):
    return cases[:2]
def test_sampled():
    def enumerate_cases():
        yield from ((i, True) for i in range(9))
    for i, _ in sample_mqa_cases('x', list(enumerate_cases())):
        if i > 0:
            raise ArithmeticError
""",
    "tests/test_layout.py": """
import random
from deep_gemm.utils import double, get_theoretical_mk_alignment_for_contiguous_layout as alignment
seeds = []
def test_whole():
    seeds.append(random.random())
    assert double(alignment()) == 256
""",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def double(n: int) -> int:
    """As of an older release: without the option that the test leaves off."""
    return 2 * n if n != 5 else 11


PEER = SimpleNamespace(double=double)


def test_each_case_has_its_own_result(checkout: Path) -> None:
    modules = dict(sys.modules)
    tests = load_tests(checkout, PEER, rounds=0)
    assert sys.modules == modules
    cases = all_cases(tests)
    assert sorted((case.test, case.number) for case in cases) == [
        ("test_attention::test_sampled", 0),
        ("test_attention::test_sampled", 1),
        *(("test_fp8_fp4::test_double", i) for i in range(3)),
        ("test_layout::test_whole", 0),
    ]
    rows = {(row["test"], row["case"]): row["status"] for row in (run_case(case, {"": tests}) for case in cases)}
    assert rows == {
        ("test_attention::test_sampled", "0, True"): PASSED,
        ("test_attention::test_sampled", "1, True"): "ArithmeticError:",
        ("test_fp8_fp4::test_double", "A, 3"): PASSED,
        ("test_fp8_fp4::test_double", "A, 4"): PASSED,
        ("test_fp8_fp4::test_double", "A, 5"): "ArithmeticError: 5 is wrong",
        ("test_layout::test_whole", "all"): PASSED,
    }


def test_both_libraries_get_the_same_random_numbers(checkout: Path) -> None:
    both = {"": load_tests(checkout, PEER, rounds=0), "deepgemm_": load_tests(checkout, PEER, rounds=0)}
    case = next(case for case in all_cases(both[""]) if case.test.startswith("test_layout"))
    row = run_case(case, both)
    assert (row["status"], row["deepgemm_status"]) == (PASSED, PASSED)
    first, second = (tests.module(case.test).seeds for tests in both.values())
    assert first[0] == second[0]


def test_the_means_of_a_case_are_its_times(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = load_tests(checkout, PEER, rounds=3)
    events = [("bitwise_not", 9.0), ("copy", 1e-6), ("double_kernel", 2e-6)]
    monkeypatch.setattr(deepgemm_tests.testing, "profiled", lambda calls, rounds: events)
    case = next(case for case in all_cases(tests) if case.label == "A, 3")
    row = run_case(case, {"": tests})
    assert (row["us"], row["kernel_us"]) == (pytest.approx(3), pytest.approx(2))
    assert tests.module(case.test).times == [2e-6]


def test_a_library_without_a_function_fails_the_test_that_needs_it(checkout: Path) -> None:
    (checkout / "tests/test_attention.py").write_text("import deep_gemm\ndef test_it():\n    deep_gemm.more()")
    tests = load_tests(checkout, PEER, rounds=0)
    (row,) = (run_case(c, {"": tests}) for c in all_cases(tests) if c.test.startswith("test_attention"))
    assert row["status"] == "AttributeError: more"


def test_a_run_is_continued(checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepgemm_tests, "ours", PEER)
    monkeypatch.setattr(deepgemm_tests, "import_peer", lambda name: None)
    ran: list[str] = []
    monkeypatch.setattr(deepgemm_tests, "run_case", lambda case, both: ran.append(case.label) or run_case(case, both))
    out = tmp_path / "rows.json"

    def run(*options: str) -> list[str]:
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["deepgemm_tests", str(checkout), "--out", str(out), "--rounds=0", *options])
        deepgemm_tests.main()
        return list(ran)

    monkeypatch.setattr(deepgemm_tests, "found", lambda library, name: deepgemm_tests.tolerant(double))
    first, second = run("--part=0/2"), run()
    assert (len(first), len(second)) == (3, 3)
    assert run() == []
    report = json.loads(out.read_text())
    assert (report["cases"], report["run"]) == (6, 6)
    assert report["passed"] == sum(row["status"] == PASSED for row in report["rows"])
