"""What a release needs: a section of the changelog, a version from the tag, and tools with a version."""

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


def test_tools_of_a_release_have_a_version() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\d\S+)$", (ROOT / "requirements/release.txt").read_text(), re.MULTILINE))
    (command,) = re.findall(r"uvx .*\n.*", (ROOT / ".github/workflows/release.yml").read_text())
    constraints, tool = re.search(r"--constraints (\S+) --from (\S+)", command).groups()
    assert (constraints, tool) == ("requirements/release.txt", "cyclonedx-bom")
    assert pins.keys() == {tool}
