"""Models that are served in 2026: warm-up and engine serve them with the same layers, or refuse them for one reason.

The engine's side is vLLM's own code, from the command line's options to the layers of its model. README.md of the
descriptions says where they come from.
"""

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.checkpoint.unquantized import incomplete_names
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from tests.checkpoint.engine_models import activations_of, build, layers_of
from tests.checkpoint.published import FAMILIES, FOLDERS, REFUSED, described
from tests.checkpoint.test_model import QWEN, describe
from tests.helpers import environment
from warmup.__main__ import main
from warmup.memory import cache_bytes, without_mtp

NAMES = sorted(name for names in FAMILIES.values() for name in names)
# MoE layers, experts, top-k, hidden, intermediate; layers whose KV cache grows; a kind of dense layer with its layers,
# inputs and outputs.
READ: dict[str, tuple[tuple[int, ...], int, tuple[Any, ...]]] = {
    "DeepSeek-V4-Flash": ((44, 256, 6, 4096, 2048), 41, ("attn.wq_b", 44, 1024, (32768,))),
    "DeepSeek-V4-Flash-FP8": ((44, 256, 6, 4096, 2048), 41, ("attn.wq_b", 44, 1024, (32768,))),
    "DeepSeek-V4-Pro": ((62, 384, 6, 7168, 3072), 61, ("attn.wq_b", 62, 1536, (65536,))),
    "GLM-4.7-FP8": ((90, 160, 8, 5120, 1536), 92, ("mlp.shared_experts.gate_up_proj", 90, 5120, (1536, 1536))),
    "GLM-5.2-FP8": ((76, 256, 8, 6144, 2048), 78, ("self_attn.indexer.wq_b", 22, 2048, (4096,))),
    "GLM-5.3-Flash": ((43, 288, 8, 4096, 2048), 11, ("mlp.gate_up_proj", 3, 4096, (12288, 12288))),
    "Ling-3.0-flash-fp8": ((41, 512, 8, 2560, 768), 7, ("mlp.shared_experts.gate_up_proj", 41, 2560, (768, 768))),
    "Hy3-preview": ((80, 192, 8, 4096, 1536), 80, ("mlp.shared_experts.gate_up_proj", 80, 4096, (1536, 1536))),
    "Laguna-S-2.1-FP8": (
        (47, 256, 10, 3072, 1024),
        12,
        ("mlp.shared_expert.gate_up_proj", 47, 3072, (1024, 1024)),
    ),
    "MiMo-V2-Flash": ((47, 256, 8, 4096, 2048), 9, ("self_attn.qkv_proj", 48, 4096, (12288, 768, 512))),
    "MiniMax-M2.7": ((62, 256, 8, 3072, 1536), 62, ("self_attn.qkv_proj", 62, 3072, (6144, 1024, 1024))),
    "MiniMax-M3": ((57, 128, 4, 6144, 3072), 60, ("mlp.shared_experts.gate_up_proj", 57, 6144, (3072, 3072))),
    "Qwen3.5-397B-A17B-FP8": (
        (61, 512, 10, 4096, 1024),
        15,
        ("linear_attn.in_proj_qkvz", 45, 4096, (2048, 2048, 8192, 8192)),
    ),
    "Qwen3.6-35B-A3B-FP8": ((41, 256, 8, 2048, 512), 10, ("self_attn.qkv_proj", 11, 2048, (8192, 512, 512))),
    "Qwen3.8-Flash-Next-FP8": ((49, 512, 10, 2560, 640), 12, ("mlp.shared_expert.down_proj", 49, 640, (2560,))),
    "gpt-oss-120b": ((36, 128, 4, 2880, 2880), 18, ("self_attn.qkv_proj", 36, 2880, (4096, 512, 512))),
    "gpt-oss-20b": ((24, 32, 4, 2880, 2880), 12, ("self_attn.o_proj", 24, 4096, (2880,))),
    "Llama-4-Scout-17B-16E-Instruct": ((48, 16, 1, 5120, 8192), 48, ("self_attn.o_proj", 48, 5120, (5120,))),
    "Qwen3-Next-80B-A3B-Thinking": ((48, 512, 10, 2048, 512), 12, ("linear_attn.out_proj", 36, 4096, (2048,))),
    "Step-3.5-Flash-FP8": (
        (42, 288, 8, 4096, 1280),
        12,
        ("mlp.shared_expert.gate_up_proj", 42, 4096, (1280, 1280)),
    ),
}
# Of models that are refused, what is read of them without the cause.
CHANGED: dict[str, tuple[dict[str, Any], tuple[int, ...], int, tuple[Any, ...]]] = {
    "Kimi-K3": (
        {"hidden_act": "silu", "quantization_config": None},
        (92, 896, 16, 7168, 3072),
        24,
        ("mlp.shared_experts.gate_up_proj", 92, 7168, (6144, 6144)),
    ),
}
# Dense layers of vLLM's model that the warm-up counts otherwise: linear attention other than Qwen's as softmax
# attention, and the n-gram table's projection not at all.
COUNTED_OTHERWISE = {
    "GLM-5.3-Flash": r"self_attn\.",
    "Ling-3.0-flash-fp8": r"self_attn\.",
    "Qwen3.8-Flash-Next-FP8": r"ple\.",
}


