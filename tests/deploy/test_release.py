"""What a release needs: a section of the changelog, a version from the tag, one wheel, and tools with a version."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2027-01-02

### Added

- More.

## [0.1.0] - 2026-12-01

- First.
"""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_tools_of_a_release_have_a_version() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\d\S+)$", (ROOT / "requirements/release.txt").read_text(), re.MULTILINE))
    (command,) = re.findall(r"uvx .*\n.*", (ROOT / ".github/workflows/release.yml").read_text())
    constraints, tool = re.search(r"--constraints (\S+) --from (\S+)", command).groups()
    assert (constraints, tool) == ("requirements/release.txt", "cyclonedx-bom")
    *_, option, constraints, auditwheel = script("build_wheel").AUDITWHEEL
    assert (option, constraints) == ("--constraints", str(ROOT / "requirements/release.txt"))
    assert pins.keys() == {tool, auditwheel}
