"""The descriptions of published models, by name, and those that are refused."""

import json
from pathlib import Path
from typing import Any

FOLDERS = [Path(__file__).parent / name for name in ("configs", "configs_2026")]
PATHS = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.json"))}
REFUSED = {  # with a part of the message
    "DeepSeek-V4-Flash-NVFP4": "was quantized by ModelOpt to 'NVFP4'",
    "Kimi-K2.5": "num_bits' of the checkpoint's quantization_config is 4",
    "Kimi-K3": "num_bits' of the checkpoint's quantization_config is 4|quant_method is 'mxfp4'",  # vLLM renames it
    "Nemotron-3-Nano-30B-A3B-BF16": "mlp_hidden_act is 'relu2'",
    "gemma-4-26B-A4B": "hidden_activation is 'gelu_pytorch_tanh'",
}
SERVED = sorted(PATHS.keys() - REFUSED.keys())
# Families on Hopper GPUs in 2026, by demand. Of those without a name, no config.json is at hand.
FAMILIES: dict[str, tuple[str, ...]] = {
    "Qwen3.5, Qwen3.6": ("Qwen3.5-397B-A17B-FP8", "Qwen3.6-35B-A3B-FP8"),
    "DeepSeek-V4": ("DeepSeek-V4-Flash", "DeepSeek-V4-Flash-FP8", "DeepSeek-V4-Flash-NVFP4", "DeepSeek-V4-Pro"),
    "GLM-5 to 5.3": ("GLM-5.2-FP8",),
    "GLM-5.3-Flash": ("GLM-5.3-Flash",),
    "Qwen3.8-Flash-Next": ("Qwen3.8-Flash-Next-FP8",),
    "MiniMax-M2": ("MiniMax-M2.7",),
    "DeepSeek-V3, R1": ("DeepSeek-V3", "DeepSeek-V3.2-Exp"),
    "Kimi-K2.5": ("Kimi-K2.5",),
    "Kimi-K3": ("Kimi-K3",),
    "MiniMax-M3": ("MiniMax-M3",),
    "GLM-4.5 to 4.7": ("GLM-4.7-FP8", "GLM-4.5"),
    "Ling 3": ("Ling-3.0-flash-fp8",),
    "Hy3, Hy4": ("Hy3-preview",),
    "MiMo-V2": ("MiMo-V2-Flash",),
    "Laguna": ("Laguna-S-2.1-FP8",),
    "Step-3.5": ("Step-3.5-Flash-FP8",),
    "Qwen3-Next": ("Qwen3-Next-80B-A3B-Thinking",),
    "Qwen3": ("Qwen3-30B-A3B-FP8",),
    "gpt-oss": ("gpt-oss-120b", "gpt-oss-20b"),
    "Nemotron-3": ("Nemotron-3-Nano-30B-A3B-BF16",),
    "Llama-4, Gemma-4, Mistral-Large-3, dots3, LongCat-2.0, Inkling": (
        "Llama-4-Scout-17B-16E-Instruct",
        "gemma-4-26B-A4B",
    ),
}


def described(name: str) -> Any:
    """Returns the config.json of a model."""
    return json.loads(PATHS[name].read_text())
