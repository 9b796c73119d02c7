"""Write a gpt-oss with random weights in the names, dtypes and layouts of OpenAI's checkpoints.

    python -m benchmarks.checkpoints.gpt_oss --config gpt-oss-20b/config.json --out DIR

Sizes and layers are the config's. The scale of the weights is that of `benchmarks.checkpoints.synthetic`.
"""

import argparse
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints.mxfp4 import draw, rounded, values
from benchmarks.checkpoints.synthetic import ShardWriter
from benchmarks.checkpoints.tokenizer import write_tokenizer

RESIDUAL = 1 / 8  # gain of the layers that write to the residual stream
Config = dict[str, Any]
Tensors = Iterator[tuple[str, torch.Tensor]]


def tensors(config: Config, device: torch.device, seed: str = "") -> Tensors:
    """Yields the tensors of a checkpoint, whose experts are in MXFP4 if the config says so.

    Args:
        seed: any other word: other weights of the experts.
    """
    hidden, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    plain, linear = (partial(part, device=device) for part in (_plain, _linear))
    yield from plain("model.embed_tokens.weight", vocab, hidden, std=1.0)
    yield from plain("lm_head.weight", vocab, hidden, std=4 / math.sqrt(hidden))
    yield "model.norm.weight", torch.ones(hidden).bfloat16()
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{part}.weight", torch.ones(hidden).bfloat16()
        yield from plain(f"{layer}.self_attn.sinks", heads, std=1.0)
        for part, count in (("q", heads), *((part, config["num_key_value_heads"]) for part in "kv")):
            yield from linear(f"{layer}.self_attn.{part}_proj", count * config["head_dim"], hidden)
        yield from linear(f"{layer}.self_attn.o_proj", hidden, heads * config["head_dim"], RESIDUAL)
        yield from linear(f"{layer}.mlp.router", config["num_local_experts"], hidden, 2.0)
        yield from _experts(f"{layer}.mlp.experts", config, device, seed)


def _plain(name: str, *shape: int, std: float, device: torch.device) -> Tensors:
    yield name, draw(name, *shape, std=std, device=device).bfloat16()


def _linear(name: str, n: int, k: int, gain: float = 1.0, *, device: torch.device) -> Tensors:
    yield f"{name}.weight", (draw(name, n, k, device=device) * gain).bfloat16()
    yield from _plain(f"{name}.bias", n, std=0.1, device=device)


def _experts(name: str, config: Config, device: torch.device, seed: str) -> Tensors:
    """Yields the tensors of all experts of a layer. Gates often exceed the limit, which no activation of w2 hides."""
    experts, hidden, inner = (config[key] for key in ("num_local_experts", "hidden_size", "intermediate_size"))
    for part, n, k, gain, bias in (
        ("gate_up_proj", 2 * inner, hidden, 2.0, 1.0),
        ("down_proj", hidden, inner, RESIDUAL, 0.3),
    ):
        own = f"{name}.{part}"
        codes, exponents = rounded(draw(own + seed, experts, n, k, device=device) * gain)
        yield from _plain(f"{own}_bias", experts, n, std=bias, device=device)
        if "quantization_config" in config:
            yield f"{own}_blocks", codes.unflatten(-1, (-1, 16))
            yield f"{own}_scales", exponents.view(torch.uint8)
        else:
            yield own, values(codes, exponents).mT.contiguous().bfloat16()


def write_checkpoint(folder: Path, config: Config) -> int:
    """Write a whole checkpoint into a new folder; the arithmetic runs on a GPU if there is one.

    Returns:
        The bytes of its weights.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder.mkdir(parents=True)
    writer = ShardWriter(folder)
    for name, tensor in tensors(config, device):
        writer.add(name, tensor)
    writer.finish()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(folder, config["vocab_size"])
    return writer.total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="config.json of a gpt-oss")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    options = parser.parse_args()
    size = write_checkpoint(options.out, json.loads(options.config.read_text()))
    print(f"{options.out}: {size / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
