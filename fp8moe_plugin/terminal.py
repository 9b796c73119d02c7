"""Formatting of text to the width of a terminal. In a pipe, each entry is one line."""

import io
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100  # at most
NARROWEST = 40  # columns for text beside an indentation
GAP = 2  # columns between those of a table
UNLIMITED = 1 << 20  # columns
JUSTIFIED = {"<": "left", ">": "right"}


def fit(line: str, indent: int) -> str:
    """Returns the line, wrapped on a terminal; the lines after the first are indented. Words are not broken."""
    if not sys.stdout.isatty():
        return line
    width = _columns()
    further = " " * max(0, min(indent, width - NARROWEST))
    return textwrap.fill(line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Returns aligned columns. On a terminal, cells of several words are folded; in a pipe, each row is one line.

    Args:
        columns: `<` or `>` for each column, as in format strings.
        rows: a cell for each column.
    """
    from rich.console import Console  # takes a tenth of a second, and only tables need it
    from rich.table import Table
    from rich.text import Text

    rows, grid = list(rows), Table.grid(padding=(0, GAP, 0, 0))
    for column, *cells in zip(columns, *rows, strict=True):
        whole = all(len(cell.split()) < 2 for cell in cells)  # such as numbers: a part of one would be another
        grid.add_column(justify=JUSTIFIED[column], no_wrap=whole, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=UNLIMITED, force_terminal=False, color_system=None)
    width = max(_columns(), console.measure(grid).minimum) if sys.stdout.isatty() else UNLIMITED
    with console.capture() as text:
        console.print(grid, width=width)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def _columns() -> int:
    return min(WIDTH, shutil.get_terminal_size().columns)
