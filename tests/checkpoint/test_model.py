"""What is read from a checkpoint's description, and how hostile ones are refused."""

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints.synthetic import PRESETS, write_checkpoint
from fp8moe_plugin.checkpoint.cache import Indexer
from fp8moe_plugin.checkpoint.headers import HEADER, INDEX_NAME, MAX_SHARDS, weight_files
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.shapes import Dense, Experts, Model, Split
from fp8moe_plugin.checkpoint.unquantized import Unquantized
from fp8moe_plugin.checkpoint.untrusted import opened
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.launches.kernel_sets import model_kernels
from fp8moe_plugin.plan.keys import SM90
from tests import helpers as h

PUBLISHED = Path(__file__).parent / "configs"
V3 = json.loads((PUBLISHED / "DeepSeek-V3.json").read_text())
QWEN = json.loads((PUBLISHED / "Qwen3-30B-A3B-FP8.json").read_text())

# MoE layers (with those that predict further tokens), experts, top-k, hidden, intermediate; heads, key and value
# heads, vocabulary; scales as powers of two, quantized.
MODELS = {
    "DeepSeek-V3": ((59, 256, 8, 7168, 2048), (128, 128, 129280), (False, True)),
    "DeepSeek-V3.2-Exp": ((59, 256, 8, 7168, 2048), (128, 128, 129280), (True, True)),
    "ERNIE-4.5-300B-A47B-PT": ((51, 64, 8, 8192, 3584), (64, 8, 103424), (False, False)),
    "GLM-4.5": ((90, 160, 8, 5120, 1536), (96, 8, 151552), (False, False)),
    "GLM-4.5-Air": ((46, 128, 8, 4096, 1408), (96, 8, 151552), (False, False)),
    "Hunyuan-A13B-Instruct": ((32, 64, 8, 4096, 3072), (32, 8, 128167), (False, False)),
    "Kimi-K2-Instruct": ((60, 384, 8, 7168, 2048), (64, 64, 163840), (False, True)),
    "Mixtral-8x7B-Instruct-v0.1": ((32, 8, 2, 4096, 14336), (32, 8, 32000), (False, False)),
    "Qwen3-235B-A22B-FP8": ((94, 128, 8, 4096, 1536), (64, 4, 151936), (False, True)),
    "Qwen3-30B-A3B-FP8": ((48, 128, 8, 2048, 768), (32, 4, 151936), (False, True)),
    "Qwen3-Coder-480B-A35B-Instruct-FP8": ((62, 160, 8, 6144, 2560), (96, 8, 151936), (False, True)),
}
# Of each kind of dense layer: layers, inputs, outputs.
GLM_45 = {
    "self_attn.qkv_proj": (93, 5120, (12288, 1024, 1024)),
    "self_attn.o_proj": (93, 12288, (5120,)),
    "mlp.gate_up_proj": (3, 5120, (12288, 12288)),
    "mlp.down_proj": (3, 12288, (5120,)),
    "mlp.shared_experts.gate_up_proj": (90, 5120, (1536, 1536)),
    "mlp.shared_experts.down_proj": (90, 1536, (5120,)),
}
DEEPSEEK_V3 = {
    "self_attn.fused_qkv_a_proj": (62, 7168, (1536, 576)),
    "self_attn.q_b_proj": (62, 1536, (24576,)),
    "self_attn.kv_b_proj": (62, 512, (32768,)),
    "self_attn.o_proj": (62, 16384, (7168,)),
    "mlp.gate_up_proj": (3, 7168, (18432, 18432)),
    "mlp.down_proj": (3, 18432, (7168,)),
    "mlp.shared_experts.gate_up_proj": (59, 7168, (2048, 2048)),
    "mlp.shared_experts.down_proj": (59, 2048, (7168,)),
}
DENSE = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3.2-Exp": DEEPSEEK_V3 | {"self_attn.indexer.wq_b": (62, 1536, (8192,))},
    "ERNIE-4.5-300B-A47B-PT": {
        "self_attn.qkv_proj": (54, 8192, (8192, 1024, 1024)),
        "self_attn.o_proj": (54, 8192, (8192,)),
        "mlp.gate_up_proj": (3, 8192, (28672, 28672)),
        "mlp.down_proj": (3, 28672, (8192,)),
    },
    "GLM-4.5": GLM_45,
    "GLM-4.5-Air": {
        "self_attn.qkv_proj": (47, 4096, (12288, 1024, 1024)),
        "self_attn.o_proj": (47, 12288, (4096,)),
        "mlp.gate_up_proj": (1, 4096, (10944, 10944)),
        "mlp.down_proj": (1, 10944, (4096,)),
        "mlp.shared_experts.gate_up_proj": (46, 4096, (1408, 1408)),
        "mlp.shared_experts.down_proj": (46, 1408, (4096,)),
    },
    "Hunyuan-A13B-Instruct": {
        "self_attn.qkv_proj": (32, 4096, (4096, 1024, 1024)),
        "self_attn.o_proj": (32, 4096, (4096,)),
        "mlp.shared_mlp.gate_up_proj": (32, 4096, (3072, 3072)),
        "mlp.shared_mlp.down_proj": (32, 3072, (4096,)),
    },
    "Kimi-K2-Instruct": {
        "self_attn.fused_qkv_a_proj": (61, 7168, (1536, 576)),
        "self_attn.q_b_proj": (61, 1536, (12288,)),
        "self_attn.kv_b_proj": (61, 512, (16384,)),
        "self_attn.o_proj": (61, 8192, (7168,)),
        "mlp.gate_up_proj": (1, 7168, (18432, 18432)),
        "mlp.down_proj": (1, 18432, (7168,)),
        "mlp.shared_experts.gate_up_proj": (60, 7168, (2048, 2048)),
        "mlp.shared_experts.down_proj": (60, 2048, (7168,)),
    },
    "Mixtral-8x7B-Instruct-v0.1": {
        "self_attn.qkv_proj": (32, 4096, (4096, 1024, 1024)),
        "self_attn.o_proj": (32, 4096, (4096,)),
    },
    "Qwen3-235B-A22B-FP8": {
        "self_attn.qkv_proj": (94, 4096, (8192, 512, 512)),
        "self_attn.o_proj": (94, 8192, (4096,)),
    },
    "Qwen3-30B-A3B-FP8": {
        "self_attn.qkv_proj": (48, 2048, (4096, 512, 512)),
        "self_attn.o_proj": (48, 4096, (2048,)),
    },
    "Qwen3-Coder-480B-A35B-Instruct-FP8": {
        "self_attn.qkv_proj": (62, 6144, (12288, 1024, 1024)),
        "self_attn.o_proj": (62, 12288, (6144,)),
    },
}
REPLICATED = ("self_attn.fused_qkv_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wq_b")


