"""Models that are served in 2026: the warm-up refuses what the engine refuses, for the same reason, and reads the rest.

The engine's side is vLLM's own code, up to the config from which it creates a quantization method. The descriptions are
shortened: fields that nothing reads, and vision models, are left out.
"""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.checkpoint.unquantized import incomplete_names
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.activation import Activation
from tests.checkpoint.test_model import QWEN, describe
from tests.engine.generate import LIMITS
from tests.engine.load import join_ranks
from tests.helpers import environment
from warmup.memory import cache_bytes, without_mtp

CONFIGS = Path(__file__).parent / "configs_2026"
NAMES = sorted(path.stem for path in CONFIGS.iterdir())
REFUSED = {
    "DeepSeek-V4-Flash-NVFP4": "was quantized by ModelOpt to 'NVFP4'",
    "Kimi-K2.5": "num_bits' of the checkpoint's quantization_config is 4",
    "Kimi-K3": "num_bits' of the checkpoint's quantization_config is 4|quant_method is 'mxfp4'",  # vLLM renames it
    "Laguna-S-2.1-FP8": "'kv_cache_scheme' of the checkpoint's quantization_config is",
    "Nemotron-3-Nano-30B-A3B-BF16": "mlp_hidden_act is 'relu2'",
    "gemma-4-26B-A4B": "hidden_activation is 'gelu_pytorch_tanh'",
}
# MoE layers, experts, top-k, hidden, intermediate; layers whose KV cache grows; a kind of dense layer with its layers,
# inputs and outputs.
READ: dict[str, tuple[tuple[int, ...], int, tuple[Any, ...]]] = {
    "DeepSeek-V4-Flash": ((44, 256, 6, 4096, 2048), 41, ("attn.wq_b", 44, 1024, (32768,))),
    "DeepSeek-V4-Flash-FP8": ((44, 256, 6, 4096, 2048), 41, ("attn.wq_b", 44, 1024, (32768,))),
    "GLM-4.7-FP8": ((90, 160, 8, 5120, 1536), 92, ("mlp.shared_experts.gate_up_proj", 90, 5120, (1536, 1536))),
    "GLM-5.2-FP8": ((76, 256, 8, 6144, 2048), 78, ("self_attn.indexer.wq_b", 22, 2048, (4096,))),
    "GLM-5.3-Flash": ((43, 288, 8, 4096, 2048), 11, ("mlp.gate_up_proj", 3, 4096, (12288, 12288))),
    "Ling-3.0-flash-fp8": ((41, 512, 8, 2560, 768), 7, ("mlp.shared_experts.gate_up_proj", 41, 2560, (768, 768))),
    "MiMo-V2-Flash": ((47, 256, 8, 4096, 2048), 9, ("self_attn.qkv_proj", 48, 4096, (12288, 768, 512))),
    "MiniMax-M2.7": ((62, 256, 8, 3072, 1536), 62, ("self_attn.qkv_proj", 62, 3072, (6144, 1024, 1024))),
    "MiniMax-M3": ((57, 128, 4, 6144, 3072), 60, ("mlp.shared_experts.gate_up_proj", 57, 6144, (3072, 3072))),
    "Qwen3.5-397B-A17B-FP8": (
        (60, 512, 10, 4096, 1024),
        15,
        ("linear_attn.in_proj_qkvz", 45, 4096, (2048, 2048, 8192, 8192)),
    ),
    "Qwen3.6-35B-A3B-FP8": ((40, 256, 8, 2048, 512), 10, ("self_attn.qkv_proj", 10, 2048, (8192, 512, 512))),
    "Qwen3.8-Flash-Next-FP8": ((48, 512, 10, 2560, 640), 12, ("mlp.shared_expert.down_proj", 48, 640, (2560,))),
    "Step-3.5-Flash-FP8": (
        (42, 288, 8, 4096, 1280),
        12,
        ("mlp.shared_expert.gate_up_proj", 42, 4096, (1280, 1280)),
    ),
}
# Of models that are refused, what is read of them without the cause.
CHANGED: dict[str, tuple[dict[str, Any], tuple[int, ...], int, tuple[Any, ...]]] = {
    "Laguna-S-2.1-FP8": (
        {"kv_cache_scheme": None},
        (47, 256, 10, 3072, 1024),
        12,
        ("mlp.shared_expert.gate_up_proj", 47, 3072, (1024, 1024)),
    ),
    "Kimi-K3": (
        {"hidden_act": "silu", "quantization_config": None},
        (92, 896, 16, 7168, 3072),
        24,
        ("mlp.shared_experts.gate_up_proj", 92, 7168, (6144, 6144)),
    ),
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


def test_short_names_of_ling_keep_layers_unquantized(tmp_path):
    config = json.loads((CONFIGS / "Ling-3.0-flash-fp8.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]
    model = read_model(describe(tmp_path, config))
    assert {layer.name for layer in model.plain} == {"self_attn.o_proj", "mlp.gate_up_proj"}
    assert model.incomplete_names == ()


@pytest.mark.parametrize("name", sorted({*NAMES} - {"DeepSeek-V4-Flash-NVFP4"}))  # ModelOpt's patterns
def test_published_lists_of_unquantized_layers_have_full_names(name):
    quantization = json.loads((CONFIGS / f"{name}.json").read_text()).get("quantization_config") or {}
    assert incomplete_names(quantization.get("modules_to_not_convert") or quantization.get("ignore") or ()) == ()


def test_every_model_has_an_outcome():
    assert set(NAMES) == REFUSED.keys() | READ.keys()
    assert REFUSED.keys() >= CHANGED.keys()


def changed(part: Any, changes: dict[str, Any]) -> Any:
    """Returns a description in which these fields, at any depth, have these values."""
    if not isinstance(part, dict):
        return part
    return {key: changes[key] if key in changes else changed(value, changes) for key, value in part.items()}


@pytest.mark.parametrize("name", [*READ, *CHANGED])
def test_shapes_of_models(tmp_path, name):
    changes, experts, growing, dense = CHANGED.get(name) or ({}, *READ[name])
    config = changed(json.loads((CONFIGS / f"{name}.json").read_text()), changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path)
    assert model.experts == Experts(*experts)
    assert model.cache
    assert model.cache.growing == growing
    found = {
        layer.name: (layer.name, layer.layers, layer.inputs, layer.outputs) for layer in (*model.dense, *model.plain)
    }
    assert found[dense[0]] == dense


def test_the_cache_of_hybrid_models(tmp_path):
    def per_token(name: str, **changes: Any) -> int:
        config = changed(json.loads((CONFIGS / f"{name}.json").read_text()), changes)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return cache_bytes(read_model(tmp_path), Parallel(), fp8=False)

    assert per_token("Qwen3.5-397B-A17B-FP8") == 15 * 2 * (256 + 256) * 2
    assert per_token("MiMo-V2-Flash") == 9 * 4 * (192 + 128) * 2
    assert per_token("Ling-3.0-flash-fp8") == 7 * (512 + 64) * 2
    assert per_token("Laguna-S-2.1-FP8", kv_cache_scheme=None) == 12 * 8 * 2 * 128 * 2
    assert per_token("GLM-5.2-FP8") == 78 * (512 + 64) * 2 + 21 * (128 + 4)


MAMBA = {"layers_block_type": ["mamba", "moe", "attention", "moe"] * 2}


@pytest.mark.parametrize(
    ("change", "layers", "growing"),
    [
        ({"num_hidden_layers": None, "num_layers": 8}, 8, 8),
        ({"n_routed_experts": 0, "moe_topk": 0, "attention_head_dim": 0}, 48, 48),
        ({"head_dim": 0, "attention_head_dim": 128}, 48, 48),
        ({"num_experts_per_tok": None, "top_k_experts": 8}, 48, 48),
        ({"num_experts_per_tok": None, "moe_top_k": 8, "moe_layers_enum": "3,4,5"}, 3, 48),
        ({"moe_layers_enum": [3, 47]}, 2, 48),
        ({"moe_layers_enum": "3, 47"}, 2, 48),
        ({"layers_block_type": ["linear_attention", "full_attention"] * 24}, 48, 24),
        ({"num_hidden_layers": None} | MAMBA, 4, 2),
        ({"interleave_moe_layer_step": 2, "intermediate_size_mlp": 8192}, 24, 48),
        ({"full_attention_interval": 4}, 48, 12),
        ({"attn_type_list": [0] * 40 + [1] * 8}, 48, 8),
        ({"linear_attn_config": {"full_attn_layers": [4, 8]}}, 48, 2),
        ({"num_key_value_heads": None, "num_attention_groups": 4}, 48, 48),
    ],
)
def test_other_names_of_fields(tmp_path, change, layers, growing):
    expected = read_model(describe(tmp_path, QWEN))
    model = read_model(describe(tmp_path, QWEN, **change))
    assert model.experts == replace(expected.experts, layers=layers)
    assert model.cache == replace(expected.cache, layers=model.cache.layers, growing=growing)
    assert model.kv_heads == expected.kv_heads
    if "intermediate_size_mlp" in change:
        assert {layer.outputs for layer in model.dense if layer.name == "mlp.gate_up_proj"} == {(8192, 8192)}


def test_the_language_model_of_a_thinker(tmp_path):
    nested = {"architectures": ["Omni"], "thinker_config": {"text_config": QWEN}}
    assert read_model(describe(tmp_path, nested)).experts == read_model(describe(tmp_path, QWEN)).experts


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_experts_per_tok": None, "chosen": 8}, "num_experts_per_tok is missing"),
        ({"moe_intermediate_size": None, "intermediate_size": None}, "intermediate_size is missing"),
        ({"head_dim": {"k": 128}}, "head_dim is {'k': 128}: Input should be a valid integer"),
    ],
)
def test_a_family_that_is_not_known_is_named(tmp_path, change, problem):
    for family in ("kimi_linear", None, "\x1b[2J"):
        with pytest.raises(
            UnsupportedError, match=rf"models of the type {re.escape(repr(family))}.*{problem}"
        ) as caught:
            read_model(describe(tmp_path, QWEN, model_type=family, **change))
        assert "run the command without --model" in str(caught.value)
    with pytest.raises(CheckpointError, match=f"{problem}.*Download the checkpoint again"):
        read_model(describe(tmp_path, QWEN, **change))


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4v_moe_text", "qwen2_moe", "qwen3_omni_moe_text"])
def test_families_with_the_same_names_are_known(tmp_path, family):
    assert read_model(describe(tmp_path, QWEN, model_type=family)).unknown_family is None
    assert read_model(describe(tmp_path, QWEN, model_type=f"{family}_2")).unknown_family == repr(f"{family}_2")


@pytest.mark.parametrize("name", ["MiniMax-M2.7", "MiMo-V2-Flash", "Laguna-S-2.1-FP8", "DeepSeek-V4-Flash"])
def test_vllm_makes_the_layers_that_warmup_counts(tmp_path, monkeypatch, name):
    """On the meta device, without weights. Layers of one name may differ in their heads, which is not read."""
    pytest.importorskip("vllm")
    config = changed(json.loads((CONFIGS / f"{name}.json").read_text()), {"kv_cache_scheme": None})
    expected = without_mtp(read_model(describe(tmp_path, config)))
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock)  # DeepSeek-V4 makes them on a CPU, too
    model = build(tmp_path, config["architectures"][0])
    assert [*activations_of(model)] == [*expected.activations]
    found = layers_of(model)
    assert found.pop("experts") == expected.experts.layers
    assert found == {(layer.name, layer.inputs): layer.layers for layer in expected.dense}


