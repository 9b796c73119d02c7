"""Run the GPU tests, memcheck on the ops, racecheck on those of routers and indexers, and keep the results: required
before a change of kernels is merged.

python -m benchmarks.layer.gpu_checks --out benchmarks/results/gpu_checks-<date>.json
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.report import sources_sha256, write_report

# Otherwise it counts look-ups by cuda-bindings of functions that are newer than the driver.
SANITIZER = "compute-sanitizer --report-api-errors no --error-exitcode 9"
TESTS = "python -m pytest -q -m gpu tests/ops tests/layers tests/gpu tests/deep_gemm"
ALONE = "of_several_sizes_take_turns or in_less_than_300_ms"  # tests that watch the GPU's free memory, and the clock
CHECKS = {
    "alone": f"{TESTS} -k '{ALONE}'",
    "tests": f"{TESTS} -n 6 -k 'not ({ALONE})'",
    "memcheck": f"{SANITIZER} --tool memcheck python tests/gpu/smoke_matrix.py",
    "racecheck of the router": f"{SANITIZER} --tool racecheck python tests/gpu/smoke_matrix.py rout",
    "racecheck": f"{SANITIZER} --tool racecheck python tests/gpu/smoke_matrix.py mqa_logits",
}
SUMMARY = re.compile(r"^FAILED .*|(?:\d+ failed, )?\d+ passed.*|\d+ cases, .*|ERROR SUMMARY: .*", re.MULTILINE)


def run(command: str) -> dict[str, object]:
    """The exit status of the command, and the summary lines of its output."""
    parts = [sys.executable if part == "python" else part for part in shlex.split(command)]
    done = subprocess.run(parts, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout[-4000:])
    return {"command": command, "status": done.returncode, "summary": SUMMARY.findall(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    for name, command in CHECKS.items():
        results[name] = run(command)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
        if args.out:
            write_report(args.out, {"sources_sha256": sources_sha256()} | results)
    sys.exit(any(result["status"] for result in results.values()))


if __name__ == "__main__":
    main()
