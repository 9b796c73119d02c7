"""Build the wheel with all CUDA kernels in it, so that nothing has to be compiled where it is installed.

    python .ci/build_wheel.py dist

The kernels are compiled once for each major version of CUDA, by the NVRTCs of requirements/nvrtc.txt, see nvrtc.py.
The wheel is built from an sdist, to which their bundles are added: a checkout never has them. auditwheel tags the wheel
with the oldest glibc that its C extensions run with; it needs both extensions, and so a C compiler. Earlier wheels of
this project are removed from the folder. Needs uv, and nothing else of this project.
"""

import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from nvrtc import ROOT, UV, bundle_kernels

AUDITWHEEL = [*UV, "tool", "run", "--quiet", "--constraints", str(ROOT / "requirements/release.txt"), "auditwheel"]


def pinned() -> list[str]:
    """Returns the versions of NVRTC whose kernels are in the wheel, at most one of each major version."""
    pins = (ROOT / "requirements/nvrtc.txt").read_text()
    return re.findall(r"^nvidia-cuda-nvrtc(?:-cu12)?==(\S+)$", pins, re.MULTILINE)


def bundle_in_wheel(version: str) -> str:
    """Returns the path in the wheel of the kernels by a version of NVRTC; jit/wheel.py finds them there."""
    return f"fp8moe_plugin/kernels-cuda{version.partition('.')[0]}.tar"


def build(out: Path) -> Path:
    """Build the wheel in a folder. Returns its path."""
    with tempfile.TemporaryDirectory() as scratch:
        run([*UV, "build", "--quiet", "--sdist", "--out-dir", scratch, str(ROOT)])
        (sdist,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        source = Path(scratch, sdist.name.removesuffix(".tar.gz"))
        for version in pinned():
            # With the sources of the sdist: the kernels must fit these, whatever is edited meanwhile.
            if not bundle_kernels(version, source / bundle_in_wheel(version), source):
                sys.exit(f"The kernels of NVRTC {version} are not fit for the wheel: see above")
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


def run(command: list[str]) -> None:
    """Run a command, which reports its own failures and progress to standard error."""
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"failed: {shlex.join(command[:3])}")


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
