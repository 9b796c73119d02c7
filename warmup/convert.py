"""`python -m warmup convert`: an unquantized checkpoint as the block-FP8 one that loading it would make of it."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from fp8moe_plugin.checkpoint import WEIGHT_BLOCK
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.layers.unquantized import is_quantized, quantize_weight
from fp8moe_plugin.safetensors_headers import BITS, INDEX_NAME, weight_files
from fp8moe_plugin.shapes import GROUP, Model, ceil_div
from fp8moe_plugin.untrusted import ADVICE, opened, shown
from warmup.report import ConvertReport

WEIGHT = ".weight"
SCALE = "_scale_inv"
CPU = torch.device("cpu")
# Weights in other formats would be copies of what is converted here.
NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".part"}
SOURCE = "converted-from.json"  # in a folder that is not complete
SPARE_BYTES = 64 << 20  # of disk: index, config.json, tokenizer


@dataclass(frozen=True)
class Stored:
    """A tensor of the unquantized checkpoint."""

    name: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def layer(self) -> str:
        return self.name.removesuffix(WEIGHT)

    @property
    def quantized(self) -> bool:
        return self.name.endswith(WEIGHT) and is_quantized(self.layer)

    @property
    def converted_bytes(self) -> int:
        if not self.quantized:
            return self.bytes
        n, k = self.shape
        return n * k + 4 * ceil_div(n, GROUP) * ceil_div(k, GROUP)


Files = dict[str, list[Stored]]


class Source(BaseModel):
    """What an incomplete folder is made from: it is gone on with only from the same files."""

    folder: str
    files: dict[str, tuple[int, int]]  # size, and when it was last written, in ns


def convert_checkpoint(model: Model, source: Path, out: Path) -> ConvertReport:
    """Write an unquantized checkpoint to the new folder `out`, in block FP8.

    Work is done beside it in `<out>.partial`, a file at a time, which a later call goes on with; `out` is whole or not
    there. Memory is needed for one file of the result, disk for all of them.

    Args:
        model: what `read_model` says of the folder `source`.
    Raises:
        CheckpointError: weights are missing, damaged or not finite.
        UnsupportedError: the checkpoint is quantized already, or stores experts in a way that block FP8 has not; `out`
            is there, or the disk is too small.
        OSError: a file cannot be read or written.
    """
    if model.quantized:
        raise UnsupportedError(f"{shown(str(source))} is block FP8 already. Serve it as it is.")
    if os.path.lexists(out):
        raise UnsupportedError(f"{shown(str(out))} is already there. Delete it, or give another --out.")
    names = weight_files(source)
    files = {name: list(_stored(source / name)) for name in names}
    partial = out.with_name(f"{out.name}.partial")
    _check_layout(files)
    _check_disk(partial, files)
    _claim(partial, source, names)
    _write_weights(source, partial, files)
    _write_description(source, partial, files)
    partial.rename(out)
    (out / SOURCE).unlink()
    return _report(out, files)


def _stored(path: Path) -> Iterator[Stored]:
    with opened(path), _safetensors(path) as file:
        for name in sorted(file.keys()):
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            yield Stored(name, shape, math.prod(shape) * BITS[part.get_dtype()] // 8)


def _safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{shown(str(path))} is damaged: {error}. {ADVICE}") from None


def _check_layout(files: Files) -> None:
    """Raise `UnsupportedError` for experts that are not stored each by itself, as block-FP8 checkpoints have them.

    Also if nothing would be quantized.
    """
    for tensor in (tensor for stored in files.values() for tensor in stored):
        together = ".experts." in tensor.name and len(tensor.shape) == 3
        if together or (tensor.quantized and len(tensor.shape) != 2):
            raise UnsupportedError(
                f"Tensor {shown(tensor.name)} has shape {list(tensor.shape)}: converted are checkpoints with one "
                "matrix for each projection of each expert. Serve this one with --quantization fp8moe as it is."
            )
    if not any(tensor.quantized for stored in files.values() for tensor in stored):
        raise UnsupportedError(
            "The checkpoint has no weights under the names of a language model's layers, such as "
            "model.layers.0.self_attn.o_proj.weight. Serve it without --quantization fp8moe."
        )


def _claim(partial: Path, source: Path, names: list[str]) -> None:
    """Make the folder to work in; raise `UnsupportedError` if it is there and not made from the same files."""
    stats = {name: (source / name).stat() for name in names}
    times = {name: (found.st_size, found.st_mtime_ns) for name, found in stats.items()}
    made_from = Source(folder=str(source.resolve()), files=times)
    partial.mkdir(exist_ok=True)
    if not any(partial.iterdir()):
        (partial / SOURCE).write_text(made_from.model_dump_json())
    try:
        same = Source.model_validate_json((partial / SOURCE).read_bytes()) == made_from
    except (FileNotFoundError, ValidationError):
        same = False
    if not same:
        raise UnsupportedError(
            f"{shown(str(partial))} is there, and is not from an interrupted conversion of these files. Delete it, or "
            "give another --out."
        )


def _check_disk(partial: Path, files: Files) -> None:
    needed = SPARE_BYTES + sum(
        tensor.converted_bytes for name, stored in files.items() if not (partial / name).exists() for tensor in stored
    )
    free = shutil.disk_usage(partial.absolute().parent).free
    if needed > free:
        raise UnsupportedError(
            f"The converted checkpoint needs {needed / 1e9:.1f} GB more at {shown(str(partial))}, where "
            f"{free / 1e9:.1f} GB are free. Make room, or give an --out on another disk."
        )


def _write_weights(source: Path, partial: Path, files: Files) -> None:
    total = sum(tensor.bytes for stored in files.values() for tensor in stored)
    with tqdm(total=total, unit="B", unit_scale=True, desc="quantized") as progress:
        for name, stored in files.items():
            if (partial / name).exists():  # an earlier run wrote it, whole
                progress.update(sum(tensor.bytes for tensor in stored))
                continue
            staging = partial / f"{name}.part"
            save_file(_converted(source / name, stored, progress), staging, metadata={"format": "pt"})
            with staging.open("rb") as written:
                os.fsync(written.fileno())
            shutil.copymode(source / name, staging)  # else only the user could read it
            staging.replace(partial / name)


def _converted(path: Path, stored: list[Stored], progress: tqdm) -> dict[str, torch.Tensor]:
    """The tensors of one file of the result."""
    found: dict[str, torch.Tensor] = {}
    with opened(path), _safetensors(path) as file:
        for tensor in stored:
            value = file.get_tensor(tensor.name)
            if tensor.quantized:
                value, found[tensor.name + SCALE] = quantize_weight(tensor.name, value, CPU)
            found[tensor.name] = value
            progress.update(tensor.bytes)
    return found


def _write_description(source: Path, partial: Path, files: Files) -> None:
    """The index, config.json, and copies of the files that are no weights, such as the tokenizer's."""
    tensors = [(name, tensor) for name, stored in files.items() for tensor in stored]
    weight_map = {tensor.name: name for name, tensor in tensors}
    weight_map |= {tensor.name + SCALE: name for name, tensor in tensors if tensor.quantized}
    total = sum(tensor.converted_bytes for _, tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    with opened(source / "config.json") as file:
        config = json.load(file) | {"quantization_config": _quantization_config(files)}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(source.iterdir()):
        written = path.name in ("config.json", INDEX_NAME)
        if not written and path.is_file() and path.suffix not in NOT_COPIED and not path.name.startswith("."):
            with opened(path) as file, (partial / path.name).open("wb") as copy:
                shutil.copyfileobj(file, copy)


def _quantization_config(files: Files) -> dict[str, Any]:
    matrices = [t for stored in files.values() for t in stored if t.name.endswith(WEIGHT) and len(t.shape) > 1]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": WEIGHT_BLOCK,
        "modules_to_not_convert": sorted(tensor.layer for tensor in matrices if not tensor.quantized),
    }


def _report(out: Path, files: Files) -> ConvertReport:
    tensors = [tensor for stored in files.values() for tensor in stored]
    return ConvertReport(
        path=str(out),
        files=len(files),
        tensors=len(tensors),
        quantized=sum(tensor.quantized for tensor in tensors),
        source_bytes=sum(tensor.bytes for tensor in tensors),
        bytes=sum(tensor.converted_bytes for tensor in tensors),
    )
