"""The issue template is a valid form of GitHub's, and asks for what `doctor` says."""

from pathlib import Path
from typing import Any

import pytest

from warmup.options import parse

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE"
TYPES = {"textarea", "input", "checkboxes", "dropdown", "markdown"}


def form() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "bug.yml").read_text())
    return found


def test_the_form_has_what_github_requires() -> None:
    found = form()
    assert {"name", "description", "body"} <= found.keys()
    ids = [field["id"] for field in found["body"]]
    assert len(set(ids)) == len(ids)
    for field in found["body"]:
        assert field["type"] in TYPES
        assert field["attributes"]["label"]
        assert ("options" in field["attributes"]) == (field["type"] == "checkboxes")


def test_it_asks_for_the_facts_of_doctor() -> None:
    (doctor,) = (field for field in form()["body"] if field["id"] == "doctor")
    assert doctor["validations"]["required"]
    _, command, _ = doctor["attributes"]["description"].split("`")
    options = parse(command.replace(" N ", " 8 ").split()[1:])
    assert (options.command, str(options.json)) == ("doctor", "-")