def describe(folder: Path, config: Any, **changes: Any) -> Path:
    """Returns a checkpoint that consists only of its description."""
    (folder / "config.json").write_text(json.dumps(config | changes if changes else config))
    return folder


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def split_of(name: str) -> Split:
    if name in REPLICATED:
        return Split.NONE
    return Split.INPUTS if name.endswith(("o_proj", "down_proj")) else Split.OUTPUTS


def refusal(folder: Path) -> str:
    """Returns the message of the `CheckpointError` that reading must raise."""
    with pytest.raises(CheckpointError) as raised:
        read_model(folder)
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) < 1000
    return message


@pytest.mark.parametrize("name", MODELS)
def test_published_models(tmp_path, name):
    config = json.loads((PUBLISHED / f"{name}.json").read_text())
    experts, sizes, scales = MODELS[name]
    dense = tuple(
        Dense(kind, *found, split_of(kind), smallest=128 if kind == "self_attn.qkv_proj" else 0)
        for kind, found in DENSE[name].items()
    )
    model = read_model(describe(tmp_path, config))
    assert {layer.name: layer for layer in model.dense} == {layer.name: layer for layer in dense}
    indexer = Indexer(64, 128) if name == "DeepSeek-V3.2-Exp" else None
    expected = Model(config["architectures"][0], Experts(*experts), model.dense, *sizes, *scales, indexer)
    assert model == replace(expected, dense_bias=name.startswith("GLM"))


@pytest.mark.parametrize(
    ("fields", "biased"), [({}, True), ({"qkv_bias": False}, False), ({"qkv_bias": True}, True)], ids=str
)
def test_a_bias_of_dense_layers(tmp_path, fields, biased):
    write_checkpoint(tmp_path, PRESETS["qwen3_moe", "tiny"], fp8=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "qwen2_moe"}
    config.pop("attention_bias", None)
    path.write_text(json.dumps(config | fields))
    assert read_model(tmp_path).dense_bias is biased


def test_every_published_config_is_tested():
    assert {path.stem for path in PUBLISHED.iterdir()} == set(MODELS) == set(DENSE)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize(
    ("family", "index_heads"), [("deepseek_v3", 0), ("deepseek_v3", 32), ("qwen3_moe", 0)], ids=["v3", "v3.2", "qwen3"]
)
def test_whole_checkpoints(tmp_path, family, index_heads, fp8):
    shape = replace(PRESETS[family, "tiny"], index_heads=index_heads)
    write_checkpoint(tmp_path, shape, fp8=fp8)
    model = read_model(tmp_path)
    layers = shape.moe_layers + shape.mtp_layers
    assert model.experts == Experts(layers, shape.experts, shape.topk, shape.hidden, shape.moe_intermediate)
    assert (model.heads, model.vocab, model.quantized) == (shape.heads, shape.vocab, fp8)
    assert model.kv_heads == (shape.kv_heads or shape.heads)
    assert model.indexer == (Indexer(32, 128) if index_heads else None)


def test_the_module_loads_neither_torch_nor_an_engine():
    code = "import sys, fp8moe_plugin.checkpoint.model; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_a_model_without_rank_reduction_of_queries(tmp_path):
    dense = {layer.name: layer for layer in read_model(describe(tmp_path, V3, q_lora_rank=None)).dense}
    assert dense["self_attn.kv_a_proj_with_mqa"] == Dense("self_attn.kv_a_proj_with_mqa", 62, 7168, (576,), Split.NONE)
    assert dense["self_attn.q_proj"] == Dense("self_attn.q_proj", 62, 7168, (24576,), Split.OUTPUTS)


