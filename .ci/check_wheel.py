"""Check that the wheel works without torch and vLLM: it registers, and warms up; and with torch: its ops are imported.

Runs with the Python of an environment that has uv and torch; installs the wheel into a new environment.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv"]

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
COMMANDS = (
    "--bundle kernels.tar",
    "list",
    "explain --model MODEL --tp 8",
    "verify --bundle kernels.tar",
    "doctor",
    "--print-completion bash",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run([*UV, "build", "--quiet", "--wheel", "--out-dir", scratch, str(ROOT)])
        (wheel,) = Path(scratch).glob("*.whl")
        check_sources(wheel)
        python = Path(scratch, "env", "bin", "python")
        run([*UV, "venv", "--quiet", "--python", sys.executable, str(python.parents[1])])
        install = [*UV, "pip", "install", "--quiet", "--python", str(python), *find_links()]
        run([*install, str(wheel)])
        run([str(python), "-I", "-c", REGISTER], cwd=scratch)
        model = Path(scratch, "MODEL", "config.json")
        model.parent.mkdir()
        shutil.copy(ROOT / "tests/checkpoint/configs/DeepSeek-V3.json", model)
        warmup = str(python.with_name("fp8moe-warmup"))
        for command in COMMANDS:
            run([warmup, *command.split()], cwd=scratch, PATH="", HOME=scratch)
        check_refusal([warmup, "bench", "--model", "MODEL"], scratch)
        run([*install, f"torch=={metadata.version('torch')}"])  # the build that is already downloaded
        run([str(python), "-I", "-c", IMPORT], cwd=scratch)
        print(f"{wheel.name} is good")


def check_refusal(command: list[str], cwd: str) -> None:
    done = subprocess.run(command, cwd=cwd, env={"PATH": "", "HOME": cwd}, stderr=subprocess.PIPE, text=True)
    if done.returncode != 1 or not done.stderr.startswith("error: bench needs PyTorch, which is not installed."):
        sys.exit(f"bench without torch: status {done.returncode}, {done.stderr}")


def check_sources(wheel: Path) -> None:
    sources = (ROOT / "fp8moe_plugin/csrc").rglob("*.cu*")
    wanted = {str(path.relative_to(ROOT)) for path in sources}
    extensions = {f"fp8moe_plugin/{name}.abi3.so" for name in ("jit/_sequence", "ops/_signature")}
    wanted |= {"fp8moe_plugin/py.typed"} | extensions
    files = set(zipfile.ZipFile(wheel).namelist())
    if missing := wanted - files:
        sys.exit(f"{wheel.name} lacks {sorted(missing)}")
    if stale := [name for name in files if name.endswith((".py", ".cu", ".cuh")) and not (ROOT / name).exists()]:
        sys.exit(f"{wheel.name} has {sorted(stale)} of an earlier build: remove the folder build/")


def find_links() -> list[str]:
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    return [word for folder in folders for word in ("--find-links", folder)]


def run(command: list[str], cwd: str | None = None, **variables: str) -> None:
    """Run a command, which reports its own failures; if `variables` are given, they are its whole environment."""
    if subprocess.run(command, cwd=cwd, env=variables or None).returncode:
        sys.exit(f"failed: {shlex.join(command[:3])}")


if __name__ == "__main__":
    main()
