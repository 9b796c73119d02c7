"""Checkpoints of compressed-tensors: FP8 by block, row or tensor is read, and every other scheme is refused.

The descriptions are made by the library itself.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats import patterns
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.spec import parse_quantization
from warmup.memory import cache_bytes

pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (comes with vLLM)")

from compressed_tensors import quantization as library
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme
from compressed_tensors.utils import match_name

CONFIG = json.loads((Path(__file__).parent / "configs" / "Qwen3-30B-A3B-FP8.json").read_text())
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(CONFIG["num_hidden_layers"])]


def description(preset: str = "FP8_BLOCK", ignore: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    """Returns a `quantization_config` as the library writes it for a checkpoint."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    status = library.QuantizationStatus.COMPRESSED
    ignored = ["lm_head", *ROUTERS] if ignore is None else ignore
    config = library.QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignored, quantization_status=status)
    config.format = "float-quantized" if preset.startswith("FP8") else config.format
    written: dict[str, Any] = json.loads(json.dumps(config.model_dump(mode="json")))
    return written | changes


def checkpoint(folder: Path, quantization: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    return folder


def test_block_fp8_is_read_like_fp8(tmp_path: Path) -> None:
    (tmp_path / "fp8").mkdir()
    fp8 = read_model(checkpoint(tmp_path / "fp8", CONFIG["quantization_config"]))
    assert read_model(checkpoint(tmp_path, description())) == fp8
    assert read_model(checkpoint(tmp_path, description(ignore=["lm_head", r"re:.*mlp\.gate$"]))) == fp8


def test_layers_that_a_pattern_ignores_are_unquantized(tmp_path: Path) -> None:
    model = read_model(checkpoint(tmp_path, description(ignore=["re:.*self_attn.*", "lm_head"])))
    assert [layer.name for layer in model.dense] == []
    assert {layer.name for layer in model.plain} == {"self_attn.qkv_proj", "self_attn.o_proj"}
    with pytest.raises(UnsupportedError, match=r"keeps only a part of layer 0's self_attn\.qkv_proj unquantized"):
        read_model(checkpoint(tmp_path, description(ignore=["re:.*q_proj$"])))
    assert read_model(checkpoint(tmp_path, description(ignore=["re:.*mlp.experts.*"]))).experts.layers == 0


@pytest.mark.parametrize(("preset", "input_scales"), [("FP8_DYNAMIC", False), ("FP8", True)])
def test_fp8_by_row_or_tensor_is_read(preset: str, input_scales: bool) -> None:
    spec = parse_quantization(description(preset))
    assert (spec.weights, spec.dense, spec.scale) == (FP8_CHANNEL, FP8_CHANNEL, "weight_scale")
    assert spec.input_scales is input_scales
    assert spec.unquantized[0] == "lm_head"


@pytest.mark.parametrize("weights", ["channel", "tensor"])
@pytest.mark.parametrize(("inputs", "dynamic"), [("token", True), ("tensor", True), ("tensor", False)])
def test_inputs_of_all_kinds_are_quantized_at_run_time(weights: str, inputs: str, dynamic: bool) -> None:
    config = description("FP8_DYNAMIC")
    group = config["config_groups"]["group_0"]
    group["weights"]["strategy"] = weights
    group["input_activations"] |= {"strategy": inputs, "dynamic": dynamic}
    spec = parse_quantization(config)
    assert (spec.weights, spec.input_scales) == (FP8_CHANNEL, not dynamic)


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("weights", "strategy", "group", "Input should be 'block', 'channel' or 'tensor'"),
        ("weights", "symmetric", False, "Input should be True"),
        ("weights", "dynamic", True, "Input should be False"),
        ("weights", "type", "int", "Input should be 'float'"),
        ("input_activations", "strategy", "group", "Input should be 'token' or 'tensor'"),
        ("input_activations", "dynamic", False, "because scales of tokens are computed at run time"),
        ("input_activations", "symmetric", False, "Input should be True"),
    ],
)
def test_a_scheme_by_row_that_differs_is_refused(part: str, field: str, value: Any, message: str) -> None:
    config = description("FP8_DYNAMIC")
    config["config_groups"]["group_0"][part][field] = value
    with pytest.raises(UnsupportedError, match=rf"group_0\.{part}\.{field}' of .* is {value!r}: .*{message}"):
        parse_quantization(config)


