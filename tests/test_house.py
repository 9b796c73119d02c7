"""Limits on the code: lines of a file and of a function, no circular imports, and no test that never runs in full."""

import ast
import re
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = sorted(path.relative_to(ROOT) for name in ("fp8moe_plugin", "warmup") for path in (ROOT / name).rglob("*.py"))
SOURCES = [*PYTHON, *(path.relative_to(ROOT) for path in (ROOT / "fp8moe_plugin/csrc").rglob("*.cu*"))]
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in PYTHON}

FILE_LINES, FUNCTION_LINES = 300, 60


def test_no_file_is_too_long() -> None:
    assert not [str(path) for path in SOURCES if len(text(path).splitlines()) > FILE_LINES]


def test_no_function_is_too_long() -> None:
    """Counts docstrings and nested functions, but not decorators."""
    long = {
        f"{path}: {node.name}"
        for path in PYTHON
        for node in ast.walk(ast.parse(text(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES
    }
    assert not long


def test_imports_are_not_circular() -> None:
    """Imports inside functions count: they may defer a slow import, but must not hide a circle."""
    graph = {name: set(imports(name, ast.parse(text(path)))) for name, path in MODULES.items()}
    assert circle(graph) is None


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert sorted(set(circle(graph) or ())) == ["b", "c"]


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import warmup.cli", {"warmup", "warmup.cli"}),
        ("from warmup import cli", {"warmup", "warmup.cli"}),
        ("from warmup.cli import run", {"warmup", "warmup.cli"}),
        ("def f():\n    from warmup import cli", {"warmup", "warmup.cli"}),
        ("import torch", set()),
    ],
)
def test_every_form_of_import_is_found(source: str, imported: set[str]) -> None:
    assert set(imports("fp8moe_plugin.plan", ast.parse(source))) == imported


def imports(importer: str, tree: ast.AST) -> Iterator[str]:
    """Yields the modules that a module imports, including the packages above them, except the importer's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer} has a relative import"
            names = [name for alias in node.names for name in (node.module, f"{node.module}.{alias.name}") if name]
        else:
            continue
        for name in names:
            parts = name.split(".")
            packages = (".".join(parts[: end + 1]) for end in range(len(parts)))
            yield from (found for found in packages if found in MODULES and not f"{importer}.".startswith(f"{found}."))


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def text(path: Path) -> str:
    return (ROOT / path).read_text()


def test_what_runs_in_part_is_run_in_full_by_make_faults() -> None:
    done = subprocess.run(["make", "-n", "faults"], cwd=ROOT, capture_output=True, text=True, check=True)
    run = {ROOT / word for word in done.stdout.split() if word.startswith("tests/")}
    in_part = re.compile(r"\bfaults\.[a-zA-Z_]+\(|\bfaults\.FULL\b|\bh\.pairwise\(")
    tests = {path for path in (ROOT / "tests").rglob("test_*.py") if in_part.search(path.read_text())}
    assert len(tests) > 10
    assert {path for path in tests if not run & {path, *path.parents}} == set()
