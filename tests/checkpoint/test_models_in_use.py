"""Models that are served in 2026: the warm-up refuses what the engine refuses, for the same reason, and reads the rest.

The engine's side is vLLM's own code, up to the config from which it creates a quantization method. The descriptions are
shortened: fields that nothing reads, and vision models, are left out.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.errors import UnsupportedError
from tests.helpers import environment

CONFIGS = Path(__file__).parent / "configs_2026"
NAMES = sorted(path.stem for path in CONFIGS.iterdir())
CLAMPED = "swiglu_limits? is .*: its experts clamp SwiGLU"
REFUSED = {
    "DeepSeek-V4-Flash": r"experts are FP4 \(expert_dtype 'fp4'\)",
    "DeepSeek-V4-Flash-FP8": CLAMPED,
    "DeepSeek-V4-Flash-NVFP4": "was quantized by ModelOpt to 'NVFP4'",
    "GLM-4.7-FP8": "strategy' of the checkpoint's quantization_config is 'channel'",
    "GLM-5.3-Flash": CLAMPED,
    "Kimi-K2.5": "num_bits' of the checkpoint's quantization_config is 4",
    "Kimi-K3": "num_bits' of the checkpoint's quantization_config is 4|quant_method is 'mxfp4'",  # vLLM renames it
    "Laguna-S-2.1-FP8": "'kv_cache_scheme' of the checkpoint's quantization_config is",
    "MiniMax-M3": "hidden_act is 'swigluoai'",
    "Nemotron-3-Nano-30B-A3B-BF16": "mlp_hidden_act is 'relu2'",
    "Step-3.5-Flash-FP8": CLAMPED,
    "gemma-4-26B-A4B": "hidden_activation is 'gelu_pytorch_tanh'",
}
FOREIGN = ("Ling-3.0-flash-fp8", "MiniMax-M3")  # transformers has no class for their config.json


def described(folder: Path, name: str, **changes: Any) -> Path:
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused_by_engine(folder: Path, name: str) -> str | None:
    from transformers import PretrainedConfig
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.weight_utils import get_quant_config
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import get_config

    import fp8moe_plugin

    fp8moe_plugin.register()
    if name in FOREIGN:
        config = PretrainedConfig.from_dict(json.loads((folder / "config.json").read_text()))
    else:
        config = get_config(str(folder), trust_remote_code=False)
    arch = SimpleNamespace(total_num_attention_heads=1, total_num_kv_heads=1)
    model = SimpleNamespace(
        **{"hf_config": config, "hf_text_config": config.get_text_config(), "model_arch_config": arch},
        **{"quantization": "fp8moe", "quantization_config": None, "hf_overrides": {}},
        **{"model": str(folder), "revision": None},
    )
    if config.architectures[0].startswith(("DeepseekV4", "KimiK3")):  # whose quantization vLLM renames
        MODELS_CONFIG_MAP[config.architectures[0]].verify_and_update_model_config(model)
    try:
        with environment("FP8MOE_BACKEND", "reference"):
            get_quant_config(model, LoadConfig()).maybe_update_config(model.model, hf_config=config)
    except UnsupportedError as error:
        return str(error)
    return None


def refused_by_warmup(folder: Path) -> str | None:
    try:
        read_model(folder)
    except UnsupportedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", NAMES)
def test_warmup_and_engine_refuse_a_model_for_one_reason(tmp_path, name):
    pytest.importorskip("vllm")
    folder = described(tmp_path, name)
    for refusal in (refused_by_warmup(folder), refused_by_engine(folder, name)):
        if name in REFUSED:
            assert re.search(REFUSED[name], refusal or "")
        else:
            assert refusal is None