def refused_by_warmup(folder: Path) -> str:
    """Returns what `list` prints if it fails, and a warning of an unknown family in any case."""
    printed, error = io.StringIO(), io.StringIO()
    cache = environment("FP8MOE_CACHE_DIR", str(folder / "cache"))
    with cache, redirect_stdout(printed), redirect_stderr(error):
        status = main(["list", "--model", str(folder)])
    return error.getvalue() if status or "not known" in error.getvalue() else ""


def refused_by_engine(folder: Path) -> tuple[str, torch.nn.Module | None]:
    """Returns why vLLM refuses to make a model, and otherwise the model."""
    with environment("FP8MOE_BACKEND", "reference"):
        try:
            return "", build(folder)
        except (UnsupportedError, ValidationError) as error:
            return str(error), None


@pytest.mark.parametrize("name", NAMES)
def test_warmup_and_engine_agree_on_a_model(tmp_path, name):
    pytest.importorskip("vllm")
    folder = describe(tmp_path, described(name))
    refused, (refused_too, model) = refused_by_warmup(folder), refused_by_engine(folder)
    if model is None:
        assert re.search(REFUSED[name], refused)
        assert re.search(REFUSED[name], refused_too)
        return
    assert name not in REFUSED
    assert refused == ""
    check_layers(model, folder, COUNTED_OTHERWISE.get(name, "$"))


def check_layers(model: torch.nn.Module, folder: Path, but: str = "$") -> None:
    expected = without_mtp(read_model(folder))
    assert {*activations_of(model)} == {*expected.activations}
    found = layers_of(model)
    assert found.pop("experts") == expected.experts.layers
    counted = {(layer.name, layer.inputs): layer.layers for layer in expected.dense}
    assert {kind: n for kind, n in found.items() if not re.match(but, kind[0])} == {
        kind: n for kind, n in counted.items() if not re.match(but, kind[0])
    }


@pytest.mark.parametrize("name", ["DeepSeek-V4-Flash", "GLM-5.2-FP8", "Qwen3.5-397B-A17B-FP8"])
def test_layers_for_multi_token_prediction_are_ours(tmp_path, name):
    pytest.importorskip("vllm")
    folder = describe(tmp_path, described(name))
    model, expected = build(folder, draft=True), read_model(folder)
    assert activations_of(model) == {expected.activations[0]: expected.experts.mtp}
    found = layers_of(model)
    assert found.pop("experts") == expected.experts.mtp == 1
    counted = {(layer.name, layer.inputs) for layer in expected.dense if layer.mtp}
    assert {(kind.removeprefix("mtp_block."), inputs) for kind, inputs in found} == counted


def test_the_engine_quantizes_the_cache_of_laguna(tmp_path):
    """vLLM's own method of its checkpoint's scheme, which may have scales."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention import Attention

    model = build(describe(tmp_path, described("Laguna-S-2.1-FP8")))
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert {type(layer.quant_method).__name__ for layer in layers} == {"CompressedTensorsKVCacheMethod"}
    assert {layer.kv_cache_dtype for layer in layers} == {"fp8"}


def test_short_names_of_ling_keep_layers_unquantized(tmp_path):
    config = described("Ling-3.0-flash-fp8")
    config["quantization_config"]["modules_to_not_convert"] = ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]
    model = read_model(describe(tmp_path, config))
    assert {layer.name for layer in model.plain} == {"self_attn.o_proj", "mlp.gate_up_proj"}
    assert model.incomplete_names == ()


@pytest.mark.parametrize(
    "name", sorted({*NAMES} - {"DeepSeek-V4-Flash-NVFP4", "gpt-oss-120b", "gpt-oss-20b"})
)  # patterns
def test_published_lists_of_unquantized_layers_have_full_names(name):
    quantization = described(name).get("quantization_config") or {}
    assert incomplete_names(quantization.get("modules_to_not_convert") or quantization.get("ignore") or ()) == ()


def test_every_model_has_a_family_and_an_outcome():
    names = {path.stem for path in FOLDERS[1].glob("*.json")}
    assert names == {*NAMES} & names == REFUSED.keys() | READ.keys()


def changed(part: Any, changes: dict[str, Any]) -> Any:
    """Returns a description in which these fields, at any depth, have these values."""
    if not isinstance(part, dict):
        return part
    return {key: changes[key] if key in changes else changed(value, changes) for key, value in part.items()}


@pytest.mark.parametrize("name", [*READ, *CHANGED])
def test_shapes_of_models(tmp_path, name):
    changes, experts, growing, dense = CHANGED.get(name) or ({}, *READ[name])
    config = changed(described(name), changes)
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
        config = changed(described(name), changes)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return cache_bytes(read_model(tmp_path), Parallel(), fp8=False)

    assert per_token("Qwen3.5-397B-A17B-FP8") == 15 * 2 * (256 + 256) * 2
    assert per_token("MiMo-V2-Flash") == 9 * 4 * (192 + 128) * 2
    assert per_token("Ling-3.0-flash-fp8") == 7 * (512 + 64) * 2
    assert per_token("Laguna-S-2.1-FP8") == 12 * 8 * 2 * 128
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
