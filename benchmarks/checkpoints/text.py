"""Text for training and evaluation: read from files, split into two parts, cut into windows of tokens."""

import lzma
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer

from fp8moe_plugin.errors import UnsupportedError

SUFFIXES = {".md", ".py", ".rst", ".txt"}
PIECE = 1 << 14  # characters
HELD_OUT = 1 / 20


def default_text() -> Path:
    """Returns the sources of Python's standard library: real text that every machine has."""
    return Path(sysconfig.get_path("stdlib"))


def read_text(paths: list[Path]) -> str:
    """Returns the text of these files (also `.xz`), and of files in these folders with a suffix in `SUFFIXES`.

    Raises:
        UnsupportedError: there is no text, or a `.xz` is damaged.
        OSError: a file cannot be read.
    """
    files = [file for path in paths for file in _files(path)]
    text = "\n\n".join(_read(file) for file in files)
    if not text.strip():
        names = ", ".join(map(str, paths))
        suffixes = ", ".join(sorted(SUFFIXES))
        raise UnsupportedError(f"{names}: no text in {len(files)} files. Give files, or folders with {suffixes}.")
    return text


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        installed = {"site-packages", "dist-packages"} & set(file.relative_to(path).parts)
        if not installed and file.suffix in SUFFIXES and file.is_file():
            yield file


def _read(file: Path) -> str:
    data = file.read_bytes()
    try:
        plain = lzma.decompress(data) if file.suffix == ".xz" else data
    except lzma.LZMAError as error:
        raise UnsupportedError(f"{file} is damaged: {error}. Get it again.") from None
    return plain.decode(errors="replace")


def split(text: str, seed: int) -> tuple[list[str], list[str]]:
    """Pieces to train on, and held-out pieces (one in 20), both in the order of the text."""
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    held_out = set(random.Random(seed).sample(range(len(pieces)), max(1, round(len(pieces) * HELD_OUT))))
    train = [piece for i, piece in enumerate(pieces) if i not in held_out]
    return train, [pieces[i] for i in sorted(held_out)]


def windows(tokenizer: Path, text: str, length: int) -> torch.Tensor:
    """Returns the tokens of the text, int64 [windows, length], without the incomplete window at the end.

    Args:
        tokenizer: a tokenizer.json.
    Raises:
        UnsupportedError: the text is shorter than one window.
    """
    ids = Tokenizer.from_file(str(tokenizer)).encode(text).ids
    whole = len(ids) // length
    if not whole:
        raise UnsupportedError(f"The text has {len(ids)} tokens, a window has {length}. Give more text.")
    return torch.tensor(ids[: whole * length]).view(whole, length)
