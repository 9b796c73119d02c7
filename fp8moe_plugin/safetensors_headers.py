"""What the headers of a checkpoint's safetensors files say, held against its config.json. No weight is read."""

import math
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.plan import ceil_div
from fp8moe_plugin.shapes import GROUP, Experts
from fp8moe_plugin.untrusted import ADVICE, MAX_SIZE, Limits, opened, read_json, shown

INDEX_NAME = "model.safetensors.index.json"
# Kimi-K2, 141 thousand tensors in 61 files, has an index of 14 MB, and headers of 18 MB in all.
INDEX = Limits(size=32 << 20, containers=64, values=300_000)
HEADERS = Limits(size=32 << 20, containers=600_000, values=1_200_000)  # of all files together: bounds the time
HEADER_SIZE = 16 << 20  # of one file: bounds the memory
MAX_SHARDS = 1000  # each costs some tens of microseconds to open
MAX_DIMENSIONS = 8  # as many as any tensor has: the product of more could be a number of megabytes
MAX_NAMED = 3  # of missing files in a message

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
SCALE_DTYPES = ("F32", "BF16")
EXPERT = re.compile(
    r"layers\.(\d{1,6})\.\w{1,64}\.experts\.(\d{1,6})\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(weight(?:_scale_inv)?)\Z",
    re.ASCII,
)


def check_shards(folder: Path, experts: Experts, quantized: Collection[int]) -> None:
    """Hold the safetensors files that are in `folder` against what config.json says.

    Args:
        quantized: the layers whose experts are FP8.

    Raises:
        CheckpointError: a file is missing beside others, is damaged, or holds experts of another shape or dtype.
    """
    left = HEADERS
    for name in _present(folder, _shard_names(folder)):
        path = folder / name
        what = shown(str(path))
        with opened(path) as file:
            length, data_size = _lengths(file, what)
            header, left = read_json(file, length, left, f"the header of {what}")
        header.pop("__metadata__", None)
        _check_offsets([_span(what, *item) for item in header.items()], data_size, what)
        for tensor, entry in header.items():
            _check_expert(what, tensor, entry, experts, quantized)


def _shard_names(folder: Path) -> list[str]:
    """The names that the index gives; without an index, of all safetensors files in the folder."""
    index = folder / INDEX_NAME
    if os.path.lexists(index):
        names = _indexed(index)
    else:
        names = [entry.name for entry in os.scandir(folder) if entry.name.endswith(".safetensors")]
    for name in names:
        if not (name.isprintable() and name.endswith(".safetensors")) or re.search(r"[/\\]|\.\.", name):
            raise CheckpointError(
                f"{shown(str(folder))}: {shown(name)} is no plain name of a .safetensors file, it could lead out of "
                f"the folder. {ADVICE}"
            )
    if len(names) > MAX_SHARDS:
        raise CheckpointError(f"{shown(str(folder))} has {len(names)} weight files, more than {MAX_SHARDS}. {ADVICE}")
    return sorted(names)


def _indexed(path: Path) -> list[str]:
    what = shown(str(path))
    with opened(path) as file:
        index, _ = read_json(file, INDEX.size + 1, INDEX, what, plain=True)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{what} has no weight_map that names the file of each tensor. {ADVICE}")
    return list(set(weight_map.values()))


def _present(folder: Path, names: list[str]) -> list[str]:
    """All of them, or none: a folder may hold a checkpoint's description alone."""
    missing = [name for name in names if not (folder / name).exists()]
    if missing and len(missing) < len(names):
        first = ", ".join(shown(name) for name in missing[:MAX_NAMED])
        raise CheckpointError(
            f"{shown(str(folder))} lacks {len(missing)} of its {len(names)} weight files: {first}"
            f"{', ...' if len(missing) > MAX_NAMED else ''}. Complete the download."
        )
    return [] if missing else names


def _lengths(file: BinaryIO, what: str) -> tuple[int, int]:
    """The bytes of the header and of the data behind it."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > HEADER_SIZE:
        raise CheckpointError(f"{what} has a header of {length} bytes, more than {HEADER_SIZE}. {ADVICE}")
    if 8 + length > size:
        raise CheckpointError(f"{what} ends within its header: it has {size} bytes of {8 + length}. {ADVICE}")
    return length, size - 8 - length


def _span(what: str, tensor: str, entry: Any) -> tuple[int, int]:
    """Where a tensor's bytes begin and end."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{what}: tensor {shown(tensor)} has the unknown dtype {shown(dtype)}. {ADVICE}")
    if not _are_sizes(shape, MAX_SIZE) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{what}: tensor {shown(tensor)} has the shape {shown(shape)}. {ADVICE}")
    if not _are_sizes(span, 2**63) or len(span) != 2:
        raise CheckpointError(f"{what}: tensor {shown(tensor)} has the data_offsets {shown(span)}. {ADVICE}")
    bits = math.prod(shape) * BITS[dtype]
    if bits != (span[1] - span[0]) * 8:
        raise CheckpointError(
            f"{what}: tensor {shown(tensor)} has data_offsets {span} of {span[1] - span[0]} bytes, wanted {bits / 8:g} "
            f"for {dtype} {shape}. {ADVICE}"
        )
    return span[0], span[1]


def _are_sizes(values: Any, largest: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= largest for value in values)


def _check_offsets(spans: list[tuple[int, int]], data_size: int, what: str) -> None:
    end = 0
    for begin, stop in sorted(spans):
        if begin != end:
            raise CheckpointError(f"{what} has tensors that overlap or leave a gap at byte {min(begin, end)}. {ADVICE}")
        end = stop
    if end != data_size:
        raise CheckpointError(f"{what} holds {data_size} bytes of weights, its header describes {end}. {ADVICE}")


def _check_expert(what: str, tensor: str, entry: Any, experts: Experts, quantized: Collection[int]) -> None:
    match = EXPERT.search(tensor)
    if match is None:
        return
    layer, expert, projection, kind = match.groups()
    n, k = experts.intermediate, experts.hidden
    wanted = [k, n] if projection in ("down_proj", "w2") else [n, k]
    dtypes = ("F8_E4M3",) if int(layer) in quantized else tuple(BITS)
    if kind == "weight_scale_inv":
        wanted, dtypes = [ceil_div(size, GROUP) for size in wanted], SCALE_DTYPES
    found = f"{entry['dtype']} {entry['shape']}"
    if entry["shape"] != wanted or entry["dtype"] not in dtypes:
        names = " or ".join(dtypes) if len(dtypes) < len(BITS) else "any dtype"
        raise CheckpointError(
            f"{what}: tensor {shown(tensor)} is {found}, by config.json it should be {names} {wanted}. {ADVICE}"
        )
    if int(expert) >= experts.experts:
        raise CheckpointError(
            f"{what}: tensor {shown(tensor)} is of expert {expert}, config.json has {experts.experts}. {ADVICE}"
        )
