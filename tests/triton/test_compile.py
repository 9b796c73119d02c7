"""Every Triton kernel of every target compiles on a machine without a GPU, into what the launcher can launch."""

import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fp8moe_plugin.errors import CompileError
from fp8moe_plugin.jit import triton_compiler
from fp8moe_plugin.jit.cache import CHECKSUM_BYTES
from fp8moe_plugin.jit.compiler import compile_kernel, compiler_version, entry_name
from fp8moe_plugin.jit.cubin import cubin_fault, split_shared_memory
from fp8moe_plugin.jit.triton_compiler import compile_triton
from fp8moe_plugin.launches.kernel_sets import all_kernels
from fp8moe_plugin.plan.triton.catalog import GPUS, TARGETS, quantize_key
from fp8moe_plugin.plan.triton.signatures import TRITON_SIGNATURES
from tests import faults
from tests.jit.conftest import forget, set_variables
from tests.shared import built_once
from warmup.__main__ import main
from warmup.report import KernelReport, Report, State

KIB = 1024
# Shared memory of a block: CUDA C++ Programming Guide, technical specifications per compute capability.
LIMITS = {"sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99, "sm_121": 99}
ALIKE = ("sm103", "sm121")  # compiled like sm100 and sm120


@pytest.fixture(scope="module", params=[name for name in GPUS if faults.FULL or name not in ALIKE])
def gpu(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(gpu: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `cache`, where the warm-up has compiled every kernel for this GPU, a bundle and a report."""

    def fill(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            set_variables(patch, FP8MOE_CACHE_DIR=folder / "cache")
            archive, report = folder / "kernels.tar", folder / "report.json"
            assert main(["bundle", "--gpu", gpu, "--bundle", str(archive), "--json", str(report)]) == 0
        forget()

    return built_once(tmp_path_factory, f"triton_{gpu}", fill)


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[KernelReport]:
    return Report.model_validate_json((folder / "report.json").read_text()).kernels


def test_every_kernel_compiles_without_spills(gpu: str, reports: list[KernelReport]) -> None:
    keys = all_kernels(GPUS[gpu])
    assert [report.entry for report in reports] == [entry_name(key, compiler_version(GPUS[gpu])) for key in keys]
    assert {report.state for report in reports} == {State.COMPILED}
    assert [report.detail for report in reports if report.detail] == []  # it would name spills


def test_every_kernel_is_for_its_gpu_and_fits_it(gpu: str, folder: Path, reports: list[KernelReport]) -> None:
    for report in reports:
        file = (folder / "cache" / report.entry).read_bytes()[CHECKSUM_BYTES:]
        cubin, shared = split_shared_memory(file)
        assert cubin_fault(cubin, GPUS[gpu]) is None
        assert 0 <= shared <= LIMITS[GPUS[gpu]] * KIB, report.kernel


def test_a_bundle_serves_where_nothing_may_be_compiled_and_triton_is_not_imported(gpu: str, folder: Path) -> None:
    script = (
        "import sys\n"
        "from fp8moe_plugin.jit.lookup import find_or_compile, Origin\n"
        "from fp8moe_plugin import ops\n"
        "from fp8moe_plugin.launches.kernel_sets import all_kernels\n"
        f"assert all(find_or_compile(key).origin == Origin.BUNDLE for key in all_kernels({GPUS[gpu]!r}))\n"
        "assert not [name for name in sys.modules if name.startswith('fp8moe_plugin.triton_kernels')]\n"
        "assert 'triton' not in sys.modules\n"
    )
    variables = {"FP8MOE_BUNDLE": str(folder / "kernels.tar"), "FP8MOE_JIT": "forbid", "HOME": "/nowhere"}
    subprocess.run([sys.executable, "-c", script], check=True, env=variables, cwd=Path(__file__).parents[2])


def test_compiling_again_gives_the_same_bytes() -> None:
    key = quantize_key("sm_89", ue8m0=False)
    assert compile_kernel(key).cubin == compile_kernel(key).cubin


def test_the_targets_are_those_of_the_programming_guide() -> None:
    assert {target: limit for target, (_, limit) in TARGETS.items()} == {t: kib * KIB for t, kib in LIMITS.items()}


def test_file_name_depends_on_target_constants_and_version() -> None:
    keys = [key for target in TARGETS for key in all_kernels(target)]
    names = {entry_name(key, version) for key in keys for version in ("triton 3.6.0", "triton 3.9.0")}
    assert len(names) == 2 * len(keys)


def test_a_kernel_that_takes_other_parameters_than_a_launch_passes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    key = quantize_key("sm_90", ue8m0=False)
    monkeypatch.setitem(triton_compiler.PARAMETERS, key.source, triton_compiler.PARAMETERS[key.source][:-1])
    with pytest.raises(CompileError, match="takes other parameters than a launch passes"):
        compile_kernel(key)


def test_a_kernel_that_needs_more_shared_memory_than_the_gpu_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    key = quantize_key("sm_90", ue8m0=False)
    monkeypatch.setitem(triton_compiler.TARGETS, key.target, ((9, 0), 16))
    with pytest.raises(CompileError, match="bytes of shared memory, more than 16"):
        compile_kernel(key)


def test_settings_of_triton_change_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names of kernels do not depend on them."""
    from triton import knobs

    key = quantize_key("sm_90", ue8m0=False)
    cubin, _ = compile_triton(key)
    (tmp_path / "ptxas").symlink_to("/bin/false")
    variables = {"DISABLE_PTXAS_OPT": "1", "PTXAS_OPTIONS": "-O0", "TRITON_PTXAS_PATH": str(tmp_path / "ptxas")}
    for name, value in (variables | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    before = {name: knobs.nvidia.knobs[name] for name in ("disable_ptxas_opt", "ptxas_options")}
    assert before == {"disable_ptxas_opt": True, "ptxas_options": "-O0"}
    assert compile_triton(key)[0] == cubin
    assert {name: knobs.nvidia.knobs[name] for name in before} == before
    assert {name: os.environ[name] for name in variables} == variables
    assert not (tmp_path / "cache").exists()


def test_threads_that_compile_leave_triton_and_stdout_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    from triton import knobs
    from triton.backends.nvidia import compiler

    keys = [quantize_key(target, ue8m0) for target in ("sm_89", "sm_90") for ue8m0 in (False, True)]
    before, directory = knobs.compilation.knobs, knobs.cache.dir
    reports: list[str] = []
    threads = [threading.Thread(target=lambda key=key: reports.append(compile_triton(key)[1])) for key in keys]
    for thread in threads:
        thread.start()
    lines = 0
    while any(thread.is_alive() for thread in threads):
        print("a line of another thread")
        lines += 1
        time.sleep(0.01)
    assert capsys.readouterr().out.count("a line of another thread\n") == lines
    assert len(reports) == len(keys)
    assert all("registers" in report for report in reports)
    assert (knobs.compilation.knobs, knobs.cache.dir) == (before, directory)
    assert "print" not in vars(compiler)


def test_under_tritons_interpreter_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CompileError, match=r"TRITON_INTERPRET is set, .* Unset it"):
        compile_triton(quantize_key("sm_90", ue8m0=False))


def test_what_triton_refuses_is_an_error_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    key = quantize_key("sm_90", ue8m0=False)
    broken = [p._replace(type="*bf16", divisor=1) if p.name == "tokens" else p for p in TRITON_SIGNATURES[key.source]]
    monkeypatch.setitem(triton_compiler.TRITON_SIGNATURES, key.source, tuple(broken))
    with pytest.raises(CompileError, match=r"does not compile with triton [0-9.]+: ") as caught:
        compile_kernel(key)
    assert "Use the Triton that PyTorch requires" in str(caught.value)


@pytest.mark.parametrize(
    ("torch", "command"),
    [
        (
            ['triton==3.6.0 ; platform_system == "Linux"'],
            r"`pip install 'triton==3.6.0'`, which PyTorch 2.11.0 requires",
        ),
        (["filelock"], "`pip install triton`"),
        (None, "`pip install triton`"),
    ],
)
def test_without_triton_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, torch: list[str] | None, command: str
) -> None:
    def version(name: str) -> str:
        if name == "torch":
            return "2.11.0"
        raise triton_compiler.metadata.PackageNotFoundError(name)

    def requires(name: str) -> list[str]:
        if torch is None:
            raise triton_compiler.metadata.PackageNotFoundError(name)
        return torch

    monkeypatch.setattr(triton_compiler.metadata, "version", version)
    monkeypatch.setattr(triton_compiler.metadata, "requires", requires)
    triton_compiler.triton_version.cache_clear()
    with pytest.raises(CompileError, match=rf"Triton is not installed.*{command}.*FP8MOE_BUNDLE"):
        compile_kernel(quantize_key("sm_89", ue8m0=False))
    triton_compiler.triton_version.cache_clear()


@pytest.mark.parametrize("file", [b"", b"\x7fELF", struct.pack("<I", 7)])
def test_a_file_without_shared_memory_is_no_triton_kernel(file: bytes) -> None:
    with pytest.raises(ValueError, match="without its shared memory"):
        split_shared_memory(file)
