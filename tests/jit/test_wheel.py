"""The kernels in a wheel serve after bundle and cache, whatever compiler is installed; nothing is then compiled."""

import logging
from importlib import metadata
from pathlib import Path

import pytest

from fp8moe_plugin.errors import KernelNotPrecompiled
from fp8moe_plugin.jit import bundle, compiler, lookup, wheel
from fp8moe_plugin.jit.lookup import Origin, find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import SOURCE, forget, set_variables
from warmup import kernels as warmup_kernels
from warmup.__main__ import main

KEY, OTHER = (KernelKey("tiny", (("VALUE", value),)) for value in (3, 4))
MADE_BY, MADE_BY_12 = "nvrtc 13.0.1", "nvrtc 12.8.1"  # this machine has another one
NOT_ALL = "the wheel does not provide all kernels: "


@pytest.fixture
def installed(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """The file of kernels for CUDA 13 in a wheel, with KEY alone, beside one for CUDA 12."""
    caplog.set_level(logging.INFO, logger="fp8moe")
    folder = tmp_path / "site-packages"
    folder.mkdir()
    cubins = {KEY: compiler.compile_kernel(KEY).cubin}
    bundle.write_bundle(folder / "kernels-cuda12.tar", cubins, MADE_BY_12)
    bundle.write_bundle(folder / "kernels-cuda13.tar", cubins, MADE_BY)
    monkeypatch.setattr(wheel, "FOLDER", folder)
    return folder / "kernels-cuda13.tar"


def test_another_compiler_does_not_matter_under_forbid(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, FP8MOE_JIT="forbid")
    found = find_or_compile(KEY)
    assert found.origin == Origin.WHEEL
    assert lookup.compiler_of(found.origin, KEY.target) == MADE_BY
    assert lookup.place(found.origin) == f" {installed}"


@pytest.mark.usefixtures("installed", "hidden")
def test_no_compiler_is_needed_under_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, FP8MOE_JIT="forbid")
    assert find_or_compile(KEY).origin == Origin.WHEEL
    with pytest.raises(
        KernelNotPrecompiled, match=r"NVRTC cannot be loaded .*kernels-cuda13.tar does not contain it\), and"
    ):
        find_or_compile(OTHER)


def test_cache_and_bundle_come_first(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_or_compile(KEY).origin == Origin.WHEEL
    lookup.compile_into_cache(KEY)
    assert find_or_compile(KEY).origin == Origin.CACHE
    bundle.write_bundle(tmp_path / "b.tar", {KEY: compiler.compile_kernel(KEY).cubin})
    set_variables(monkeypatch, FP8MOE_BUNDLE=tmp_path / "b.tar")
    assert find_or_compile(KEY).origin == Origin.BUNDLE


def test_kernels_of_other_sources_cost_one_line_and_are_compiled(
    installed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: f"{SOURCE} // changed")
    assert [find_or_compile(KEY).origin for _ in range(2)] == [Origin.COMPILER, Origin.CACHE]
    assert caplog.text.count(f"{NOT_ALL}{installed} was made from other kernel sources") == 1


def test_a_damaged_file_says_to_install_the_wheel_again(installed: Path, caplog: pytest.LogCaptureFixture) -> None:
    installed.write_bytes(b"no archive")
    forget()
    assert find_or_compile(KEY).origin == Origin.COMPILER
    assert f"{NOT_ALL}{installed} is not a bundle, or it is damaged: install the wheel again" in caplog.text


def test_a_damaged_cache_entry_costs_one_warning(
    installed: Path, kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lookup.compile_into_cache(KEY)
    (entry,) = kernels.glob("*.cubin")
    entry.write_bytes(b"")
    assert [find_or_compile(KEY).origin for _ in range(2)] == [Origin.WHEEL, Origin.WHEEL]
    assert caplog.text.count("is damaged: its checksum differs; the wheel's kernel is used") == 1


@pytest.mark.parametrize(
    ("bindings", "cuda", "made_by"),
    [
        ("12.8.0", 12, MADE_BY_12),
        ("12.9.10", 12, MADE_BY_12),
        ("13.0.1", 13, MADE_BY),
        ("13.5.0", 13, MADE_BY),
        ("14.0.0", 13, MADE_BY),
    ],
)
def test_the_bindings_choose_the_newest_kernels_not_newer(
    installed: Path, bindings: str, cuda: int, made_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, FP8MOE_JIT="forbid")
    monkeypatch.setattr(metadata, "version", {"cuda-bindings": bindings}.__getitem__)
    found = find_or_compile(KEY)
    assert found.origin == Origin.WHEEL
    assert lookup.compiler_of(found.origin, KEY.target) == made_by
    assert lookup.place(found.origin) == f" {installed.with_name(f'kernels-cuda{cuda}.tar')}"


def test_bindings_do_not_get_kernels_of_newer_cuda(
    installed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed.with_name("kernels-cuda12.tar").unlink()
    monkeypatch.setattr(metadata, "version", {"cuda-bindings": "12.9.4"}.__getitem__)
    assert find_or_compile(KEY).origin == Origin.COMPILER
    missing = "kernels-cuda12.tar, for the installed cuda-bindings, is missing: install the wheel again"
    assert missing in caplog.messages[0]


def test_other_gpus_have_none_in_it(installed: Path) -> None:
    assert wheel.installed_kernels("sm_89") is None


@pytest.mark.usefixtures("installed", "hidden")
def test_commands_take_them_without_a_compiler(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warmup_kernels, "plan_of", lambda *args: {KEY: "why"})
    for command in ("verify", "list"):
        assert main([command]) == 0
        assert f"1 kernels, 1 present and intact, in {installed}\n" in capsys.readouterr().out
    assert main(["bundle", "--bundle", str(tmp_path / "b.tar")]) == 0
    assert "1 kernels: 1 present, 0 compiled, 0 failed" in capsys.readouterr().out
    assert (tmp_path / "b.tar").read_bytes() == installed.read_bytes()
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"ok     wheel: {installed}, 1 kernels compiled by {MADE_BY}\n" in printed
    assert "compiler: not needed, because all kernels are available" in printed


def test_a_set_of_which_the_wheel_lacks_one_is_compiled(installed: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert wheel.complete_kernels([KEY])
    assert wheel.complete_kernels([KEY, OTHER]) is None
    assert f"{NOT_ALL}{installed} does not contain it" in caplog.text
