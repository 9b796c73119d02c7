"""Run the GPU tests, memcheck on the ops, racecheck on some of them, and keep the results: required before a change of
kernels is merged.

racecheck reports false races where one thread arrives at an mbarrier for others, as in our GEMMs. Its kernel filter
ends in an internal error, so it runs only those checks that have no such kernel.

python -m benchmarks.layer.gpu_checks --out benchmarks/results/gpu_checks-<date>.json
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.report import write_report

# Otherwise it counts look-ups by cuda-bindings of functions that are newer than the driver.
SANITIZER = "compute-sanitizer --report-api-errors no --error-exitcode 9"
SMOKE = "python tests/gpu/smoke_matrix.py"
TESTS = "python -m pytest -q -m gpu tests/ops tests/layers tests/gpu tests/deep_gemm"
ALONE = "of_several_sizes_take_turns or in_less_than_300_ms"  # tests that watch the GPU's free memory, and the clock
CHECKS = {
    "alone": f"{TESTS} -k '{ALONE}'",
    "tests": f"{TESTS} -n 6 -k 'not ({ALONE})'",
    "memcheck": f"{SANITIZER} --tool memcheck {SMOKE}",
    "racecheck": f"{SANITIZER} --tool racecheck {SMOKE} quantize silu_mul_quant route choose_experts router_gemm",
    "racecheck of indexers": f"{SANITIZER} --tool racecheck {SMOKE} mqa_logits paged_mqa_logits",
}
PARTS = r"^FAILED .*", r"(?:\d+ failed, )?\d+ passed.*", r"\d+ cases, .*", r"(?:ERROR|RACECHECK) SUMMARY: .*"
SUMMARY = re.compile("|".join(PARTS), re.MULTILINE)


def run(command: str) -> dict[str, object]:
    """Returns the exit status of the command, and the summary lines of its output."""
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
            write_report(args.out, results)
    sys.exit(any(result["status"] for result in results.values()))


if __name__ == "__main__":
    main()
