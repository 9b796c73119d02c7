"""Build the wheel with all CUDA kernels in it, so that nothing has to be compiled where it is installed.

    .venv/bin/python .ci/build_wheel.py dist

The wheel is built from an sdist, to which the bundle of the kernels is added: a checkout never has it. What was
compiled before is kept in .versions. auditwheel tags the wheel with the oldest glibc that its C extensions run with; it
needs both extensions, and so a C compiler. Earlier wheels of this project are removed from the folder.
"""

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from fp8moe_plugin.jit.compiler import nvrtc_version

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv"]
CACHE = ROOT / ".versions" / "kernels"
PACKAGE = "nvidia-cuda-nvrtc"
AUDITWHEEL = [*UV, "tool", "run", "--quiet", "--constraints", str(ROOT / "requirements/release.txt"), "auditwheel"]


def pinned() -> str:
    """Returns the version of NVRTC whose kernels are measured: the one of `requirements/cpu.txt`."""
    (version,) = re.findall(rf"^{PACKAGE}==(\S+)$", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE)
    return str(version)


def build(out: Path) -> Path:
    """Build the wheel in a folder. Returns its path."""
    if nvrtc_version() != f"nvrtc {pinned()}":
        sys.exit(
            f"The kernels of the wheel need {PACKAGE}=={pinned()}, but this is {nvrtc_version()}: install it here."
        )
    with tempfile.TemporaryDirectory() as scratch:
        run([*UV, "build", "--quiet", "--sdist", "--out-dir", scratch, str(ROOT)])
        (sdist,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        source = Path(scratch, sdist.name.removesuffix(".tar.gz"))
        bundle = source / "fp8moe_plugin" / "kernels.tar"
        # With the sources of the sdist: the kernels must fit these, whatever is edited meanwhile.
        run([sys.executable, "-m", "warmup", "bundle", "--bundle", str(bundle)], source, FP8MOE_CACHE_DIR=str(CACHE))
        run([*UV, "build", "--quiet", "--wheel", "--out-dir", f"{scratch}/wheel", str(source)])
        (wheel,) = Path(scratch, "wheel").glob("*.whl")
        return tag_into(out, wheel)


def tag_into(out: Path, wheel: Path) -> Path:
    """Write a wheel with its manylinux tag to a folder, as the only one of this project. Returns its path."""
    out.mkdir(exist_ok=True)
    for earlier in out.glob("fp8moe_plugin-*.whl"):
        earlier.unlink()
    run([*AUDITWHEEL, "repair", "--patcher", "none", "--wheel-dir", str(out.resolve()), str(wheel)])
    (tagged,) = out.glob("fp8moe_plugin-*.whl")
    return tagged


def run(command: list[str], folder: Path = ROOT, **variables: str) -> None:
    """Run a command, which reports its own failures and progress to standard error."""
    if subprocess.run(command, cwd=folder, env=os.environ | variables, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"failed: {shlex.join(command[:3])}")


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
