"""How a `quantization_config` is parsed: FP8 with one scale for each row or weight, and damaged descriptions."""

import copy
from typing import Any

import pytest

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.patterns import matches
from fp8moe_plugin.formats.spec import QuantSpec, parse_quantization, recoded
from tests.checkpoint.fuzzer import VALUES, nodes
from tests.compressed import BY_ROW

GATE = "model.layers.0.mlp.gate"
FP8 = {"quant_method": "fp8", "ignored_layers": [GATE]}
EXCLUDED = [GATE, "lm_head", "model.layers.1*", "vision_tower"]
IN_CONFIG = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": EXCLUDED}
IN_FILE = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": EXCLUDED},
}
STATIC, DYNAMIC = (FP8 | {"activation_scheme": scheme} for scheme in ("static", "dynamic"))
DESCRIPTIONS = {"channel": BY_ROW, "static": STATIC, "dynamic": DYNAMIC, "config": IN_CONFIG, "file": IN_FILE}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_scales_of_rows_and_of_weights_are_read(name: str) -> None:
    spec = parse_quantization(DESCRIPTIONS[name])
    assert (spec.weights, spec.dense, spec.scale) == (FP8_CHANNEL, FP8_CHANNEL, "weight_scale")
    assert spec.input_scales is (name not in ("channel", "dynamic"))
    assert (spec.online, spec.ue8m0, spec.recoded_from) == (False, False, None)


@pytest.mark.parametrize("config", [IN_CONFIG, IN_FILE, IN_FILE | {"quant_method": "modelopt"}])
def test_layers_that_modelopt_excludes_are_unquantized(config: dict[str, Any]) -> None:
    name, *patterns = parse_quantization(config).unquantized
    assert name == GATE
    kept = ["lm_head", "model.layers.1.mlp.gate", "model.layers.10.mlp.gate", "model.vision_tower.blocks.0.qkv"]
    assert all(matches(patterns, layer) for layer in kept)
    assert not any(matches(patterns, layer) for layer in (GATE, "model.layers.2.mlp.gate", "model.layers.0.self_attn"))


@pytest.mark.parametrize(
    ("entry", "kept", "quantized"),
    [
        ("model.layers.1.mlp", "model.layers.1.mlp.experts", "model.layers.1.self_attn.o_proj"),
        ("model.layers.1", "model.layers.1.mlp.experts", "model.layers.10.mlp.experts"),
        ("model.layers.1.mlp.experts.*", "model.layers.1.mlp.experts", "model.layers.1.mlp.up_proj"),
        ("*.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"),
    ],
)
def test_modelopt_excludes_modules_and_all_that_is_in_them(entry: str, kept: str, quantized: str) -> None:
    patterns = parse_quantization(IN_CONFIG | {"ignore": [entry]}).unquantized
    assert matches(patterns, kept)
    assert not matches(patterns, quantized)


@pytest.mark.parametrize(
    ("change", "bits"),
    [({}, None), ({"kv_cache_quant_algo": "FP8"}, 8), ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 8)],
)
def test_the_cache_of_modelopt_is_counted(change: dict[str, Any], bits: int | None) -> None:
    assert parse_quantization(IN_CONFIG | change).cache_bits == bits
    assert parse_quantization(IN_FILE).cache_bits == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_algo": "NVFP4"}, "ModelOpt to 'NVFP4' .* only 'FP8' is supported"),
        ({"quant_algo": "FP8_PB_WO"}, "ModelOpt to 'FP8_PB_WO'"),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "ModelOpt to 'FP8_PER_CHANNEL_PER_TOKEN'"),
        ({"moe_quant_algo": "NVFP4"}, "ModelOpt to 'NVFP4'"),
        ({"quant_algo": None}, "ModelOpt to None"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head', but must be a list of layer names"),
        ({"ignore": [""]}, "ignore is \\[''\\], but must be a list of layer names"),
        ({"ignore": [f"{number}*" for number in range(513)]}, "ignore of .* has 513 patterns, more than 512"),
    ],
)
def test_other_formats_of_modelopt_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse_quantization(IN_CONFIG | change)


def test_experts_in_mxfp4_need_other_layers_in_blocks() -> None:
    with pytest.raises(UnsupportedError, match="experts are MXFP4, but its other layers are not block-FP8"):
        recoded(parse_quantization(DYNAMIC), MXFP4)


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_damaged_descriptions_are_read_or_refused(name: str) -> None:
    outcomes, messages = set(), []
    for at in range(len(nodes(DESCRIPTIONS[name]))):
        for value in VALUES:
            damaged = copy.deepcopy(DESCRIPTIONS[name])
            parent, key = nodes(damaged)[at]
            parent[key] = value
            try:
                outcomes.add(type(parse_quantization(damaged)))
            except UnsupportedError as error:
                outcomes.add(UnsupportedError)
                messages.append(str(error))
    assert outcomes == {QuantSpec, UnsupportedError}
    assert all(message.isprintable() and len(message) < 1000 for message in messages)
