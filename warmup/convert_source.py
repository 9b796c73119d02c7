"""Reads the unquantized checkpoint for `convert`. Tensors are read, not mapped, because a file may be truncated."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp8moe_plugin.checkpoint.headers import INDEX_NAME, add_header, read_header, weight_files, weight_map
from fp8moe_plugin.checkpoint.untrusted import ADVICE, Limits, opened
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.dtypes import DTYPES
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import SCALE, WEIGHT
from fp8moe_plugin.layers.unquantized import is_quantized
from fp8moe_plugin.quoting import shown


@dataclass(frozen=True)
class Stored:
    """A tensor of the unquantized checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # offset in its file
    bytes: int

    @property
    def layer(self) -> str:
        return self.name.removesuffix(f".{WEIGHT}")

    @property
    def quantized(self) -> bool:
        return self.is_weight and is_quantized(self.layer)

    @property
    def converted_names(self) -> tuple[str, ...]:
        """The names of the converted tensors."""
        return (self.name, self.scales) if self.quantized else (self.name,)

    @property
    def is_weight(self) -> bool:
        return self.name.endswith(f".{WEIGHT}")

    @property
    def scales(self) -> str:
        """The name of its scales after conversion."""
        return f"{self.layer}.{SCALE}"

    @property
    def converted_bytes(self) -> int:
        if not self.quantized:
            return self.bytes
        return FP8_BLOCK.nbytes(*self.shape)


class FileState(NamedTuple):
    """Identifies the content of a file. `touch` and `rsync -t` can set `modified_ns`, but not `changed_ns`."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int


@dataclass(frozen=True)
class SourceFile:
    """A safetensors file of the unquantized checkpoint, and its state when its header was read."""

    path: Path
    state: FileState
    tensors: tuple[Stored, ...]

    @property
    def name(self) -> str:
        return self.path.name


def read_source(folder: Path) -> list[SourceFile]:
    """Read the headers of a checkpoint's weight files, in the order of their names.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedError: a tensor has a dtype that torch cannot hold.
        OSError: a file cannot be opened.
    """
    spent, files = Limits(0, 0, 0), []
    for name in weight_files(folder):
        path = folder / name
        with opened(path) as file:
            state = _state(file)
            header = read_header(file, path)
        spent = add_header(spent, header, folder)
        tensors = tuple(_stored(tensor, entry, header.begin) for tensor, entry in sorted(header.tensors.items()))
        files.append(SourceFile(path, state, tensors))
    return files


def _state(file: BufferedReader) -> FileState:
    found = os.fstat(file.fileno())
    return FileState(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def _stored(name: str, entry: dict[str, Any], offset: int) -> Stored:
    bits, dtype = DTYPES[entry["dtype"]]
    if bits < 8:
        raise UnsupportedError(
            f"Tensor {shown(name)} has dtype {entry['dtype']}, which convert cannot copy. Use a checkpoint that "
            "stores its weights in bfloat16, float16 or float32."
        )
    begin, end = entry["data_offsets"]
    return Stored(name, getattr(torch, dtype), tuple(entry["shape"]), offset + begin, end - begin)


def check_names(folder: Path, files: list[SourceFile]) -> None:
    """Check that each tensor of the result comes from only one file, as named in the index.

    A tensor in a file may be missing from the index. It is converted, because vLLM loads all tensors of a file.

    Raises:
        CheckpointError: the files are inconsistent with each other or with the index.
    """
    where: dict[str, str] = {}
    for file in files:
        for name in (name for tensor in file.tensors for name in tensor.converted_names):
            if name in where:
                raise CheckpointError(
                    f"The result would contain tensor {shown(name)} twice, from {shown(where[name])} and from "
                    f"{shown(file.name)}. {ADVICE}"
                )
            where[name] = file.name
    for name, wanted in (weight_map(folder) or {}).items():
        if where.get(name) != wanted:
            found = f"it is in {shown(where[name])}" if name in where else "no file contains it"
            raise CheckpointError(
                f"{shown(str(folder / INDEX_NAME))} says that {shown(wanted)} contains tensor {shown(name)}, but "
                f"{found}. {ADVICE}"
            )


def read_tensors(source: SourceFile) -> Iterator[tuple[Stored, torch.Tensor]]:
    """Read the tensors of a file one at a time.

    Raises:
        CheckpointError: the file cannot be read, or has changed since its header was read.
    """
    with _unchanged(source) as file:
        for tensor in source.tensors:
            yield tensor, _read(source, file, tensor)


def check_unchanged(files: list[SourceFile]) -> None:
    """Check all files once more after the last one was read.

    Raises:
        CheckpointError: a file cannot be read, or has changed since its header was read.
    """
    for source in files:
        with _unchanged(source):
            pass


@contextmanager
def _unchanged(source: SourceFile) -> Iterator[BufferedReader]:
    """Open a file, and check before and after the block that it has not changed."""
    try:
        with opened(source.path) as file:
            _check_state(source, file)
            yield file
            _check_state(source, file)
    except OSError as error:
        raise CheckpointError(
            f"{shown(str(source.path))} cannot be read: {error.strerror}. Check the file and the disk."
        ) from error


def _read(source: SourceFile, file: BufferedReader, tensor: Stored) -> torch.Tensor:
    data = torch.empty(tensor.bytes, dtype=torch.uint8)
    file.seek(tensor.begin)
    if file.readinto(data.numpy().data) < tensor.bytes:
        raise _changed(source)
    return data.view(tensor.dtype).reshape(tensor.shape)


def _check_state(source: SourceFile, file: BufferedReader) -> None:
    if _state(file) != source.state:
        raise _changed(source)


def _changed(source: SourceFile) -> CheckpointError:
    return CheckpointError(
        f"{shown(str(source.path))} has changed during the conversion. Make sure that nothing writes to the "
        "checkpoint, then run the command again."
    )
