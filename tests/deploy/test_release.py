"""What a release needs: a section of the changelog, a version from the tag, one wheel with kernels, pinned tools."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fp8moe_plugin.jit.wheel import CUDAS

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2027-01-02

### Added

- More.

## [0.1.0] - 2026-12-01

- First.
"""


COMPILER = "def nvrtc_version(): return 'nvrtc 12.8.93'"
# A warm-up that compiles two kernels into the cache, and reports a fault of one.
WARMUP = """
import json, os, pathlib, sys
cache = pathlib.Path(os.environ["FP8MOE_CACHE_DIR"])
cache.mkdir(parents=True)
kernels = [{"kernel": name, "entry": f"{name}.cubin", "detail": detail} for name, detail in KERNELS.items()]
for kernel in kernels:
    if kernel["detail"] != FAILED:
        (cache / kernel["entry"]).touch()
print(json.dumps({"kernels": kernels}))
sys.exit(FAILED in KERNELS.values())
"""
FAILED = "it does not compile"


def script(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / ".ci")
        return importlib.import_module(name)


@pytest.fixture
def notes() -> ModuleType:
    return script("release_notes")


def test_the_notes_are_the_section_of_the_version(notes: ModuleType) -> None:
    assert notes.section(CHANGELOG, "0.2.0") == "### Added\n\n- More."
    assert notes.section(CHANGELOG, "0.1.0") == "- First."
    for version in ("Unreleased", "0.1", "0x2.0"):
        with pytest.raises(SystemExit, match="has no section"):
            notes.section(CHANGELOG, version)


def test_a_version_without_a_section_is_not_released() -> None:
    command = [sys.executable, ROOT / ".ci" / "release_notes.py", "99.0.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Rename [Unreleased] before you tag." in done.stderr


def test_a_tagged_wheel_replaces_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_wheel = script("build_wheel")
    new = "fp8moe_plugin-0.2.0-cp311-abi3-manylinux_2_17_x86_64.whl"
    others = {"fp8moe_plugin-0.1.0.tar.gz", "other-0.1.0-py3-none-any.whl"}
    for name in ("fp8moe_plugin-0.1.0-cp311-abi3-linux_x86_64.whl", *others):
        (tmp_path / name).touch()

    def auditwheel(command: list[str]) -> None:
        Path(command[command.index("--wheel-dir") + 1], new).touch()

    monkeypatch.setattr(build_wheel, "run", auditwheel)
    assert build_wheel.tag_into(tmp_path, Path("built.whl")) == tmp_path / new
    assert {path.name for path in tmp_path.iterdir()} == {new, *others}


def test_a_wheel_has_kernels_for_each_cuda() -> None:
    versions = script("build_wheel").pinned()
    assert sorted(int(version.split(".")[0]) for version in versions) == list(CUDAS)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Compiles with NVRTC 12.8.93 what a warm-up in its place has."""
    nvrtc = script("nvrtc")
    monkeypatch.setattr(nvrtc, "ROOT", tmp_path)
    monkeypatch.setattr(nvrtc, "environment_of", lambda version: Path(sys.executable))

    def compile_all(version: str, **details: str | None) -> bool:
        warm_up = f"KERNELS, FAILED = {details}, {FAILED!r}\n{WARMUP}"
        files = {"fp8moe_plugin/jit/compiler": COMPILER, "warmup/__main__": warm_up}
        for name, text in files.items():
            path = tmp_path / "source" / f"{name}.py"
            path.parent.mkdir(parents=True)
            path.write_text(text)
        return bool(nvrtc.bundle_kernels(version, tmp_path / "kernels.tar", tmp_path / "source"))

    return compile_all


def test_kernels_without_a_fault_are_fit(compiled: Callable[..., bool]) -> None:
    assert compiled("12.8.93", good=None)


def test_kernels_with_a_fault_are_not_kept(
    compiled: Callable[..., bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not compiled("12.8.93", good=None, spills="8 bytes stack frame")
    assert "spills: 8 bytes stack frame\n" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / ".versions/kernels/12.8.93").iterdir()] == ["good.cubin"]


def test_faulty_kernels_go_where_another_fails(
    compiled: Callable[..., bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later run would find them in the cache, without a report of their fault."""
    assert not compiled("12.8.93", good=None, spills="8 bytes stack frame", fails=FAILED)
    assert f"spills: 8 bytes stack frame\nfails: {FAILED}\n" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / ".versions/kernels/12.8.93").iterdir()] == ["good.cubin"]


def test_kernels_of_another_nvrtc_are_refused(
    compiled: Callable[..., bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not compiled("12.9.86", good=None)
    assert "nvrtc 12.8.93 is what the kernels would be compiled with\n" in capsys.readouterr().err
    assert not (tmp_path / ".versions").exists()


def test_tools_of_a_release_have_a_version() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\d\S+)$", (ROOT / "requirements/release.txt").read_text(), re.MULTILINE))
    (command,) = re.findall(r"uvx .*\n.*", (ROOT / ".github/workflows/release.yml").read_text())
    constraints, tool = re.search(r"--constraints (\S+) --from (\S+)", command).groups()
    assert (constraints, tool) == ("requirements/release.txt", "cyclonedx-bom")
    *_, option, constraints, auditwheel = script("build_wheel").AUDITWHEEL
    assert (option, constraints) == ("--constraints", str(ROOT / "requirements/release.txt"))
    assert pins.keys() == {tool, auditwheel}
