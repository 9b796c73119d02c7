"""The documents are current, and what refers to them refers to something that exists."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from benchmarks.tables import DOCUMENT, TABLES, rendered

ROOT = Path(__file__).parents[2]
LONGEST_LINE = 120
LINK = re.compile(r"\]\(([^)\s]+)\)")
CITED = re.compile(r"\bdocs/[\w./-]+\.md(?:#[\w-]+)?")
RESULTS = re.compile(r"\bbenchmarks/results/[\w.-]+\.(?:json|svg)\b")


@cache
def tracked(*patterns: str) -> list[Path]:
    """Files in the repository; new ones that git does not ignore count, too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


@cache
def anchors(document: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def missing(source: Path, target: str, base: Path) -> str | None:
    """A complaint if the file, or the section after `#`, does not exist."""
    name, _, anchor = target.partition("#")
    document = (base / name).resolve() if name else source
    if not document.exists():
        return f"{source.relative_to(ROOT)}: {target} does not exist"
    if anchor and anchor.lower() not in anchors(document):
        return f"{source.relative_to(ROOT)}: {target} has no such section"
    return None


def test_tables_of_performance_are_those_of_the_results() -> None:
    text = DOCUMENT.read_text()
    assert rendered(text) == text, "run python -m benchmarks.tables"
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", text)) == set(TABLES)


def test_a_changed_figure_makes_a_table_stale() -> None:
    text = DOCUMENT.read_text()
    assert rendered(text.replace("| 203,735 |", "| 203,736 |")) == text


def test_links_between_documents_lead_somewhere() -> None:
    links = [(path, link) for path in tracked("*.md") for link in LINK.findall(without_code(path.read_text()))]
    local = [(path, link) for path, link in links if "://" not in link]
    assert local
    assert [fault for path, link in local if (fault := missing(path, link, path.parent))] == []


def test_sections_that_sources_cite_exist() -> None:
    sources = tracked("*.py", "*.cu", "*.cuh", "*.md", "Makefile")
    cited = [(path, target) for path in sources for target in CITED.findall(path.read_text()) if path != Path(__file__)]
    assert cited
    assert [fault for path, target in cited if (fault := missing(path, target, ROOT))] == []


def test_results_are_cited_by_a_document() -> None:
    documents = "".join(path.read_text() for path in tracked("*.md"))
    names = [path.name for path in tracked("benchmarks/results/*")]
    cited = set(re.findall(r"[\w.-]+\.(?:json|svg)", documents))
    stems = {Path(name).stem for name in cited}
    assert [name for name in names if name not in cited and Path(name).stem not in stems] == []
    assert [path for path in set(RESULTS.findall(documents)) if "<" not in path and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("path", tracked("docs/*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_at_most_120_characters(path: Path) -> None:
    """Table rows, which cannot be broken, are exempt."""
    lines = enumerate(path.read_text().splitlines(), 1)
    assert [f"{path.name}:{n}" for n, line in lines if len(line) > LONGEST_LINE and not line.startswith("|")] == []
