"""Run the GPU tests, and memcheck on the ops, and keep the results: required before a change of kernels is merged.

python -m benchmarks.layer.gpu_checks --out benchmarks/results/gpu_checks-<date>.json
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.report import sources_sha256, write_report

# Otherwise memcheck counts look-ups by cuda-bindings of functions that are newer than the driver.
MEMCHECK = "compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9"
CHECKS = {
    "tests": "python -m pytest -q -m gpu tests/ops tests/layers tests/gpu",
    "memcheck": f"{MEMCHECK} python tests/gpu/smoke_matrix.py",
}
SUMMARY = re.compile(r"^FAILED .*|(?:\d+ failed, )?\d+ passed.*|\d+ cases, .*|ERROR SUMMARY: .*", re.MULTILINE)


def run(command: str) -> dict[str, object]:
    """The exit status of the command, and the summary lines of its output."""
    parts = [sys.executable if part == "python" else part for part in command.split()]
    done = subprocess.run(parts, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout[-4000:])
    return {"command": command, "status": done.returncode, "summary": SUMMARY.findall(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {name: run(command) for name, command in CHECKS.items()}
    print(json.dumps(results, indent=1))
    if args.out:
        write_report(args.out, {"sources_sha256": sources_sha256()} | results)
    sys.exit(any(result["status"] for result in results.values()))


if __name__ == "__main__":
    main()
