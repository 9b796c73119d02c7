"""Helpers of the tests of `fp8moe-warmup convert`."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints.synthetic import PRESETS, Shape, write_checkpoint
from warmup.__main__ import main

QWEN = replace(PRESETS["qwen3_moe", "tiny"], moe_layers=1, experts=4, topk=2)
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


def write_source(folder: Path, shape: Shape = QWEN) -> Path:
    """Returns an unquantized checkpoint in several files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.checkpoints.synthetic.SHARD_BYTES", 1 << 20)
        write_checkpoint(folder, shape, fp8=False)
    return folder


def run(source: Path, out: Path) -> int:
    return main(["convert", "--model", str(source), "--out", str(out)])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def change(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = folder / index[name]
    save_file(found := load_file(file) | {name: edit(load_file(file)[name])}, file, metadata={"format": "pt"})
    assert name in found


def refused(capsys: pytest.CaptureFixture[str], source: Path, out: Path) -> str:
    assert run(source, out) == 1
    assert not out.exists()
    return capsys.readouterr().err.rpartition("error: ")[2]


def content(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file below a folder; for folders, only the name."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
