"""A tiny gpt-oss in the names, dtypes and layouts of OpenAI's checkpoints, or unquantized with the same weights.

Neither hidden size nor intermediate channels are whole scale blocks, and ranks hold different numbers of channels.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fp8moe_plugin.layers.recode import E2M1
from tests.engine.tiny_deepseek_v4 import draw, mxfp4

HIDDEN, INNER, VOCAB, EXPERTS, TOPK = 192, 352, 512, 8, 4
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
LAYERS = ("sliding_attention",)  # no later router amplifies what FP8 rounds
RESIDUAL = 1 / 8  # gain of the layers that write to the residual stream
CONFIG: dict[str, Any] = {
    **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16"},
    **{"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB, "num_hidden_layers": len(LAYERS)},
    **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "attention_bias": True},
    **{"num_local_experts": EXPERTS, "num_experts_per_tok": TOPK, "hidden_act": "silu", "swiglu_limit": 7.0},
    **{"layer_types": list(LAYERS), "sliding_window": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    **{"rope_theta": 150000, "tie_word_embeddings": False, "eos_token_id": 1, "pad_token_id": 0},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        **{"beta_fast": 32.0, "beta_slow": 1.0},
    },
}
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
Tensors = Iterator[tuple[str, torch.Tensor]]


def plain(name: str, *shape: int, std: float | None = None) -> Tensors:
    yield name, draw(name, *shape, std=std).bfloat16()


def linear(name: str, n: int, k: int, gain: float = 1.0) -> Tensors:
    yield f"{name}.weight", (draw(name, n, k) * gain).bfloat16()
    yield from plain(f"{name}.bias", n, std=0.1)


def norm(name: str) -> Tensors:
    yield f"{name}.weight", torch.ones(HIDDEN).bfloat16()


def values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Returns the weights `[.., N, K]` exactly."""
    positive = torch.tensor(E2M1)
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()
    scales = torch.exp2(exponents.view(torch.uint8).float() - 127).repeat_interleave(32, -1)
    return torch.cat([positive, -positive])[pairs] * scales


def experts(name: str, seed: str, quantized: bool) -> Tensors:
    """Yields the tensors of all experts of a layer. Gates often exceed the limit, which no activation of w2 hides."""
    for part, n, k, gain, bias in (
        ("gate_up_proj", 2 * INNER, HIDDEN, 2.0, 1.0),
        ("down_proj", HIDDEN, INNER, RESIDUAL, 0.3),
    ):
        own = f"{name}.{part}"
        codes, exponents = mxfp4(draw(own + seed, EXPERTS, n, k) * gain)
        yield from plain(f"{own}_bias", EXPERTS, n, std=bias)
        if quantized:
            yield f"{own}_blocks", codes.unflatten(-1, (-1, 16))
            yield f"{own}_scales", exponents.view(torch.uint8)
        else:
            yield own, values(codes, exponents).mT.contiguous().bfloat16()


def tensors(quantized: bool, seed: str = "") -> Tensors:
    """Yields the tensors of a checkpoint; `seed`: "" or any other word for other weights of the experts."""
    yield from plain("model.embed_tokens.weight", VOCAB, HIDDEN, std=1.0)
    yield from plain("lm_head.weight", VOCAB, HIDDEN, std=4 / math.sqrt(HIDDEN))
    yield from norm("model.norm")
    for i in range(len(LAYERS)):
        layer = f"model.layers.{i}"
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield from norm(f"{layer}.{part}")
        yield from plain(f"{layer}.self_attn.sinks", HEADS, std=1.0)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield from linear(f"{layer}.self_attn.{part}_proj", heads * HEAD_DIM, HIDDEN)
        yield from linear(f"{layer}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, RESIDUAL)
        yield from linear(f"{layer}.mlp.router", EXPERTS, HIDDEN, 2.0)
        yield from experts(f"{layer}.mlp.experts", seed, quantized)


def write(folder: Path, quantized: bool, seed: str = "") -> Path:
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors(quantized, seed)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = CONFIG | ({"quantization_config": QUANTIZATION} if quantized else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