def test_the_size_of_heads_and_their_number_have_defaults(tmp_path):
    config = without(QWEN, "head_dim", "num_key_value_heads")
    model = read_model(describe(tmp_path, config))
    assert model.kv_heads == 32
    assert model.dense[0].outputs == (2048, 2048, 2048)
    assert model.dense[0].smallest == 64


def test_the_text_part_of_a_model_that_also_sees(tmp_path):
    whole = {"architectures": ["SeesForConditionalGeneration"], "text_config": V3}
    model = read_model(describe(tmp_path, whole))
    assert model.architecture == "SeesForConditionalGeneration"
    assert (model.experts.experts, model.quantized) == (256, True)
    text = without(V3, "quantization_config")
    whole = {"architectures": ["Sees"], "text_config": text, "quantization_config": V3["quantization_config"]}
    assert read_model(describe(tmp_path, whole)).quantized


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, 48),
        ({"decoder_sparse_step": 2}, 24),
        ({"mlp_only_layers": [0, 1, 99]}, 46),
        ({"moe_layer_freq": 3}, 16),
        ({"moe_layer_freq": [0, 1, 1] + [0] * 45}, 2),
        ({"first_k_dense_replace": 47}, 1),
        ({"num_nextn_predict_layers": 2}, 50),
        ({"moe_layer_end_index": -1, "num_nextn_predict_layers": 1}, 48),
        ({"moe_layer_start_index": 4, "moe_layer_end_index": 7, "moe_layer_interval": 2}, 2),
    ],
)
def test_which_layers_have_experts(tmp_path, change, layers):
    model = read_model(describe(tmp_path, QWEN, **change))
    assert model.experts.layers == layers
    plain = sum(layer.layers for layer in model.dense if layer.name == "mlp.gate_up_proj")
    assert plain == 48 + change.get("num_nextn_predict_layers", 0) - layers


def unquantized(*names: str) -> dict[str, Any]:
    return {"quantization_config": V3["quantization_config"] | {"modules_to_not_convert": list(names)}}


def test_layers_kept_unquantized_are_left_out(tmp_path):
    names = [f"model.layers.{i}.self_attn.{part}" for i in range(62) for part in ("kv_b_proj", "o_proj")]
    names += [f"model.layers.{i}.mlp.{part}_proj" for i in range(2) for part in ("gate", "up")]
    names += ["model.layers.5.mlp.experts.0.gate_proj", "model.layers.6.mlp.shared_experts.down_proj", "lm_head"]
    model = read_model(describe(tmp_path, V3, **unquantized(*names)))
    layers = {layer.name: layer.layers for layer in model.dense}
    assert "self_attn.o_proj" not in layers
    assert "self_attn.kv_b_proj" not in layers
    assert layers["mlp.gate_up_proj"] == 1
    assert layers["mlp.down_proj"] == 3
    assert layers["mlp.shared_experts.down_proj"] == 58
    assert layers["mlp.shared_experts.gate_up_proj"] == 59
    assert model.experts.layers == 58


@pytest.mark.parametrize(
    "name",
    [
        *("o_proj", "self_attn.o_proj", "self_attn", "mlp", "mlp.experts", "experts", "layers.0.mlp.down_proj"),
        *("model.layers.0.self_attn", "model.layers.0.mlp", "model.language_model.layers.3.mlp.shared_experts"),
        *("model.layers.0", "layers.3", "model.layers.0.", "model.layers.0.self_attn.", "*.self_attn.*", "*q_proj"),
        *("model.layers.*.mlp.experts", "model.layers.0.self_attn.o_proj.weight", "linear_attn", "in_proj_qkv"),
    ],
)
def test_names_without_effect_are_found(tmp_path, name):
    sound = "lm_head", "model.layers.0.mlp.gate", "mtp.layers.0.mlp", "visual", "gate", "re:.*foo", "proj", "norm"
    sound += "model.layers.0.self_attn.o_proj", "model.layers.5.mlp.experts.3.up_proj", "mtp.fc"
    sound += "model.layers.5.mlp.experts.*", "model.layers.0.linear_attn.in_proj_ba", "model.layers.61.eh_proj"
    model = read_model(describe(tmp_path, V3, **unquantized(*sound, name)))
    assert model.incomplete_names == (name,)
    assert model.experts.layers == 58


def test_experts_may_be_unquantized(tmp_path):
    whole = read_model(describe(tmp_path, V3))
    some = read_model(
        describe(tmp_path, V3, **unquantized("model.layers.5.mlp.experts", "model.layers.61.mlp.experts"))
    )
    assert (some.experts.layers, some.experts.mtp) == (57, 0)
    assert some.plain_experts == replace(whole.experts, layers=2)
    assert some.plain_experts.mtp == 1
    none = read_model(describe(tmp_path, V3, **unquantized(r"re:.*mlp\.experts"), swiglu_limit=7))
    assert none.experts == replace(whole.experts, layers=0)
    assert none.plain_experts == whole.experts
    assert none.dense == whole.dense
    kernels = model_kernels(none)
    assert kernels.keys() == set(h.linear_kernels(none.ue8m0))
    for target in ("sm_89", SM90):
        assert model_kernels(none, target).keys() < model_kernels(whole, target).keys()


