"""Check the wheel that `make wheel` builds, in a new environment.

Without torch and vLLM, it registers, and NVRTC compiles a kernel. Without NVRTC, too, it has every kernel of every
model, with the cuda-bindings of each major version of CUDA. With torch, its ops are imported. Runs with the Python of
an environment that has uv and torch.
"""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from build_wheel import AUDITWHEEL, build, bundle_in_wheel, pinned
from nvrtc import ROOT, UV, find_links

# These run in the new environment, away from the repository.
REGISTER = """
import importlib.util, sys
from importlib import metadata

for name in ("torch", "vllm"):
    assert importlib.util.find_spec(name) is None, f"the environment has {name}: this check says nothing"
import fp8moe_plugin

(entry_point,) = metadata.entry_points(group="vllm.general_plugins", name="fp8moe")
register = entry_point.load()
register()
register()
assert "cuda" not in sys.modules, "register() imports the CUDA bindings"
print("imported from", fp8moe_plugin.__file__)
"""
IMPORT = """
import sys

import fp8moe_plugin
fp8moe_plugin.register()
assert "torch" not in sys.modules, "register() imports torch"
import torch
import fp8moe_plugin.ops
assert not torch.cuda.is_initialized(), "importing the ops initializes CUDA"
"""
COMPILE = """
from fp8moe_plugin.jit import lookup
from fp8moe_plugin.jit.compiler import nvrtc_version
from fp8moe_plugin.plan.keys import KernelKey

made = lookup.compile_into_cache(KernelKey("combine"))
assert made.compiled and not made.faults, made
assert lookup.find(KernelKey("combine")).origin == "cache"
print(f"{nvrtc_version()} compiles")
"""
# Under FP8MOE_JIT=forbid. The arguments are the compiler of the kernels, and the folders of models.
SERVE = """
import sys

from fp8moe_plugin.errors import CompileError
from fp8moe_plugin.jit.compiler import nvrtc_version
from fp8moe_plugin.jit.lookup import Origin, compiler_of, find_or_compile
from fp8moe_plugin.launches.kernel_sets import all_kernels
from fp8moe_plugin.plan.keys import SM90
from warmup.__main__ import main

try:
    sys.exit(f"the environment has {nvrtc_version()}: this check says nothing")
except CompileError:
    pass
assert {find_or_compile(key).origin for key in all_kernels()} == {"wheel"}
compiler, *models = sys.argv[1:]
assert compiler_of(Origin.WHEEL, SM90) == compiler
for model in models:
    assert main(["verify", "--model", model]) == 0, model
"""
COMMANDS = (
    "list",
    "explain --model DeepSeek-V3 --tp 8",
    "compile",
    "bundle --model DeepSeek-V3 --bundle kernels.tar",
    "verify --model DeepSeek-V3 --bundle kernels.tar",
    "doctor --model DeepSeek-V3 --tp 8",
    "--print-completion bash",
)

REFUSED = {
    "bench --model DeepSeek-V3": "bench needs PyTorch, which is not installed.",
    "verify --model deepseek-ai/DeepSeek-V3": "Run `pip install huggingface_hub`, or give a folder",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build(Path(scratch))
        check_sources(wheel)
        check_tag(wheel)
        python = Path(scratch, "env", "bin", "python")
        run([*UV, "venv", "--quiet", "--python", sys.executable, str(python.parents[1])])
        install = [*UV, "pip", "install", "--quiet", "--python", str(python), *find_links()]
        run([*install, str(wheel)])
        for check in (REGISTER, COMPILE):
            run([str(python), "-I", "-c", check], cwd=scratch, HOME=f"{scratch}/home")
        run([*UV, "pip", "uninstall", "--quiet", "--python", str(python), "nvidia-cuda-nvrtc"])
        models = copied_models(scratch)
        empty = {"PATH": "", "HOME": scratch, "FP8MOE_JIT": "forbid"}
        warmup = str(python.with_name("fp8moe-warmup"))
        for version in pinned():
            run([*install, f"cuda-bindings=={version.partition('.')[0]}.*"])
            run([str(python), "-I", "-c", SERVE, f"nvrtc {version}", *models], cwd=scratch, **empty)
            for command in COMMANDS:
                run([warmup, *command.split()], cwd=scratch, **empty)
        for refused, reason in REFUSED.items():
            check_refusal([warmup, *refused.split()], reason, scratch)
        run([*install, f"torch=={metadata.version('torch')}"])  # the build that is already downloaded
        run([str(python), "-I", "-c", IMPORT], cwd=scratch)
        print(f"{wheel.name} is good")


def copied_models(scratch: str) -> list[str]:
    """Returns the names of folders in `scratch`, each with the config.json of a model."""
    configs = sorted((ROOT / "tests/checkpoint/configs").glob("*.json"))
    for config in configs:
        folder = Path(scratch, config.stem)
        folder.mkdir()
        shutil.copy(config, folder / "config.json")
    return [config.stem for config in configs]


def check_refusal(command: list[str], reason: str, cwd: str) -> None:
    done = subprocess.run(command, cwd=cwd, env={"PATH": "", "HOME": cwd}, stderr=subprocess.PIPE, text=True)
    if done.returncode != 1 or not done.stderr.startswith("error: ") or reason not in done.stderr:
        sys.exit(f"{shlex.join(command[1:])}: status {done.returncode}, {done.stderr}")


def check_sources(wheel: Path) -> None:
    sources = (ROOT / "fp8moe_plugin/csrc").rglob("*.cu*")
    wanted = {str(path.relative_to(ROOT)) for path in sources}
    extensions = {f"fp8moe_plugin/{name}.abi3.so" for name in ("jit/_sequence", "ops/_signature")}
    wanted |= {"fp8moe_plugin/py.typed", *map(bundle_in_wheel, pinned())} | extensions
    files = set(zipfile.ZipFile(wheel).namelist())
    if missing := wanted - files:
        sys.exit(f"{wheel.name} lacks {sorted(missing)}")
    if stale := [name for name in files if name.endswith((".py", ".cu", ".cuh")) and not (ROOT / name).exists()]:
        sys.exit(f"{wheel.name} has {sorted(stale)} of an earlier build: remove the folder build/")


def check_tag(wheel: Path) -> None:
    """PyPI accepts manylinux tags only, and pip believes the tag: its glibc must suffice for the extensions."""
    shown = subprocess.run([*AUDITWHEEL, "show", "--json", str(wheel)], stdout=subprocess.PIPE, text=True, check=True)
    needed = json.loads(shown.stdout)["overall_tag"]
    if not needed.startswith("manylinux") or needed not in wheel.stem.rpartition("-")[2].split("."):
        sys.exit(f"{wheel.name} needs the tag {needed}")


def run(command: list[str], cwd: str | None = None, **variables: str) -> None:
    """Run a command, which reports its own failures; if `variables` are given, they are its whole environment."""
    if subprocess.run(command, cwd=cwd, env=variables or None).returncode:
        sys.exit(f"failed: {shlex.join(command[:3])}")


if __name__ == "__main__":
    main()
