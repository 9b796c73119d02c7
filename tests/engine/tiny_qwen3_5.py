"""A tiny Qwen3.5 in block FP8: three layers of linear and one of full attention, and one for multi-token prediction.

Sizes are as in `benchmarks.checkpoints.synthetic`, so that a forward pass behaves like a trained model's.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fp8moe_plugin.layers.unquantized import quantize_weight

HIDDEN, INNER, VOCAB, HEAD = 256, 256, 512, 64
SIZES = {
    **{"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 4, "max_position_embeddings": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD, "tie_word_embeddings": False},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": INNER},
    **{"shared_expert_intermediate_size": INNER, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": HEAD, "linear_value_head_dim": HEAD, "bos_token_id": 0, "eos_token_id": 1},
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
FULL = "model.layers.3."  # whose weights the layer for multi-token prediction has, too
RESIDUAL = 1 / 8  # gain of the layers that write to the residual stream
WRITES = ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")


PLAIN = ("in_proj_a", "in_proj_b", "conv1d", "gate", "shared_expert_gate", "fc", "lm_head", "embed_tokens")


def std(name: str, columns: int) -> float:
    if "embed_tokens" in name:
        return 1.0
    gain = 3 if "lm_head" in name else 1.5 * RESIDUAL if name.endswith(WRITES) else 1.5
    return gain / math.sqrt(columns)


def write(folder: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM

    config = AutoConfig.for_model("qwen3_5_moe_text", **SIZES)
    torch.manual_seed(0)
    model = Qwen3_5MoeForCausalLM(config).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape) * std(name, parameter.shape[-1]))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith(FULL)]:
        tensors[f"mtp.layers.0.{name.removeprefix(FULL)}"] = tensors[name].clone()
    tensors["mtp.fc.weight"] = (torch.randn(HIDDEN, 2 * HIDDEN) / math.sqrt(2 * HIDDEN)).bfloat16()
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(HIDDEN).bfloat16()  # a gain of 1
    modules = {name: name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.ndim > 1}
    plain = {module for module in modules.values() if module.rpartition(".")[2] in PLAIN}
    for name in [name for name, module in modules.items() if module not in plain]:
        q, scales = quantize_weight(name, tensors[name], torch.device("cpu"))
        tensors |= {name: q, f"{name}_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    described = json.loads((folder / "config.json").read_text())
    described |= {"architectures": ["Qwen3_5MoeForCausalLM"], "mtp_num_hidden_layers": 1}
    described["quantization_config"] = quantization | {"modules_to_not_convert": sorted(plain)}
    (folder / "config.json").write_text(json.dumps(described))
