"""Formatting of text to the width of a terminal. In a pipe, each entry is one line."""

import shutil
import sys
import textwrap

WIDTH = 100  # at most
NARROWEST = 40  # columns for text beside an indentation


def fit(line: str, indent: int) -> str:
    """Returns the line, wrapped on a terminal; the lines after the first are indented. Words are not broken."""
    if not sys.stdout.isatty():
        return line
    width = min(WIDTH, shutil.get_terminal_size().columns)
    further = " " * max(0, min(indent, width - NARROWEST))
    return textwrap.fill(line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)
