"""FP8MOE_JIT_DEBUG=1 tells how a kernel was compiled and keeps what came out; without it nothing is kept."""

from pathlib import Path

import pytest

from fp8moe_plugin.jit import compiler, dump
from fp8moe_plugin.jit.cubin import split_shared_memory
from fp8moe_plugin.jit.lookup import find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.triton.catalog import combine_key
from tests.jit.conftest import set_variables

KEY = KernelKey("tiny", (("VALUE", 3),))


def files(folder: Path) -> dict[str, Path]:
    return {path.suffix[1:]: path for path in folder.iterdir() if path.suffix != ".lock"}


def test_all_that_compiling_a_kernel_leaves(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_variables(monkeypatch, FP8MOE_JIT_DEBUG=1)
    cubin = find_or_compile(KEY).cubin
    found, told = files(kernels), capsys.readouterr().err
    assert found.keys() >= {"cubin", "cu", "elf", "txt"}
    assert len({path.stem for path in found.values()}) == 1
    assert found["cu"].read_text() == compiler.translation_unit(KEY)
    assert found["elf"].read_bytes() == cubin
    report = found["txt"].read_text()
    assert report.startswith("nvcc -arch=sm_90a -std=c++17 --ptxas-options=-v --cubin tiny.cu\n")
    assert " registers" in report
    assert report in told
    assert "fp8moe: tiny VALUE=3: " in told


def test_all_that_compiling_a_triton_kernel_leaves(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, FP8MOE_JIT_DEBUG=1)
    key = combine_key("sm_89")
    cubin, _ = split_shared_memory(find_or_compile(key).cubin)
    found = files(kernels)
    assert found.keys() >= {"cubin", "py", "elf", "txt"}
    assert "def triton_combine(" in found["py"].read_text()
    assert found["elf"].read_bytes() == cubin
    assert found["txt"].read_text().startswith(f"triton.compile of {key}, 128 threads\n")


def test_the_machine_code_is_kept_where_there_is_a_disassembler(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    set_variables(monkeypatch, FP8MOE_JIT_DEBUG=1)
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\necho code of $(head -c 4 $2 | tail -c 3)\n")
    tool.chmod(0o700)
    monkeypatch.setattr(dump, "find_disassembler", lambda: tool)
    find_or_compile(KEY)
    assert files(kernels)["sass"].read_text() == "code of ELF\n"
    monkeypatch.setattr(dump, "find_disassembler", lambda: None)
    find_or_compile(KernelKey("tiny", (("VALUE", 4),)))
    assert "keeps no SASS" in plugin_log.text
    assert len(list(kernels.glob("*.sass"))) == 1


def test_the_toolkits_disassembler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "nvdisasm"
    tool.parent.mkdir()
    tool.touch(0o700)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert dump.find_disassembler.__wrapped__() == tool


def test_nothing_is_kept_or_told_unasked(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    find_or_compile(KEY)
    assert files(kernels).keys() == {"cubin"}
    assert capsys.readouterr().err == ""


def test_a_kernel_from_the_cache_is_not_compiled_again(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_or_compile(KEY)
    set_variables(monkeypatch, FP8MOE_JIT_DEBUG=1)
    find_or_compile(KEY)
    assert files(kernels).keys() == {"cubin"}
    assert capsys.readouterr().err == ""
