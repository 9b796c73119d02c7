"""Checks of a checkpoint's safetensors headers against its config.json. No weights are read."""

import math
import operator
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fp8moe_plugin.checkpoint import gpt_oss
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.checkpoint.untrusted import ADVICE, MAX_SIZE, Limits, is_hub_snapshot, opened, read_json
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.dtypes import DTYPES
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.spec import SCALE_NAMES, WEIGHT, QuantSpec
from fp8moe_plugin.quoting import shown

INDEX_NAME = "model.safetensors.index.json"
# Kimi-K2 has the most tensors, 141 thousand: 14 MB in the index, 18 MB in the headers of 61 files, with an object and
# two lists for each tensor. All limits bound the memory; HEADERS, for all files together, also bounds the time.
INDEX = Limits(size=32 << 20, containers=64, values=200_000)
HEADER = Limits(size=16 << 20, containers=180_000, values=400_000)
HEADERS = Limits(size=32 << 20, containers=450_000, values=900_000)
MAX_SHARDS = 1000  # each takes some tens of microseconds to open
MAX_METADATA = 100  # entries of __metadata__, commonly one
MAX_DIMENSIONS = 8  # more than any tensor has; without a limit, the product of the sizes could take megabytes
MAX_NAMED = 3  # missing files named in a message

EXPERT = re.compile(
    r"layers\.(\d{1,6})\.\w{1,64}\.experts\.(\d{1,6})\."
    rf"((?:gate_proj|up_proj|down_proj|w[123])\.(?:{'|'.join((WEIGHT, *SCALE_NAMES, *MXFP4.scale_names))}))\Z",
    re.ASCII,
)


class Header(NamedTuple):
    """The header of a safetensors file."""

    tensors: dict[str, Any]  # dtype, shape and data_offsets by name, known to be consistent
    begin: int  # offset of the data in the file; data_offsets are relative to it
    spent: Limits


def check_shards(
    folder: Path, spec: QuantSpec, scales: Collection[str], experts: Experts, layer: int, served: Collection[int]
) -> None:
    """Check the safetensors files in `folder` against config.json.

    Either all or none of the files in the index must exist, except in a snapshot of huggingface_hub, which may have any
    of them. Only the headers of files with experts of `layer` are read, which takes milliseconds; reading all headers
    of DeepSeek-V3 would take a second. Without an index, all headers are read.

    Args:
        spec, experts: from config.json.
        scales: suffixes of scales' names in the files, one of which they have.
        layer: the layer to check.
        served: the layers whose experts are not kept unquantized.

    Raises:
        CheckpointError: only some of the files exist, or a file is damaged or contains experts of another shape or
            dtype.
    """
    names, holding = _file_names(folder, layer)
    spent, quantized = Limits(0, 0, 0), () if spec.online else served
    tables = [_wanted(experts, spec, scales, is_quantized) for is_quantized in (False, True)]
    of_all = gpt_oss.wanted_tensors(experts) if spec.gpt_oss else {}
    missing = _missing(folder, names)
    if missing and len(missing) < len(names) and not is_hub_snapshot(folder):
        raise _incomplete(folder, names, missing)
    for name in (name for name in holding if name not in missing):
        path = folder / name
        with opened(path) as file:
            header = read_header(file, path)
        spent = add_header(spent, header, folder)
        for tensor, entry in header.tensors.items():
            if of_all and (match := gpt_oss.TENSOR.search(tensor)):
                if entry["shape"] not in of_all[match[1]].get(entry["dtype"], []):
                    raise _contradiction(path, tensor, entry, of_all[match[1]], experts)
            elif match := EXPERT.search(tensor):
                where, expert, weight = match.groups()
                wanted = tables[int(where) in quantized]
                if weight not in wanted:
                    raise _other_scales(path, tensor, scales)
                if entry["shape"] not in wanted[weight].get(entry["dtype"], []) or int(expert) >= experts.experts:
                    raise _contradiction(path, tensor, entry, wanted[weight], experts)


