"""Without libnvrtc, serving from a bundle works, and everything else says what to install."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fp8moe_plugin.errors import CompileError, KernelNotPrecompiled
from fp8moe_plugin.jit import bundle, compiler
from fp8moe_plugin.jit.compiler import compile_kernel, entry_name, nvrtc_version
from fp8moe_plugin.jit.lookup import Origin, find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import forget, set_variables
from warmup import kernels as warmup_kernels
from warmup.__main__ import main
from warmup.report import State

KEY, OTHER = (KernelKey("tiny", (("VALUE", value),)) for value in (3, 4))
CANNOT = "NVRTC cannot be loaded"
INSTALL = r"Install the package nvidia-cuda-nvrtc for this Python"
WARMUP = "fp8moe-warmup --model M --tp 8"
# What cuda-bindings calls to load a library. Each command's output ends with its exit status.
HIDDEN = """
import sys
import cuda.pathfinder

def hide(name):
    if name == "nvrtc":
        raise cuda.pathfinder.DynamicLibNotFoundError('Failure finding "libnvrtc.so.13": \\x1b[31m')
    return load(name)

load, cuda.pathfinder.load_nvidia_dynamic_lib = cuda.pathfinder.load_nvidia_dynamic_lib, hide
from warmup.__main__ import main

sys.stderr = sys.stdout
for command in sys.argv[1:]:
    print("exit status", main(command.split()), flush=True)
"""


@pytest.fixture
def path(kernels: Path, tmp_path: Path) -> Path:
    """A bundle of one kernel."""
    bundle.write_bundle(tmp_path / "b.tar", {KEY: compile_kernel(KEY).cubin})
    return tmp_path / "b.tar"


@pytest.mark.usefixtures("hidden")
def test_the_compiler_says_what_to_install(kernels: Path) -> None:
    for ask in (nvrtc_version, lambda: compile_kernel(KEY), lambda: find_or_compile(KEY)):
        with pytest.raises(CompileError, match=rf"^{CANNOT} \('Failure finding .*x1b\[31m'\)\. {INSTALL}"):
            ask()


def test_a_bundle_serves_under_forbid(path: Path, monkeypatch: pytest.MonkeyPatch, hidden: None) -> None:
    set_variables(monkeypatch, FP8MOE_BUNDLE=path, FP8MOE_JIT="forbid")
    assert find_or_compile(KEY).origin == Origin.BUNDLE


@pytest.mark.parametrize("given", [True, False], ids=["bundle", "no bundle"])
def test_a_miss_under_forbid_names_the_kernel_and_the_command(
    path: Path, monkeypatch: pytest.MonkeyPatch, hidden: None, given: bool
) -> None:
    set_variables(monkeypatch, FP8MOE_BUNDLE=path if given else "", FP8MOE_JIT="forbid")
    with pytest.raises(KernelNotPrecompiled) as caught:
        find_or_compile(OTHER, WARMUP)
    command = f"fp8moe-warmup bundle --model M --tp 8 --bundle {path}" if given else WARMUP
    assert str(caught.value).startswith("The kernel tiny VALUE=4 is not precompiled (")
    assert CANNOT in str(caught.value)
    assert f"Run `{command}` as this user" in str(caught.value)
    assert (f"{path} does not contain it" in str(caught.value)) == given


def test_list_looks_at_the_bundle(path: Path, monkeypatch: pytest.MonkeyPatch, hidden: None) -> None:
    set_variables(monkeypatch, FP8MOE_BUNDLE=path)
    found, missing = warmup_kernels.look_up({KEY: "why", OTHER: "why"})
    compiler_of_bundle = bundle.read_bundle(path).manifest.compiler
    assert (found.state, found.place) == (State.PRESENT, str(path))
    assert missing.state == State.MISSING
    assert missing.detail
    assert CANNOT in missing.detail
    assert [found.entry, missing.entry] == [entry_name(key, compiler_of_bundle) for key in (KEY, OTHER)]


def test_entries_of_a_bundle_are_named_by_its_own_compiler(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = entry_name(KEY, nvrtc_version())
    monkeypatch.setattr(warmup_kernels, "compiler_version", lambda target: "nvrtc 13.9.99")
    (report,) = warmup_kernels.look_into(path, {KEY: "why"})
    assert (report.state, report.entry) == (State.PRESENT, named)


def test_doctor_needs_no_compiler_with_a_complete_bundle(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hidden: None
) -> None:
    monkeypatch.setattr(warmup_kernels, "plan_of", lambda *args: {KEY: "why"})
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert f"WRONG  compiler: {CANNOT}" in printed
    assert f"WRONG  kernels: {CANNOT}" in printed
    set_variables(monkeypatch, FP8MOE_BUNDLE=path, FP8MOE_JIT="forbid")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"compiler: not needed, because all kernels are available; {CANNOT}" in printed
    assert "ok     kernels: all 1 are available" in printed


def test_commands_of_a_process_that_never_had_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = compile_kernel(KernelKey("combine")).cubin
    bundle.write_bundle(tmp_path / "b.tar", {KernelKey("combine"): cubin})
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=tmp_path / "cache")
    commands = [f"verify --bundle {tmp_path}/b.tar --json {tmp_path}/r.json", "compile", "list", "doctor"]
    done = subprocess.run([sys.executable, "-c", HIDDEN, *commands], capture_output=True, text=True, timeout=120)
    forget()
    verified, compiled, listed, examined, rest = done.stdout.split("exit status 1\n")
    assert (rest, done.stderr, done.returncode) == ("", "", 0)
    states = {k["kernel"]: k["state"] for k in json.loads((tmp_path / "r.json").read_text())["kernels"]}
    assert [kernel for kernel, state in states.items() if state == "present"] == ["combine"]
    assert "Run `fp8moe-warmup bundle --bundle" in verified
    assert "NVRTC" not in verified
    for printed in (compiled, listed):
        assert printed.startswith(f"error: {CANNOT} ('Failure finding ")
    assert f"WRONG  compiler: {CANNOT}" in examined
    assert "\x1b" not in done.stdout


def test_an_error_of_the_compiler_names_its_version(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: "int broken = ;")
    with pytest.raises(CompileError, match=rf"^tiny does not compile with {nvrtc_version()}: "):
        compile_kernel(KEY)
