"""The sections of docs/tuning.md, from the comments in both tuning.py of fp8moe_plugin/plan; `benchmarks.tables` writes
them.

A comment is read as paragraphs: what the constant decides, `Measured: ...` and `Measure again: ...`. `[042]` becomes a
link to that record.
"""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "tuning.md"
PLAN = ROOT / "fp8moe_plugin" / "plan"
SOURCES = PLAN / "tuning.py", PLAN / "triton" / "tuning.py"
CONSTANT = re.compile(r"((?:^#.*\n)+)^([A-Z_0-9]+) = (.+)\n", re.MULTILINE)
PARTS = re.compile(r"(?P<decides>.+?) (?P<measured>Measured: .+?) (?P<again>Measure again: .+)")
GENERATED = re.compile(r"(<!-- generated .*?-->\n).*(<!-- end of generated -->)", re.DOTALL)
WIDTH = 120


def link(record: re.Match[str]) -> str:
    (path,) = DOCUMENT.parent.glob(f"experiments/{record[1]}-*.md")
    return f"[{record[1]}]({path.relative_to(DOCUMENT.parent)})"


def section(comment: str, name: str, value: str) -> str:
    """Raises `ValueError` if the comment lacks a part."""
    text = " ".join(line.removeprefix("#").strip() for line in comment.splitlines())
    parts = PARTS.fullmatch(text)
    if parts is None:
        raise ValueError(f"The comment of {name} needs `Measured: ...`, then `Measure again: ...`: {text}")
    items = [f"Value: `{value}`", *(re.sub(r"\[(\d{3})\]", link, part) for part in parts.groups())]
    lines = [
        textwrap.fill(
            item, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for item in items
    ]
    return "\n".join([f"## {name}", "", *lines])


def rendered(document: str) -> str:
    """Returns the document with the sections of all constants."""
    constants = (found for source in SOURCES for found in CONSTANT.findall(source.read_text()))
    sections = "\n\n".join(section(*found) for found in constants)
    return GENERATED.sub(lambda marked: f"{marked[1]}\n{sections}\n\n{marked[2]}", document)
