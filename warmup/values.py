"""Parses the values of options."""

import argparse
from pathlib import Path
from urllib.parse import urlsplit

from warmup.target import MAX_COUNT, MOST_GPUS

PLOT_SUFFIXES = (".png", ".svg")


def count(text: str) -> int:
    """Parse a count, such as a number of tokens or GPUs.

    Raises:
        ArgumentTypeError: it is not a number from 1 to `MAX_COUNT`.
    """
    if not text.isdecimal() or not 1 <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_COUNT}")
    return int(text)


def few(text: str) -> int:
    number = count(text)
    if number > MOST_GPUS:
        raise argparse.ArgumentTypeError(f"{number} is more than {MOST_GPUS}")
    return number


def share(text: str) -> float:
    return positive(text, 1, "a number above 0 and up to 1")


def positive(text: str, most: float = float(MAX_COUNT), what: str = "a number above 0") -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number


def url(text: str) -> str:
    try:
        address = urlsplit(text)
        valid = address.scheme in ("http", "https") and address.hostname and address.port != 0 and text.isprintable()
    except ValueError:  # a port or an IPv6 address that cannot be one
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://canary:8000")
    return text


def plot(text: str) -> Path:
    if (path := Path(text)).suffix not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a .png nor an .svg file")
    return path