def weight_files(folder: Path) -> list[str]:
    """Returns the names of a checkpoint's safetensors files, sorted.

    Raises:
        CheckpointError: a file of the index is missing, or there are no weights at all.
    """
    names, _ = _file_names(folder, 0)
    missing = _missing(folder, names)
    if len(missing) == len(names):
        raise CheckpointError(f"{shown(str(folder))} has no weights. Download the whole checkpoint.")
    if missing:
        raise _incomplete(folder, names, missing)
    return names


def _file_names(folder: Path, layer: int) -> tuple[list[str], list[str]]:
    """Returns the names of all weight files, and of the files with experts of the layer; without an index, of all."""
    files, mark = weight_map(folder), f"layers.{layer}."
    if files is not None:
        names = set(files.values())
        holding = {name for tensor, name in files.items() if mark in tensor and ".experts." in tensor}
    else:
        names = holding = {entry.name for entry in os.scandir(folder) if entry.name.endswith(".safetensors")}
    for name in names:
        if not (name.isprintable() and name.endswith(".safetensors")) or re.search(r"[/\\]|\.\.", name):
            raise CheckpointError(
                f"{shown(str(folder))}: {shown(name)} is not a plain .safetensors file name, and might lead out of the "
                f"folder. {ADVICE}"
            )
    if len(names) > MAX_SHARDS:
        raise CheckpointError(f"{shown(str(folder))} has {len(names)} weight files, more than {MAX_SHARDS}. {ADVICE}")
    return sorted(names), sorted(holding)


def weight_map(folder: Path) -> dict[str, str] | None:
    """Returns the file of each tensor according to the checkpoint's index; None if there is no index.

    Raises:
        CheckpointError: the index is damaged.
    """
    path = folder / INDEX_NAME
    if not os.path.lexists(path):
        return None
    what = shown(str(path))
    with opened(path) as file:
        index, _ = read_json(file, INDEX.size + 1, INDEX, what, plain=True)
    files = index.get("weight_map")
    if not isinstance(files, dict) or set(map(type, files.values())) != {str}:
        raise CheckpointError(f"{what} has no weight_map that names the file of each tensor. {ADVICE}")
    return files


def _missing(folder: Path, names: list[str]) -> list[str]:
    return [name for name in names if not os.path.lexists(folder / name)]


def _incomplete(folder: Path, names: list[str], missing: list[str]) -> CheckpointError:
    first = ", ".join(shown(name) for name in missing[:MAX_NAMED])
    return CheckpointError(
        f"{shown(str(folder))} lacks {len(missing)} of its {len(names)} weight files: {first}"
        f"{', ...' if len(missing) > MAX_NAMED else ''}. Complete the download."
    )


def read_header(file: BinaryIO, path: Path) -> Header:
    """Read the header of an open safetensors file, and check that it matches the file's size.

    Args:
        file: positioned at its beginning.
        path: the file's path, for messages.

    Raises:
        CheckpointError: the file is damaged.
    """
    what, size = shown(str(path)), os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    begin = 8 + length
    if length > HEADER.size:
        raise CheckpointError(f"{what} has a header of {length} bytes, more than {HEADER.size}. {ADVICE}")
    if begin > size:
        raise CheckpointError(f"{what} ends within its header: it has only {size} of {begin} bytes. {ADVICE}")
    tensors, spent = read_json(file, length, HEADER, f"the header of {what}")
    metadata = tensors.pop("__metadata__", {})
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA:
        raise CheckpointError(f"{what} has invalid __metadata__: {shown(metadata)}. {ADVICE}")
    _check_unicode(tensors, what)
    _check_offsets([_span(what, *item) for item in tensors.items()], size - begin, what)
    return Header(tensors, begin, spent)


def _check_unicode(names: Iterable[str], what: str) -> None:
    """Raise `CheckpointError` if a name is not valid Unicode.

    JSON can escape one half of a surrogate pair, which Python reads, but safetensors and UTF-8 cannot represent.
    """
    try:
        "".join(names).encode()
    except UnicodeEncodeError as error:
        lone = shown(error.object[error.start : error.end])
        raise CheckpointError(f"{what} has a tensor name that is not Unicode: it contains {lone}. {ADVICE}") from None


