"""Compile every kernel with other versions of NVRTC, each in an environment of its own that has neither torch nor vLLM.

    .venv/bin/python .ci/nvrtc.py 12.8.93 12.9.86

Prints what ptxas reports that should not be there: local memory, warnings, lost speed. The exit status is 1 if anything
was. Environments and kernels stay in .versions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv"]
FOUND = "from fp8moe_plugin.jit.compiler import nvrtc_version; print(nvrtc_version())"


def requirements(version: str) -> list[str]:
    """The package, and NVRTC of this version with the bindings that load it."""
    major = int(version.split(".")[0])
    package = "nvidia-cuda-nvrtc-cu12" if major == 12 else "nvidia-cuda-nvrtc"
    return [".", f"{package}=={version}", f"cuda-bindings=={major}.*"]


def compiles(version: str) -> bool:
    folder = ROOT / ".versions" / f"nvrtc-{version}"
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([*UV, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    install = [*UV, "pip", "install", "--quiet", "--python", str(python), *requirements(version)]
    subprocess.run(install, cwd=ROOT, check=True)
    report = folder / "report.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FP8MOE_CACHE_DIR": str(folder / "cache")}
    command = [str(python), "-m", "warmup", "bundle", "--bundle", str(folder / "kernels.tar"), "--json", str(report)]
    print(f"--- NVRTC {version}", flush=True)
    found = subprocess.check_output([str(python), "-c", FOUND], cwd=ROOT, env=environment, text=True).strip()
    if found != f"nvrtc {version}":
        print(f"{found} is what the kernels would be compiled with")
        return False
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        return False
    faults = [kernel for kernel in json.loads(report.read_text())["kernels"] if kernel["detail"]]
    print(*(f"{kernel['kernel']}: {kernel['detail']}\n" for kernel in faults), sep="", end="")
    return not faults


if __name__ == "__main__":
    failed = [version for version in sys.argv[1:] if not compiles(version)]
    sys.exit(f"NVRTC {', '.join(failed)}: see above" if failed else 0)
