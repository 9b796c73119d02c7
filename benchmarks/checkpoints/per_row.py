"""Quantize a BF16 checkpoint to FP8 with one scale per row, as compressed-tensors' FP8_DYNAMIC does.

    python -m benchmarks.checkpoints.per_row --model DIR --out DIR-row

The scale of a row is its largest magnitude over that of e4m3, in BF16. All linear layers are quantized but routers and
the output head. An engine quantizes activations.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.checkpoints.synthetic import ShardWriter
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.reference import FP8_MAX

PLAIN = ("embed_tokens", "gate", "lm_head")
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEME = {
    "targets": ["Linear"],
    "weights": {**FLOAT, "strategy": "channel", "dynamic": False},
    "input_activations": {**FLOAT, "strategy": "token", "dynamic": True},
}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": SCHEME},
    "ignore": ["lm_head", r"re:.*mlp\.gate$"],
}


def by_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns e4m3 `[N, K]` and BF16 scales `[N, 1]`."""
    scales = (weight.float().abs().amax(1, keepdim=True) / FP8_MAX).clamp(min=1e-12).bfloat16()
    return (weight.float() / scales.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def convert(folder: Path, out: Path) -> None:
    """Write the checkpoint in `folder` to the new folder `out`."""
    out.mkdir(parents=True)
    writer = ShardWriter(out)
    for shard in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            if tensor.ndim != 2 or name.split(".")[-2] in PLAIN:
                writer.add(name, tensor)
                continue
            q, scales = by_row(tensor)
            writer.add(name, q)
            writer.add(f"{name}_scale", scales)
    writer.finish()
    for path in folder.iterdir():
        if path.suffix in (".json", ".txt") and not path.name.endswith(".index.json"):
            shutil.copy(path, out)
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a BF16 checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    args = parser.parse_args()
    convert(args.model, args.out)


if __name__ == "__main__":
    main()