def add_header(spent: Limits, header: Header, folder: Path) -> Limits:
    """Returns `spent`, the size of earlier headers of `folder`, plus that of this one.

    Raises:
        CheckpointError: the sum exceeds the limits.
    """
    spent = Limits(*map(operator.add, spent, header.spent))
    HEADERS.check(spent, f"the headers of all files in {shown(str(folder))}")
    return spent


def _span(what: str, tensor: str, entry: Any) -> tuple[int, int]:
    """Returns the offsets of a tensor's first byte and of the byte after its last. Raises `CheckpointError`."""
    with suppress(KeyError, TypeError, ValueError):
        begin, end = entry["data_offsets"]
        size = _size(entry["dtype"], *entry["shape"])
        if type(entry["shape"]) is list and type(begin) is type(end) is int and 0 <= begin == end - size:
            return begin, end
    raise CheckpointError(
        f"{what}: the dtype, shape and data_offsets of tensor {shown(tensor)} do not match: {shown(entry)}. {ADVICE}"
    )


@lru_cache(maxsize=1024, typed=True)  # a model can have 100,000 expert tensors, but only of a few shapes
def _size(dtype: str, *shape: int) -> int:
    if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape):
        raise ValueError
    size, rest = divmod(math.prod(shape) * DTYPES[dtype].bits, 8)
    if rest:
        raise ValueError
    return size


def _check_offsets(spans: list[tuple[int, int]], data_size: int, what: str) -> None:
    end = 0
    for begin, stop in sorted(spans):
        if begin != end:
            raise CheckpointError(f"{what} has tensors that overlap or leave a gap at byte {min(begin, end)}. {ADVICE}")
        end = stop
    if end != data_size:
        raise CheckpointError(f"{what} holds {data_size} bytes of weights, but its header describes {end}. {ADVICE}")


Shapes = dict[str, list[list[int]]]  # the permitted shapes of a tensor, for each permitted dtype


def _wanted(experts: Experts, spec: QuantSpec, scales: Collection[str], quantized: bool) -> dict[str, Shapes]:
    """Returns what is permitted for each weight and scale of an expert."""
    n, k, weights = experts.intermediate, experts.hidden, spec.recoded_from or spec.weights
    of_tensor: list[list[int]] = [] if weights.weight_block else [[], [1]]  # one scale, which all rows share
    found: dict[str, Shapes] = {}
    for names, shape in (("gate_proj", "up_proj", "w1", "w3"), [n, k]), (("down_proj", "w2"), [k, n]):
        weight, scale_shapes = (
            {dtype: [tensor.file_shape(dtype, *shape), *others] for dtype in tensor.accepted}
            for tensor, others in ((weights.weight, []), (weights.scales, of_tensor))
        )
        for name in names:
            found[f"{name}.{WEIGHT}"] = weight if quantized else {dtype: [shape] for dtype in DTYPES}
            found |= {f"{name}.{scale}": scale_shapes for scale in scales}
    return found


def _other_scales(path: Path, tensor: str, scales: Collection[str]) -> CheckpointError:
    return CheckpointError(
        f"{shown(str(path))}: tensor {shown(tensor)} is none of a checkpoint whose scales are named "
        f"{' or '.join(scales)}, which config.json describes. The two belong to different checkpoints: download both "
        "again."
    )


def _contradiction(path: Path, tensor: str, entry: dict[str, Any], shapes: Shapes, experts: Experts) -> CheckpointError:
    either = "any dtype" if shapes.keys() == DTYPES.keys() else " or ".join(shapes)
    allowed = shapes.get(entry["dtype"]) or next(iter(shapes.values()))
    wanted = f"{either} {allowed[0]}, of experts 0 to {experts.experts - 1}"
    return CheckpointError(
        f"{shown(str(path))}: tensor {shown(tensor)} is {entry['dtype']} {entry['shape']}, but config.json "
        f"requires {wanted}. The two belong to different checkpoints, or one is damaged: download both again."
    )