def test_vllm_makes_the_activations_that_warmup_reads(tmp_path):
    pytest.importorskip("vllm")
    few = {"num_hidden_layers": 6, "num_nextn_predict_layers": 0, "moe_layers_enum": "3,4,5"}
    few |= {name: [0, 0, 0, 0, 0, 7] for name in ("swiglu_limits", "swiglu_limits_shared")}
    config = json.loads((CONFIGS / "Step-3.5-Flash-FP8.json").read_text())
    expected = read_model(describe(tmp_path, config | few)).activations
    assert activations_of(build(tmp_path, config["architectures"][0])) == {expected[0]: 2, expected[1]: 1}


def build(folder: Path, architecture: str) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import ModelRegistry

    known = ModelRegistry.models[architecture]
    if hasattr(known, "module_name"):  # otherwise vLLM inspects the class in a new process
        ModelRegistry.register_model(architecture, known.load_model_cls())
    own = {"quantization": "fp8moe", "dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True}
    with mock.patch.dict(os.environ, {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}):
        engine = EngineArgs(model=str(folder), **own, **LIMITS).create_engine_config()
    try:
        with set_current_vllm_config(engine):
            join_ranks(folder)
            with torch.device("meta"):
                return initialize_model(vllm_config=engine)
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


def activations_of(model: torch.nn.Module) -> Counter[Activation]:
    """Returns the number of layers of experts by activation."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    experts = (module for module in model.modules() if isinstance(module, RoutedExperts))
    return Counter(layer.quant_method.spec.activation for layer in experts)


def layers_of(model: torch.nn.Module) -> Counter[Any]:
    """Returns the number of layers of experts with our method, and of dense ones by name and input channels."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
    from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod

    found: Counter[Any] = Counter()
    for name, module in model.named_modules():
        kind = re.sub(r"^model\.layers\.\d+\.", "", name)
        if isinstance(module, LinearBase):
            found[kind, module.input_size] += isinstance(module.quant_method, Fp8MoeLinearMethod)
        if isinstance(module, RoutedExperts):
            found["experts"] += isinstance(module.quant_method, Fp8MoeMethod)
    return +found