NAMES = (
    "model.layers.1.mlp.experts",
    "model.layers.1.mlp.experts.3.up_proj",
    "model.layers.1.mlp.shared_experts",
    "model.layers.1.mlp.shared_experts.down_proj",
    "model.layers.1.mlp.shared_experts.gate_proj",
    "model.layers.1.mlp.shared_experts.gate_up_proj",
    "model.layers.1.mlp.gate_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.1.self_attn",
    "model.layers.1.self_attn.q_b_proj",
    "model.layers.1.self_attn.qkv_proj",
    "q_b_proj",
)
KINDS = (
    "mlp.experts",
    "mlp.gate_up_proj",
    "mlp.down_proj",
    "mlp.shared_experts.gate_up_proj",
    "mlp.shared_experts.down_proj",
    "self_attn.q_b_proj",
    "self_attn.qkv_proj",
)


@pytest.mark.parametrize("suffixes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_unquantized_layers_are_those_of_vllm(kind, suffixes):
    """For every pair of names, what vLLM skips is skipped, and what it refuses is refused."""
    quant_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.quant_utils")
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    mode = {"match_mode": "suffix"} if suffixes else {}

    def outcome(ask, *args, **options):
        try:
            return ask(*args, **options)
        except ValueError:
            return "refused"

    for names in [[a, b] for a in NAMES for b in (*NAMES, a.replace("gate_proj", "up_proj"))]:
        theirs = outcome(quant_utils.is_layer_skipped, f"model.layers.1.{kind}", names, fused, **mode)
        assert outcome(Unquantized(names, suffixes).has, 1, kind) == theirs, names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"n_routed_experts": None},
            "does not describe a mixture-of-experts model.*Serve it without --quantization fp8moe",
        ),
        ({"n_routed_experts": 0, "text_config": {"num_experts": 0}}, "does not describe a mixture-of-experts model"),
        ({"first_k_dense_replace": 62}, "has no layer with experts"),
        (unquantized("re:.*"), "keeps all its layers unquantized"),
        (unquantized("model.layers.0.mlp.up_proj"), "a part of layer 0's mlp.gate_up_proj unquantized"),
        ({"moe_intermediate_size": [2048, 1024]}, r"differ in their intermediate size: \[1024, 2048\]"),
        ({"n_routed_experts": [256, 64]}, "differ in their number of experts"),
        ({"quantization_config": {}}, "quant_method is None, but only 'fp8' is supported"),
        ({"quantization_config": V3["quantization_config"] | {"weight_block_size": [1, 128]}}, "weight_block_size is"),
        ({"quantization_config": V3["quantization_config"] | {"ignored_layers": "all"}}, "ignored_layers is 'all'"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quantized by ModelOpt to None"),
        ({"quantization_config": {"quantization": {"quant_algo": "FP8_PB_WO"}}}, "by ModelOpt to 'FP8_PB_WO'"),
        ({"quantization_config": V3["quantization_config"] | {"moe_quant_algo": "nvfp4"}}, "by ModelOpt to 'nvfp4'"),
        ({"quantization_config": V3["quantization_config"] | {"moe_quant_algo": "INT4"}}, "by ModelOpt to 'INT4'"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "by ModelOpt to 'NVFP4'"),
        ({"expert_dtype": "nvfp4"}, r"experts are 'nvfp4' \(expert_dtype\), but the kernels need block FP8, or MXFP4"),
        ({"expert_dtype": "int4"}, r"experts are 'int4' \(expert_dtype\), but the kernels need block FP8, or MXFP4"),
        (
            {"model_type": "gpt_oss"},
            r"experts are in one tensor in which gate and up rows alternate \(model_type 'gpt_oss'\)",
        ),
    ],
)
def test_sound_checkpoints_that_are_not_served(tmp_path, change, message):
    with pytest.raises(UnsupportedError, match=message):
        read_model(describe(tmp_path, V3, **change))