def test_scales_of_tokens_are_not_static_by_default() -> None:
    config = description("FP8_DYNAMIC")
    del config["config_groups"]["group_0"]["input_activations"]["dynamic"]
    with pytest.raises(UnsupportedError, match="because scales of tokens are computed at run time"):
        parse_quantization(config)


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_weights_alone_in_fp8_are_refused(preset: str) -> None:
    config = description(preset)
    config["config_groups"]["group_0"]["input_activations"] = None
    with pytest.raises(UnsupportedError, match=r"input_activations' of .* is None: the checkpoint keeps activations"):
        parse_quantization(config)


@pytest.mark.parametrize("preset", sorted(set(PRESET_SCHEMES) - {"FP8_BLOCK", "FP8_DYNAMIC", "FP8"}))
def test_every_other_scheme_is_refused_by_what_differs(preset: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse_quantization(description(preset))
    message = str(caught.value)
    assert "of compressed-tensors, only FP8 weights with FP8 activations are supported" in message
    assert "config_groups.group_0." in message
    assert message.isprintable()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("config_groups", "group_0", "weights", "block_structure"), [64, 128]),
        (("config_groups", "group_0", "weights", "symmetric"), False),
        (("config_groups", "group_0", "input_activations", "dynamic"), False),
        (("config_groups", "group_0", "input_activations", "group_size"), 64),
        (("config_groups", "group_0", "targets", 0), "re:.*experts.*"),
        (("config_groups", "group_0", "format"), "naive-quantized"),
        (("kv_cache_scheme",), "fp8"),
        (("sparsity_config",), {"format": "dense"}),
        (("transform_config",), {"config_groups": {"a": {}}}),
        (("ignore", 0), r"re:(a+)+$"),
    ],
)
def test_a_field_that_differs_is_named(path: tuple[str | int, ...], value: Any) -> None:
    config = description()
    part: Any = config
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(UnsupportedError) as caught:
        parse_quantization(config)
    assert ".".join(map(str, path[:-1] if path[0] == "ignore" else path)) in str(caught.value)


def test_two_groups_are_refused() -> None:
    config = description()
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"]
    with pytest.raises(UnsupportedError, match="'config_groups' of the checkpoint's quantization_config"):
        parse_quantization(config)


@pytest.mark.parametrize(
    "pattern",
    [
        "re:.*gate$",
        "re:.*mlp.gate$",
        r"re:.*layers\.0\..*proj",
        "re:model",
        "re:gate$",
        "re:(?!.*attn).*(gate|up)",
    ],
)
@pytest.mark.parametrize("layer", ["model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj", "lm_head"])
def test_patterns_match_as_in_the_library(pattern: str, layer: str) -> None:
    patterns.check_patterns([pattern], "ignore")
    assert patterns.matches([pattern], layer) == match_name(layer, pattern)


def test_the_scheme_of_the_cache_is_left_to_the_engine(tmp_path: Path) -> None:
    def read(**changes: Any) -> Model:
        return read_model(checkpoint(tmp_path, description() | changes))

    plain = read(sparsity_config={}, transform_config={})
    for bits, size in ((8, 1), (4, 2), ("8", 2)):
        model = read(kv_cache_scheme={"num_bits": bits, "type": "float", "strategy": "tensor"})
        assert cache_bytes(model, Parallel(), fp8=False) * 2 == cache_bytes(plain, Parallel(), fp8=False) * size
        assert cache_bytes(model, Parallel(), fp8=True) == cache_bytes(plain, Parallel(), fp8=True)
