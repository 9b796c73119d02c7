"""Text to train on and to be asked about: read from files, split into two parts, cut into windows of tokens."""

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
    """The sources of Python's standard library: real text that every machine has."""
    return Path(sysconfig.get_path("stdlib"))


def read_text(paths: list[Path]) -> str:
    """All text of these files, `.xz` too, and of those in these folders that have a suffix of `SUFFIXES`.

    Raises:
        UnsupportedError: there is none, or a `.xz` is damaged.
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
    """Pieces to train on, and the twentieth of all pieces that is held out, both in the text's order."""
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    held_out = set(random.Random(seed).sample(range(len(pieces)), max(1, round(len(pieces) * HELD_OUT))))
    train = [piece for i, piece in enumerate(pieces) if i not in held_out]
    return train, [pieces[i] for i in sorted(held_out)]


def windows(tokenizer: Path, text: str, length: int) -> torch.Tensor:
    """The text's tokens [windows, length], int64, without what is left at its end.

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
