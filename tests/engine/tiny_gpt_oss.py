"""A tiny gpt-oss in the names, dtypes and layouts of OpenAI's checkpoints, or unquantized with the same weights.

Neither hidden size nor intermediate channels are whole scale blocks, and ranks hold different numbers of channels.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.checkpoints import gpt_oss
from benchmarks.checkpoints.gpt_oss import Tensors

HIDDEN, INNER, VOCAB, EXPERTS, TOPK = 192, 352, 512, 8, 4
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
LAYERS = ("sliding_attention",)  # no later router amplifies what FP8 rounds
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


def tensors(quantized: bool, seed: str = "") -> Tensors:
    """Yields the tensors of a checkpoint; `seed`: "" or any other word for other weights of the experts."""
    return gpt_oss.tensors(config(quantized), torch.device("cpu"), seed)


def config(quantized: bool) -> dict[str, Any]:
    return CONFIG | ({"quantization_config": QUANTIZATION} if quantized else {})


def write(folder: Path, quantized: bool, seed: str = "") -> Path:
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors(quantized, seed)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config(quantized)))
    return folder