def test_an_unquantized_checkpoint_may_name_the_dtype_of_its_experts(tmp_path):
    plain = describe(tmp_path, V3, quantization_config=None, expert_dtype="bf16")
    assert not read_model(plain).quantized
    with pytest.raises(UnsupportedError, match=r"experts are 'nvfp4' \(expert_dtype\)"):
        read_model(describe(tmp_path, V3, quantization_config=None, expert_dtype="nvfp4"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size is 0: Input should be greater than or equal to 1"),
        ({"hidden_size": -7168}, "hidden_size is -7168"),
        ({"hidden_size": 2**31}, "hidden_size is 2147483648: Input should be less than or equal to 2147483647"),
        ({"hidden_size": True}, "hidden_size is True: Input should be a valid integer"),
        ({"hidden_size": 7168.0}, "hidden_size is 7168.0: Input should be a valid integer"),
        ({"hidden_size": "7168"}, "hidden_size is '7168'"),
        ({"hidden_size": [7168]}, r"hidden_size is \[7168\]"),
        ({"hidden_size": 10**4000}, r"hidden_size is 1000.*\.\.\.0+: Input should be"),
        ({"n_routed_experts": True}, "n_routed_experts.* is True"),
        ({"num_experts_per_tok": 257}, "routes a token to 257 of 256 experts"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ({"moe_intermediate_size": []}, r"moe_intermediate_size is \[\]: Input should be"),
        ({"moe_intermediate_size": [2048] * 5000}, r"moe_intermediate_size is \[2048, .*\.\.\.\]: Input should be"),
        ({"moe_intermediate_size": 2**31 - 1}, "more than 1099511627776 weights"),
        ({"n_routed_experts": 2**14 + 1}, "has 16385 experts, more than 16384"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"num_attention_heads": 2**31 - 1}, r"gives self_attn.q_b_proj an invalid size, 1536 x \(412316860224,\)"),
        ({"v_head_dim": 0}, "gives self_attn.o_proj an invalid size, 0 x"),
        ({"kv_lora_rank": None, "num_key_value_heads": 3}, "has 3 key/value heads for 128 heads"),
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": None, "hidden_size": None}, "architectures, hidden_size are missing"),
        ({"architectures": []}, "architectures is .*at least 1 item"),
        ({"architectures": ["\x1b]0;owned\x07"]}, r"architectures is '\\x1b\]0;owned\\x07'"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers is -1"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8': Input should be a valid dictionary"),
    ],
)
def test_fields_out_of_bounds(tmp_path, change, message):
    describe(tmp_path, V3, **change)
    with pytest.raises(CheckpointError, match=message):
        read_model(tmp_path)
    refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not valid JSON: Expecting value"),
        (b"{", "is not valid JSON: Expecting property name"),
        (b"[]", r"contains \[\] instead of a JSON object"),
        (b'"n_routed_experts"', "instead of a JSON object"),
        (b'{"n_routed_experts": 1, "n_routed_experts": 2}', "the key 'n_routed_experts' more than once"),
        (b'{"a": {"\\u001b[2J": 1, "\\u001b[2J": 2}}', r"the key '\\x1b\[2J' more than once"),
        (b'{"hidden_size": NaN}', "is NaN, which is not a JSON number"),
        (b'{"hidden_size": -Infinity}', "is -Infinity, which is not a JSON number"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"a": "\xff"}', "is not UTF-8 text: byte 7 is not valid"),
        (b'{"a": "\xed\xa0\x80"}', "is not UTF-8 text"),
        (json.dumps(V3).encode("utf-16"), "is not UTF-8 text"),
        (b"[" * 9000 + b"]" * 9000, "nests lists or objects too deeply"),
        (b'{"a":' * 9000 + b"1" + b"}" * 9000, "nests lists or objects too deeply"),
        (b"[" * 180_001, "more than 180000 lists and objects"),
        (b'{"a": [' + b"0," * 400_001, "more than 400000 values"),
        (b" " * (16 << 20) + b"{}", "more than 16777216 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_texts_that_are_no_config(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=message):
        read_model(tmp_path)
    refusal(tmp_path)


LONG = "x" * 10**6, ["y" * 100, 7] * 1000, [[["y" * 100] * 6] * 6] * 6


@pytest.mark.parametrize("hostile", ["\x1b[31m", "\u202e", "\ud800", "\r", *LONG])
def test_untrusted_text_is_shown_quoted_and_cut(tmp_path, hostile):
    for key in ("quant_method", "activation_scheme", "weight_block_size", "fmt", "ignored_layers"):
        quantization = V3["quantization_config"] | {key: hostile}
        with pytest.raises(UnsupportedError) as raised:
            read_model(describe(tmp_path, V3, quantization_config=quantization))
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 1000


def test_a_missing_folder_or_config_is_named(tmp_path):
    assert "config.json' is missing. Give the folder of a downloaded checkpoint" in refusal(tmp_path)
    assert "absent' is missing" in refusal(tmp_path / "absent")
    assert "is not a valid folder name" in refusal(tmp_path / "nul\0")
    (tmp_path / "file").touch()
    assert "cannot be read: Not a directory" in refusal(tmp_path / "file")


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME, "model.safetensors"])
def test_only_regular_files_are_read(tmp_path, name):
    describe(tmp_path, V3)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert f"{name}' is not a regular file" in refusal(tmp_path)
    path.unlink()
    path.mkdir()
    assert f"{name}' cannot be read: Is a directory" in refusal(tmp_path)
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert f"{name}' links to '/dev/zero', outside of the checkpoint's folder" in refusal(tmp_path)
    path.unlink()
    path.symlink_to(name)
    assert f"{name}' cannot be read: Too many levels of symbolic links" in refusal(tmp_path)


Tensors = dict[str, tuple[str, list[int]]]
BYTES = {"F4": 0.5, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4}
W13 = "model.layers.3.mlp.experts.0.gate_proj.weight"
W2 = "model.layers.3.mlp.experts.255.down_proj.weight"
SOUND: Tensors = {
    W13: ("F8_E4M3", [2048, 7168]),
    f"{W13}_scale_inv": ("F32", [16, 56]),
    W2: ("F8_E4M3", [7168, 2048]),
    f"{W2}_scale_inv": ("BF16", [56, 16]),
    "model.norm.weight": ("BF16", [7168]),
}


def header(tensors: Tensors) -> dict[str, Any]:
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + int(BYTES[dtype] * math.prod(shape))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return entries


