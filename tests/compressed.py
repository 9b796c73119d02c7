"""Turns a checkpoint of `quant_method: fp8` into the same of compressed-tensors, as llm-compressor writes it."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# What compressed-tensors writes for FP8_BLOCK; tests/checkpoint/test_compressed.py has it from the library.
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEME = {
    "targets": ["Linear"],
    "weights": {**FLOAT, "strategy": "block", "block_structure": [128, 128], "dynamic": False},
    "input_activations": {**FLOAT, "strategy": "group", "group_size": 128, "dynamic": True},
}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": SCHEME},
    "ignore": ["lm_head", r"re:.*mlp\.gate$"],
}


def compress(folder: Path) -> None:
    """Rename the scales of a checkpoint, round them to BF16, and describe it as compressed-tensors does."""
    (shard,) = folder.glob("*.safetensors")
    renamed = {}
    for name, tensor in load_file(shard).items():
        scale = name.endswith("weight_scale_inv")
        renamed[name.removesuffix("_inv") if scale else name] = tensor.to(torch.bfloat16) if scale else tensor
    save_file(renamed, shard, metadata={"format": "pt"})
    for index in folder.glob("*.index.json"):
        index.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(config))
