"""The documents are current, and references to them and in them resolve."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import kernels, overview, recipes, tables, tuning
from fp8moe_plugin.jit.compiler import translation_unit

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PLAN = ROOT / "fp8moe_plugin" / "plan"
LONGEST_LINE = 120
LINK = re.compile(r"""(?:\]\(|\bsrc(?:set)?=")([^)"\s]+)[)"]""")
CITED = re.compile(r"\bdocs/[\w./-]+\.md(?:#[\w-]+)?")
RESULT = r"[\w.-]+\.(?:json|svg)\b"
RESULTS = re.compile(rf"(?<![\w/-])(?:benchmarks/|docs/experiments/)?results/{RESULT}")


@cache
def tracked(*patterns: str) -> list[Path]:
    """Files in the repository, including new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


@cache
def anchors(document: Path) -> set[str]:
    """Returns the anchors that GitHub derives from the headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def missing(source: Path, target: str, base: Path) -> str | None:
    """Returns an error message if the file, or the section after `#`, does not exist."""
    name, _, anchor = target.partition("#")
    document = (base / name).resolve() if name else source
    if not document.exists():
        return f"{source.relative_to(ROOT)}: {target} does not exist"
    if anchor and anchor.lower() not in anchors(document):
        return f"{source.relative_to(ROOT)}: {target} has no such section"
    return None


CODE = re.compile(r"(?<!`)(`+)(?!`)(.*?)(?<!`)\1(?!`)")


@pytest.mark.parametrize("row", ["| `a `b` c` |", r"| `a\|b` |", "| ``a `b` c`` | `d`: e |"])
def test_code_in_tables_is_shown_as_meant(row: str) -> None:
    assert bool(misread_code(row)) == (row != "| ``a `b` c`` | `d`: e |")


def misread_code(row: str) -> list[str]:
    r"""Code of a table row that ends at a backtick within it, or whose `\|` some renderers show as it is."""
    shown = [code for code in CODE.finditer(row) if r"\|" not in code[2]]
    good = [c[0] for c in shown if not re.match(r"\w", row[c.end() :]) and not re.search(r"\w$", row[: c.start()])]
    return [code[0] for code in CODE.finditer(row) if code[0] not in good]


def test_tables_have_no_misread_code() -> None:
    rows = [line for path in tracked("*.md") for line in path.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 300
    assert [found for row in rows if (found := misread_code(row))] == []


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: path.stem)
def test_generated_parts_are_current(document: Path) -> None:
    text = document.read_text()
    assert tables.DOCUMENTS[document](text) == text, "run python -m benchmarks.tables"


def test_each_table_is_in_the_document() -> None:
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", tables.DOCUMENT.read_text())) == set(tables.TABLES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"gate_up": "0"}, "; kernels changed since: `gate_up`"),
        ({"gone": "0", "combine": "0"}, "; kernels changed since: `combine`, `gone`"),
    ],
)
def test_a_table_names_the_kernels_that_changed_after_its_measurement(changes: dict[str, str], said: str) -> None:
    recorded = kernels.hashes() | changes
    assert re.fullmatch(rf"kernels [0-9a-f]{{12}}{re.escape(said)}", kernels.described(recorded))


def test_comments_do_not_change_the_hash_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(edit: Callable[[str], str]) -> dict[str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "translation_unit", lambda key: edit(translation_unit(key)))
            return kernels.hashes.__wrapped__()

    assert found(lambda text: f"// more\n{text}  /* and\n more */") == kernels.hashes()
    assert found(lambda text: f"{text}int more;").items().isdisjoint(kernels.hashes().items())


def test_a_changed_figure_makes_a_table_stale() -> None:
    text = tables.DOCUMENT.read_text()
    assert tables.rendered(text.replace("| 203,735 |", "| 203,736 |")) == text