def write_shard(path: Path, entries: Any, data: int | None = None) -> None:
    """A safetensors file with a hole for its weights."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    if data is None:
        data = max((entry["data_offsets"][1] for key, entry in entries.items() if key != "__metadata__"), default=0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + data)


def test_what_is_not_refused(tmp_path):
    expected = read_model(describe(tmp_path, V3))
    unclamped = {"swiglu_limit": 0, "swiglu_limits": [0, None], "expert_dtype": "fp8"}
    quantization = V3["quantization_config"] | {"quant_method": "deepseek_v4_fp8", "quant_algo": "FP8"}
    layers = {f"model.layers.{i}": {"quant_algo": "FP8", "group_size": 1} for i in range(80_000)}
    for change in ({"fmt": None, "quantized_layers": layers}, {"fmt": "E4M3"}):
        found = quantization | change
        assert read_model(describe(tmp_path, V3, quantization_config=found, **unclamped)) == expected


@pytest.mark.parametrize("field", ["hidden_act", "hidden_activation", "mlp_hidden_act"])
def test_another_activation_than_silu(tmp_path, field):
    for config in (V3, without(V3, "hidden_act")):
        wanted = rf"{field} is 'gelu', but the kernels only compute kinds of SwiGLU\. Serve it without --quantization"
        with pytest.raises(UnsupportedError, match=wanted):
            read_model(describe(tmp_path, config, **{field: "gelu"}))
    if field != "mlp_hidden_act":
        assert f"{field} is 5: Input should be a valid string" in refusal(describe(tmp_path, V3, **{field: 5}))


@pytest.mark.parametrize("field", ["hidden_act", "hidden_activation"])
def test_silu_is_the_activation_that_a_config_need_not_name(tmp_path, field):
    config = without(V3, "hidden_act")
    assert read_model(describe(tmp_path, config)) == read_model(describe(tmp_path, config, **{field: "silu"}))
    assert read_model(describe(tmp_path, config)) == read_model(describe(tmp_path, config, **{field: None}))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F8_E8M0"])
def test_sound_headers(tmp_path, dtype):
    tensors = SOUND | {f"{W13}_scale_inv": (dtype, [16, 56])}
    write_shard(tmp_path / "model.safetensors", header(tensors) | {"__metadata__": {"format": "pt"}})
    assert read_model(describe(tmp_path, V3)).quantized


@pytest.mark.parametrize(
    ("name", "found", "wanted"),
    [
        (W13, ("F8_E4M3", [7168, 2048]), r"is F8_E4M3 \[7168, 2048\], but config.json requires F8_E4M3 \[2048, 7168\]"),
        (W13, ("BF16", [2048, 7168]), "is BF16 .* config.json requires F8_E4M3 "),
        (W13.replace("gate_proj", "w2"), ("F8_E4M3", [2048, 7168]), r"requires F8_E4M3 \[7168, 2048\]"),
        (f"{W13}_scale_inv", ("F32", [2048, 56]), r"config.json requires F32 or BF16 .*\[16, 56\]"),
        (f"{W13}_scale_inv", ("F8_E4M3", [16, 56]), "is F8_E4M3 .* config.json requires F32 or BF16"),
        (W2.replace("255", "256"), ("F8_E4M3", [7168, 2048]), "experts.256.* of experts 0 to 255"),
    ],
)
def test_experts_that_contradict_the_config(tmp_path, name, found, wanted):
    write_shard(tmp_path / "model.safetensors", header(SOUND | {name: found}))
    with pytest.raises(CheckpointError, match=wanted):
        read_model(describe(tmp_path, V3))


def test_the_experts_of_unquantized_layers_may_have_any_dtype(tmp_path):
    write_shard(tmp_path / "model.safetensors", header({W13: ("BF16", [2048, 7168])}))
    read_model(describe(tmp_path, without(V3, "quantization_config")))
    read_model(describe(tmp_path, V3, **unquantized("model.layers.3.mlp.experts")))
    write_shard(tmp_path / "model.safetensors", header({W13: ("BF16", [2048, 1024])}))
    with pytest.raises(CheckpointError, match=r"config\.json requires any dtype"):
        read_model(describe(tmp_path, without(V3, "quantization_config")))


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("entries", "data", "message"),
    [
        ({"a": ONE}, 3, "holds 3 bytes of weights, but its header describes 4"),
        ({"a": ONE}, 5, "holds 5 bytes of weights, but its header describes 4"),
        ({"a": ONE | {"data_offsets": [-4, 0]}}, 4, "of tensor 'a' do not match"),
        ({"a": ONE | {"data_offsets": [4, 8]}}, 8, "a gap at byte 0"),
        ({"a": ONE, "b": ONE}, 4, "overlap"),
        ({"a": ONE | {"data_offsets": [0, 8]}}, 8, "do not match"),
        ({"a": ONE | {"data_offsets": [0.0, 4]}}, 4, "do not match"),
        ({"a": ONE | {"data_offsets": [0, 4, 4]}}, 4, "do not match"),
        ({"a": ONE | {"data_offsets": None}}, 4, "do not match"),
        ({"a": ONE | {"data_offsets": [False, 4]}}, 4, "do not match"),
        ({"a": ONE | {"shape": [True]}}, 4, "do not match"),
        ({"a": ONE | {"shape": [1.0]}}, 4, "do not match"),
        ({"a": ONE | {"shape": [-1, -1]}}, 4, "do not match"),
        ({"a": ONE | {"shape": [2**31] * 3}}, 4, "do not match"),
        ({"a": ONE | {"shape": [1] * 9}}, 4, "do not match"),
        ({"a": ONE | {"shape": {}}}, 4, "do not match"),
        ({"a": ONE | {"shape": ""}}, 4, "do not match"),
        ({"a": ONE | {"dtype": "F31"}}, 4, "do not match"),
        ({"a": ONE | {"dtype": "F4"}}, 4, "do not match"),
        ({"a": ONE | {"dtype": "F4", "data_offsets": [0, 0]}}, 0, "do not match"),
        ({"a": ONE | {"dtype": ["F32"]}}, 4, "do not match"),
        ({"a": {}}, 0, "do not match: {}"),
        ({"a": []}, 0, r"do not match: \[\]"),
        ({"\x1b[2J": None}, 0, r"of tensor '\\x1b\[2J' do not match: None"),
        ({"__metadata__": []}, 0, r"has invalid __metadata__: \[\]"),
        ({"__metadata__": {str(i): "" for i in range(101)}}, 0, "has invalid __metadata__"),
        (b"[]", 0, r"the header of .* contains \[\] instead"),
        (b'{"a": 1, "a": 2}', 0, "the key 'a' more than once"),
        (b'{"a": "\xff"}', 0, "is not UTF-8 text"),
        (b'{"a":' + b"[" * 100_000, 0, "nests lists or objects too deeply"),
        (b'{"a":' + b"[" * 180_000, 0, "more than 180000 lists and objects"),
        (b'{"a": [' + b"0," * 400_001, 0, "more than 400000 values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_headers(tmp_path, entries, data, message):
    write_shard(tmp_path / "model.safetensors", entries, data)
    describe(tmp_path, V3)
    with pytest.raises(CheckpointError, match=message):
        read_model(tmp_path)
    refusal(tmp_path)


def test_the_length_of_a_header(tmp_path):
    describe(tmp_path, V3)
    path = tmp_path / "model.safetensors"
    for length, message in [
        (100, "ends within its header: it has only 10 of 108 bytes"),
        (HEADER.size + 1, f"has a header of {HEADER.size + 1} bytes, more than"),
        (2**64 - 1, "has a header of 18446744073709551615 bytes, more than"),
    ]:
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        assert message in refusal(tmp_path)
    path.write_bytes(b"")
    assert "ends within its header: it has only 0 of 8 bytes" in refusal(tmp_path)


def test_headers_are_limited_together(tmp_path):
    describe(tmp_path, V3)
    names = [f"a{i}" for i in range(55_000)]
    entries = header({name: ("F32", [1]) for name in names})
    for i in range(3):
        write_shard(tmp_path / f"{i}.safetensors", entries)
    assert "the headers of all files" in refusal(tmp_path)


def write_index(folder: Path, *names: Any) -> None:
    weights = {f"w{i}": name for i, name in enumerate(names)}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


@pytest.mark.parametrize(
    "name",
    [
        "/etc/x.safetensors",
        "../x.safetensors",
        "a/x.safetensors",
        "x..safetensors",
        "C:x.bin",
        "x.safetensors/",
        "",
        ".",
        "..",
    ],
)
def test_shards_are_plain_names_of_files(tmp_path, name):
    write_index(describe(tmp_path, V3), name)
    assert "is not a plain .safetensors file name" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["a\\x.safetensors", "\0.safetensors", "\x1bx.safetensors", "é.safetensors", "\n"])
def test_an_index_has_no_characters_that_names_do_not_need(tmp_path, name):
    write_index(describe(tmp_path, V3), name)
    assert "contains a backslash or non-ASCII characters" in refusal(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": name}}, ensure_ascii=False))
    assert ("contains a backslash" in refusal(tmp_path)) or ("is not valid JSON" in refusal(tmp_path))


def test_names_of_files_without_an_index_are_checked_too(tmp_path):
    (describe(tmp_path, V3) / "\x1b[2J.safetensors").touch()
    assert r"'\x1b[2J.safetensors' is not a plain" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", "has no weight_map"),
        (b'{"weight_map": []}', "has no weight_map"),
        (b'{"weight_map": {"a": 1}}', "has no weight_map"),
        (b'{"weight_map": {"a": ["b"]}}', "has no weight_map"),
        (b'{"weight_map": {"a": "b", "a": "c"}}', "the key 'a' more than once"),
        (b"[],[]," * 40, "more than 64 lists and objects"),
        (b'{"weight_map": [' + b"0," * 200_001, "more than 200000 values"),
        (b" " * (32 << 20) + b"{}", "more than 33554432 bytes"),
    ],
)
def test_texts_that_are_no_index(tmp_path, text, message):
    (describe(tmp_path, V3) / INDEX_NAME).write_bytes(text)
    assert message in refusal(tmp_path)


def test_too_many_shards(tmp_path):
    write_index(describe(tmp_path, V3), *(f"{i}.safetensors" for i in range(MAX_SHARDS + 1)))
    assert f"has {MAX_SHARDS + 1} weight files, more than {MAX_SHARDS}" in refusal(tmp_path)


def test_a_checkpoint_is_there_whole_or_described_alone(tmp_path):
    names = [f"{i}.safetensors" for i in range(5)]
    write_index(describe(tmp_path, V3), *names)
    assert read_model(tmp_path).quantized
    write_shard(tmp_path / names[2], header(SOUND))
    assert (
        "lacks 4 of its 5 weight files: '0.safetensors', '1.safetensors', '3.safetensors', .... Complete the download"
    ) in refusal(tmp_path)


def hub_cache(root: Path, *files: str) -> Path:
    """Returns a snapshot as huggingface_hub lays it out: links to blobs."""
    repo = root / "hub" / "models--deepseek-ai--DeepSeek-V3"
    snapshot = repo / "snapshots" / "4c1f24cc10a2a1894304c7ab52edd9710c047571"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for i, name in enumerate(files):
        (snapshot / name).symlink_to(f"../../blobs/{i:040x}")
    return snapshot


def test_the_cache_of_hugging_face(tmp_path):
    snapshot = hub_cache(tmp_path, "config.json", INDEX_NAME, "model-00001.safetensors")
    describe(snapshot, V3)
    write_index(snapshot, "model-00001.safetensors")
    write_shard(snapshot / "model-00001.safetensors", header(SOUND))
    assert (snapshot / "config.json").is_symlink()
    assert read_model(snapshot).quantized
    (tmp_path / "link").symlink_to(snapshot)
    assert read_model(tmp_path / "link").quantized


def test_hub_snapshot_checks_only_weights_that_exist(tmp_path):
    names = [f"model-0000{i}.safetensors" for i in (1, 2, 3)]
    snapshot = hub_cache(tmp_path, "config.json", INDEX_NAME, names[1])
    describe(snapshot, V3)
    (snapshot / INDEX_NAME).write_text(json.dumps({"weight_map": dict(zip([W13, W2, "w"], names, strict=True))}))
    write_shard(snapshot / names[1], header({W2: SOUND[W2]}))
    assert read_model(snapshot).quantized
    (tmp_path / "link").symlink_to(snapshot)
    assert read_model(tmp_path / "link").quantized
    with pytest.raises(CheckpointError, match="lacks 2 of its 3 weight files: 'model-00001"):
        weight_files(snapshot)
    write_shard(snapshot / names[1], header({W2: ("F8_E4M3", [2048, 7168])}))
    assert "config.json requires" in refusal(snapshot)


def test_blobs_that_models_of_the_cache_share(tmp_path):
    """Since version 2, huggingface_hub links equal files of all models to one."""
    snapshot = describe(hub_cache(tmp_path, "model.safetensors"), V3)
    digest = "0123456789abcdef" * 4
    shared = tmp_path / "hub" / "blobs" / digest[:2]
    shared.mkdir(parents=True)
    write_shard(shared / digest, header(SOUND))
    blob = snapshot.parents[1] / "blobs" / f"{0:040x}"
    blob.symlink_to(f"../../blobs/{digest[:2]}/{digest}")
    assert read_model(snapshot).quantized
    for name in (digest[:-1], digest[::-1], f"{digest}.refs"):
        write_shard(shared / name, header(SOUND))
        blob.unlink()
        blob.symlink_to(f"../../blobs/{digest[:2]}/{name}")
        assert "outside of the checkpoint's folder" in refusal(snapshot)


@pytest.mark.parametrize("step", ["realpath", "open", "readlink", "fstat"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_file_that_is_exchanged_for_a_link_while_it_is_opened(tmp_path, monkeypatch, step, call):
    """A file may be replaced after any step of opening: only the file that was checked is ever read."""
    path, secret = tmp_path / "checkpoint" / "config.json", tmp_path / "secret"
    path.parent.mkdir()
    path.write_bytes(b"public")
    secret.write_bytes(b"secret")
    module = os.path if step == "realpath" else os
    ask, calls = getattr(module, step), []

    def exchanged(*args, **kwargs):
        found = ask(*args, **kwargs)
        calls.append(args)
        if len(calls) == call:
            path.unlink()
            path.symlink_to(secret)
        return found

    monkeypatch.setattr(module, step, exchanged)
    found = b"public"
    with suppress(CheckpointError), opened(path) as file:
        found = file.read()
    assert found == b"public"
    assert calls


def test_links_within_the_folder(tmp_path):
    describe(tmp_path, V3)
    write_shard(tmp_path / "weights", header(SOUND))
    (tmp_path / "model.safetensors").symlink_to("weights")
    assert read_model(tmp_path).quantized


@pytest.mark.parametrize("target", ["../../blobs/a/b", "../../refs", "../../../blobs/a", "/etc/hostname", "../b"])
def test_links_out_of_a_checkpoint(tmp_path, target):
    snapshot = describe(hub_cache(tmp_path), V3)
    path = snapshot / "model.safetensors"
    path.symlink_to(target)
    real = snapshot / target
    if not real.exists():
        real.parent.mkdir(parents=True, exist_ok=True)
        write_shard(real, header(SOUND))
    assert "outside of the checkpoint's folder" in refusal(snapshot)


def test_blobs_beside_another_folder_are_not_the_cache_of_hugging_face(tmp_path):
    folder = tmp_path / "not-snapshots" / "x"
    folder.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    write_shard(tmp_path / "blobs" / "a", header(SOUND))
    (describe(folder, V3) / "model.safetensors").symlink_to("../../blobs/a")
    assert "outside of the checkpoint's folder" in refusal(folder)
