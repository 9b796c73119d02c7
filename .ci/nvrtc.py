"""Compile every kernel with given versions of NVRTC, each in an environment of its own, with neither torch nor vLLM.

    .venv/bin/python .ci/nvrtc.py 12.8.93 12.9.86

Prints what ptxas reports that should not be there: local memory, warnings, lost speed. The exit status is 1 if anything
was. Environments and kernels stay in .versions. build_wheel.py compiles the kernels of the wheel in the same way.
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
    """What the package depends on, and NVRTC of this version with the bindings that load it."""
    major = int(version.split(".")[0])
    package = "nvidia-cuda-nvrtc-cu12" if major == 12 else "nvidia-cuda-nvrtc"
    return ["--requirements", "pyproject.toml", f"{package}=={version}", f"cuda-bindings=={major}.*"]


def find_links() -> list[str]:
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    return [word for folder in folders for word in ("--find-links", folder)]


def environment_of(version: str) -> Path:
    """Create the environment unless it exists. Returns its Python."""
    folder = ROOT / ".versions" / f"nvrtc-{version}"
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([*UV, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    install = [*UV, "pip", "install", "--quiet", "--python", str(python), *find_links(), *requirements(version)]
    subprocess.run(install, cwd=ROOT, check=True)
    return python


def bundle_kernels(version: str, bundle: Path, source: Path = ROOT) -> bool:
    """Write a bundle of every kernel. Progress and faults go to standard error.

    Args:
        source: a folder with the packages, a checkout or an unpacked sdist.
    Returns:
        whether every kernel compiles without a fault. Kernels with a fault do not stay in the cache.
    """
    print(f"--- NVRTC {version}", file=sys.stderr, flush=True)
    python = str(environment_of(version))
    cache = ROOT / ".versions" / "kernels" / version
    environment = os.environ | {"PYTHONPATH": str(source), "FP8MOE_CACHE_DIR": str(cache)}
    found = subprocess.check_output([python, "-c", FOUND], cwd=source, env=environment, text=True).strip()
    if found != f"nvrtc {version}":
        print(f"{found} is what the kernels would be compiled with", file=sys.stderr)
        return False
    command = [python, "-m", "warmup", "bundle", "--bundle", str(bundle), "--json", "-"]
    done = subprocess.run(command, cwd=source, env=environment, stdout=subprocess.PIPE, text=True)
    faulty = [kernel for kernel in json.loads(done.stdout or '{"kernels": []}')["kernels"] if kernel["detail"]]
    for kernel in faulty:
        print(f"{kernel['kernel']}: {kernel['detail']}", file=sys.stderr)
        # Only the process that compiles it gets ptxas' report. What does not compile is not in the cache.
        (cache / kernel["entry"]).unlink(missing_ok=True)
    return not (done.returncode or faulty)


if __name__ == "__main__":
    bundles = {version: ROOT / ".versions" / f"nvrtc-{version}" / "kernels.tar" for version in sys.argv[1:]}
    failed = [version for version, bundle in bundles.items() if not bundle_kernels(version, bundle)]
    sys.exit(f"NVRTC {', '.join(failed)}: see above" if failed else 0)