@pytest.mark.parametrize("program", [overview, recipes, tables], ids=lambda program: program.__name__)
def test_check_writes_nothing(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("stale")
    monkeypatch.setattr(overview, "DOCUMENT", page)
    monkeypatch.setattr(overview, "rendered", lambda text: "fresh")
    monkeypatch.setattr(recipes, "pages", lambda: {page: "fresh"})
    monkeypatch.setattr(tables, "DOCUMENTS", {page: lambda text: "fresh"})
    monkeypatch.setattr(sys, "argv", [program.__name__, "--check"])
    with pytest.raises(SystemExit, match=f"page.md is stale: run python -m {program.__name__}"):
        program.main()
    assert page.read_text() == "stale"
    page.write_text("fresh")
    program.main()


def test_check_finds_a_stale_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plot.svg").write_text("old")
    monkeypatch.setattr(overview, "PLOTS", {tmp_path / "plot.svg": 1})
    monkeypatch.setattr(sys, "argv", ["overview", "--check"])
    with pytest.raises(SystemExit, match=r"plot.svg is stale"):
        overview.main()
    assert (tmp_path / "plot.svg").read_text() == "old"


def test_links_between_documents_lead_somewhere() -> None:
    links = [(path, link) for path in tracked("*.md") for link in LINK.findall(without_code(path.read_text()))]
    local = [(path, link) for path, link in links if "://" not in link]
    assert local
    assert [fault for path, link in local if (fault := missing(path, link, path.parent))] == []


@pytest.mark.parametrize("trainer", ["verl", "slime", "TRL"])
def test_a_trainer_has_the_version_that_was_read(trainer: str) -> None:
    text = (ROOT / "docs" / "rl.md").read_text()
    assert re.search(rf"^\| {trainer}, ", text, re.MULTILINE)
    assert re.search(rf"\b{trainer} \d+\.\d+\.\d+\b", text)


def test_sections_that_sources_cite_exist() -> None:
    sources = tracked("*.py", "*.cu", "*.cuh", "*.md", "Makefile")
    cited = [(path, target) for path in sources for target in CITED.findall(path.read_text()) if path != Path(__file__)]
    assert cited
    assert [fault for path, target in cited if (fault := missing(path, target, ROOT))] == []


def test_results_lie_where_they_are_cited() -> None:
    """Those that only records cite lie beside the records; a result and its plot have the same stem."""
    records = set(tracked("docs/experiments/*.md"))
    named = {path: {Path(name).stem for name in re.findall(RESULT, path.read_text())} for path in tracked("*.md")}
    by_others = set().union(*(stems for path, stems in named.items() if path not in records))
    by_records = set().union(*(stems for path, stems in named.items() if path in records))
    current = {path.stem for path in tracked("benchmarks/results/*")}
    kept = {path.stem for path in tracked("docs/experiments/results/*")}
    assert current
    assert kept
    assert current - by_others == set()
    assert kept & by_others == set()
    assert kept - by_records == set()


def test_paths_of_results_exist() -> None:
    paths = [(path, target) for path in tracked("*.md") for target in RESULTS.findall(path.read_text())]
    assert paths
    assert [
        f"{path.relative_to(ROOT)}: {target} does not exist"
        for path, target in paths
        if not ((path.parent if target.startswith("results/") else ROOT) / target).exists()
    ] == []


@pytest.mark.parametrize("path", tracked("*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_at_most_120_characters(path: Path) -> None:
    """Table rows, which cannot be broken, are exempt."""
    lines = enumerate(path.read_text().splitlines(), 1)
    assert [f"{path.name}:{n}" for n, line in lines if len(line) > LONGEST_LINE and not line.startswith("|")] == []


def test_files_that_documents_name_exist() -> None:
    documents = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(path.read_text() for path in documents)
    named = set(re.findall(r"(?<![\w/.-])((?:[\w-]+/)+[\w-]+\.(?:py|cuh?|toml))\b", text))
    assert named
    roots = ROOT, ROOT / "fp8moe_plugin"
    assert {name for name in named if not any((root / name).exists() for root in roots)} == {"csrc/NAME.cu"}


def test_programs_that_documents_name_exist() -> None:
    """Records may name programs that are gone."""
    documents = [path for path in tracked("*.md") if path not in set(tracked("docs/experiments/*.md", "CHANGELOG.md"))]
    named = {name for path in documents for name in re.findall(r"\bbenchmarks(?:\.\w+)+", path.read_text())}
    assert len(named) > 10
    paths = {name: ROOT / name.replace(".", "/") for name in named}
    assert {name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").exists())} == set()


def test_cuda_core_brings_numpy() -> None:
    """CONTRIBUTING.md gives this as the reason why numpy is no extra."""
    assert "numpy" in (metadata.requires("cuda-core") or [])


def test_the_example_of_a_plan_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", ARCHITECTURE.read_text(), re.DOTALL)
    exec(compile(example, str(ARCHITECTURE), "exec"), {})
    assert "gate_up_small_batch" in capsys.readouterr().out


def constants(path: Path) -> dict[str, str]:
    """Upper-case names that a module assigns, and their values as source text."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            pairs = (
                zip(target.elts, node.value.elts, strict=True)
                if isinstance(target, ast.Tuple)
                else [(target, node.value)]
            )
            found |= {name.id: ast.unparse(value) for name, value in pairs if name.id.isupper()}
    return found


def documented_constants() -> dict[str, str]:
    sections = re.findall(r"^## ([A-Z_0-9]+)\n\n- Value: `(.*)`$", tuning.DOCUMENT.read_text(), re.MULTILINE)
    return {name: ast.unparse(ast.parse(value)) for name, value in sections}


def test_constants_and_sections_match() -> None:
    documented, found = documented_constants(), {}
    for path in tuning.SOURCES:
        found |= constants(path)
    assert found
    assert found.keys() <= documented.keys()
    for path in PLAN.rglob("*.py"):
        found |= {name: value for name, value in constants(path).items() if name in documented}
    assert found == documented


def test_a_comment_without_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match="The comment of LEAST needs"):
        tuning.section("# The least.\n# Measured: no.\n", "LEAST", "1")
