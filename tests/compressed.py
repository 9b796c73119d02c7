"""Turns a checkpoint of block FP8 into others: of compressed-tensors, as llm-compressor writes it, and of ModelOpt."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints.per_row import FLOAT
from benchmarks.checkpoints.per_row import QUANTIZATION as BY_ROW
from benchmarks.checkpoints.per_row import by_row as quantize_rows
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.reference import FP8_MAX, dequantize_blocks

# What compressed-tensors writes for FP8_BLOCK; tests/checkpoint/test_compressed.py has it from the library.
SCHEME = {
    "targets": ["Linear"],
    "weights": {**FLOAT, "strategy": "block", "block_structure": [128, 128], "dynamic": False},
    "input_activations": {**FLOAT, "strategy": "group", "group_size": 128, "dynamic": True},
}
QUANTIZATION = BY_ROW | {"config_groups": {"group_0": SCHEME}}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.gate"]}


def compress(folder: Path) -> None:
    """Rename the scales of a checkpoint, round them to BF16, and describe it as compressed-tensors does."""
    (shard,) = folder.glob("*.safetensors")
    renamed = {}
    for name, tensor in load_file(shard).items():
        scale = name.endswith("weight_scale_inv")
        renamed[name.removesuffix("_inv") if scale else name] = tensor.to(torch.bfloat16) if scale else tensor
    rewrite(folder, renamed, QUANTIZATION)


def requantize(folder: Path, quantization: dict[str, Any]) -> None:
    """Quantize the weights of a checkpoint again, by row for BY_ROW, else as a whole, with a static input scale."""
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    found = {}
    for name, tensor in tensors.items():
        if (scales := tensors.get(f"{name}_scale_inv")) is not None:
            weight = dequantize_blocks(tensor, scales)
            if quantization is BY_ROW:
                found[name], found[f"{name}_scale"] = quantize_rows(weight)
                continue
            scale = weight.abs().max() / FP8_MAX
            found[name] = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            found[f"{name}_scale"] = scale
            found[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.01)
        elif not name.endswith("_scale_inv"):
            found[name] = tensor
    rewrite(folder, found, quantization)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    (shard,) = folder.glob("*.safetensors")
    save_file(tensors, shard, metadata={"format": "pt"})
    for index in folder.glob("*.index.json"):
        index.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
