"""`fp8moe-warmup convert`: writes an unquantized checkpoint as block FP8, with the bytes of online quantization."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from fp8moe_plugin.checkpoint.config_json import load_config, quantization_config
from fp8moe_plugin.checkpoint.headers import INDEX_NAME
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.checkpoint.untrusted import opened
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.layers.unquantized import quantize_weight
from fp8moe_plugin.quoting import shown
from warmup.convert_folder import SOURCE, STAGING, Source, claim, is_made_from, publish, tidy, working_folder, writing
from warmup.convert_source import (
    SourceFile,
    Stored,
    check_names,
    check_unchanged,
    read_source,
    read_tensors,
)
from warmup.report import ConvertReport

CPU = torch.device("cpu")
# Weights in other formats would duplicate those converted here.
NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".part"}
WRITTEN = ("config.json", INDEX_NAME)
SPARE_BYTES = 64 << 20  # disk space for the index, config.json and tokenizer


def convert_checkpoint(model: Model, source: Path, out: Path) -> ConvertReport:
    """Convert an unquantized checkpoint to block FP8, in the new folder `out`.

    Files are written one by one to `<out>.partial`, which is renamed at the end, so `out` is complete or does not
    exist. A later call resumes an interrupted one. Needs memory for one file of the result, and disk space for all.

    Args:
        model: the result of `read_model` for the folder `source`.
    Raises:
        CheckpointError: weights are missing, damaged, not finite, inconsistent with the index, or modified during the
            conversion; or another file of the checkpoint cannot be copied.
        UnsupportedError: the checkpoint is already quantized, or stores experts in a layout that block FP8 does not
            have; `out` exists, or another conversion is writing it; or the disk is full.
        OSError: a file cannot be read, or a folder cannot be created.
    """
    config = load_config(source)
    if model.quantized or quantization_config(source, config) is not None:  # config.json may have changed
        raise UnsupportedError(f"{shown(str(source))} is already quantized. Serve it as it is.")
    copied, files = _copied(source), read_source(source)
    folder = os.fsencode(source.resolve()).decode(errors="backslashreplace")  # JSON is UTF-8, names may not be
    made_from = Source(folder=folder, files={file.name: file.state for file in files})
    if is_made_from(out, made_from):  # by a process that was killed when only the cleanup was left
        tidy(out)
        return _report(out, files)
    _check_not_there(out)
    _check_layout(files)
    check_names(source, files)
    partial = out.with_name(f"{out.name}.partial")
    with working_folder(partial, [*WRITTEN, *copied, *(file.name for file in files)]) as lock:
        _check_not_there(out)  # another conversion may have finished before this one got the lock
        _check_disk(partial, files)
        claim(partial, made_from)
        _write_weights(partial, files)
        _write_description(source, partial, files, config, copied)
        check_unchanged(files)
        publish(partial, out, lock)
    return _report(out, files)


def _check_not_there(out: Path) -> None:
    if os.path.lexists(out):
        raise UnsupportedError(f"{shown(str(out))} already exists. Delete it, or choose another --out.")


def _copied(source: Path) -> list[str]:
    """Returns the names of the files other than weights, such as the tokenizer's, which are copied.

    Raises:
        CheckpointError: a file cannot be opened, is not a regular file, or is a link out of the checkpoint.
    """
    found = sorted(
        path
        for path in source.iterdir()
        if path.name not in (*WRITTEN, SOURCE)
        and path.suffix not in NOT_COPIED
        and not path.name.startswith(".")
        and not path.is_dir()
    )
    for path in found:
        _check_readable(path)
    return [path.name for path in found]


def _check_readable(path: Path) -> None:
    try:
        with opened(path):
            pass
    except OSError as error:
        raise CheckpointError(
            f"{shown(str(path))} cannot be copied: {error.strerror}. Restore it, or remove it if it is not needed for "
            "serving, then run the command again."
        ) from error


def _check_layout(files: list[SourceFile]) -> None:
    """Raise `UnsupportedError` if experts are not stored separately, as in block-FP8 checkpoints.

    Raise it, too, if there is no weight to quantize.
    """
    tensors = _tensors(files)
    for tensor in tensors:
        together = ".experts." in tensor.name and len(tensor.shape) == 3
        if together or (tensor.quantized and len(tensor.shape) != 2):
            raise UnsupportedError(
                f"Tensor {shown(tensor.name)} has shape {list(tensor.shape)}, but only checkpoints with one matrix "
                "for each projection of each expert can be converted. Serve this one with --quantization fp8moe."
            )
    if not any(tensor.quantized for tensor in tensors):
        raise UnsupportedError(
            "The checkpoint has no weights to quantize: none is named like those of a language model's layers, such as "
            "model.layers.0.self_attn.o_proj.weight. Serve it without --quantization fp8moe."
        )


def _tensors(files: list[SourceFile]) -> list[Stored]:
    return [tensor for file in files for tensor in file.tensors]


def _check_disk(partial: Path, files: list[SourceFile]) -> None:
    missing = [file for file in files if not (partial / file.name).exists()]
    needed = SPARE_BYTES + sum(tensor.converted_bytes for tensor in _tensors(missing))
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise UnsupportedError(
            f"The converted checkpoint needs another {_size(needed)} for {shown(str(partial))}, but only "
            f"{_size(free)} are free. Free some space, or choose an --out on another disk."
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _write_weights(partial: Path, files: list[SourceFile]) -> None:
    total = sum(tensor.bytes for tensor in _tensors(files))
    with tqdm(total=total, unit="B", unit_scale=True, desc="quantized", disable=None) as progress:
        for file in files:
            path, staged = partial / file.name, partial / STAGING / file.name
            if path.exists():  # an earlier run completed it
                progress.update(sum(tensor.bytes for tensor in file.tensors))
                continue
            tensors = _converted(file, progress)
            with writing(path):
                save_file(tensors, staged, metadata={"format": "pt"})
                with staged.open("rb") as written:
                    os.fsync(written.fileno())
                shutil.copymode(file.path, staged)  # otherwise only the user could read it
                staged.replace(path)


def _converted(file: SourceFile, progress: tqdm) -> dict[str, torch.Tensor]:
    """Returns the tensors of one file of the result."""
    found: dict[str, torch.Tensor] = {}
    for tensor, value in read_tensors(file):
        if tensor.quantized:
            value, found[tensor.scales] = quantize_weight(tensor.name, value, CPU)
        found[tensor.name] = value
        progress.update(tensor.bytes)
    return found


def _write_description(
    source: Path, partial: Path, files: list[SourceFile], config: dict[str, Any], copied: list[str]
) -> None:
    """Write the index and config.json, and copy the files other than weights."""
    weight_map = {name: file.name for file in files for tensor in file.tensors for name in tensor.converted_names}
    total = sum(tensor.converted_bytes for tensor in _tensors(files))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    config = config | {"quantization_config": _quantization_config(files)}
    for name, content in (INDEX_NAME, index), ("config.json", config):
        with writing(partial / name):
            (partial / name).write_text(json.dumps(content, indent=2) + "\n")
    for name in copied:
        with opened(source / name) as file, writing(partial / name), (partial / name).open("wb") as copy:
            shutil.copyfileobj(file, copy)


def _quantization_config(files: list[SourceFile]) -> dict[str, Any]:
    matrices = [tensor for tensor in _tensors(files) if tensor.is_weight and len(tensor.shape) > 1]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(FP8_BLOCK.scales.block),
        "modules_to_not_convert": sorted(tensor.layer for tensor in matrices if not tensor.quantized),
    }


def _report(out: Path, files: list[SourceFile]) -> ConvertReport:
    tensors = _tensors(files)
    return ConvertReport(
        path=str(out),
        files=len(files),
        tensors=len(tensors),
        quantized=sum(tensor.quantized for tensor in tensors),
        source_bytes=sum(tensor.bytes for tensor in tensors),
        bytes=sum(tensor.converted_bytes for tensor in tensors),
    )
