"""Tables on terminals of several widths and in pipes."""

import os
import sys
from collections.abc import Callable

import pytest

from fp8moe_plugin import terminal

ROWS = [
    ("name", "tokens", "note"),
    ("mlp.gate_up_proj", "8192", "[red]12 GB[/red] of it :warning: padding to whole blocks"),
    ("experts", "1", ""),
]


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def on_a_terminal(columns: int) -> None:
        monkeypatch.setattr(terminal.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
        monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)

    return on_a_terminal


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_in_a_pipe_a_row_is_a_line_of_plain_text(monkeypatch: pytest.MonkeyPatch, variable: str, term: str) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "20")
    long = "word " * 1000 + "end"
    assert terminal.table("<>", [("a", "1"), (long, "10")]).splitlines()[1] == f"{long}  10"
    assert terminal.table("<><", ROWS).splitlines() == [
        "name              tokens  note",
        "mlp.gate_up_proj    8192  [red]12 GB[/red] of it :warning: padding to whole blocks",
        "experts                1",
    ]


def test_a_terminal_gets_folded_cells(on_a_terminal: Callable[[int], None]) -> None:
    on_a_terminal(50)
    lines = terminal.table("<><", ROWS).splitlines()
    assert max(map(len, lines)) <= 50
    assert lines[1].startswith("mlp.gate_up_proj    8192  [red]12 GB[/red]")
    assert " ".join(line[26:] for line in lines[1:-1]) == ROWS[1][2]


def test_numbers_and_names_stay_whole_on_any_terminal(on_a_terminal: Callable[[int], None]) -> None:
    on_a_terminal(8)
    words = terminal.table("<><", ROWS).split()
    assert {"mlp.gate_up_proj", "8192", "experts"} <= set(words)
    assert sorted(words) == sorted(" ".join(map(" ".join, ROWS)).split())


def test_a_table_may_have_no_rows() -> None:
    assert terminal.table("<>", []) == ""
