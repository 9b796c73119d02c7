"""Regular expressions among a checkpoint's unquantized layers: which are refused, and that the rest match quickly."""

import re
import time

import pytest

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats import patterns
from tests.checkpoint.test_model import QWEN, describe, without

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NAME = "language_model.model.layers.123.mlp.shared_experts.gate_up_proj"
LAGUNA = ["self_attn.q_proj", "self_attn.o_proj", "self_attn.g_proj", "mlp.gate", "mlp.shared_expert.gate_proj"]
KIMI = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(.*.*)*_norm_$", "contains nested quantifiers"),
        ("(?:a{2,}b)*?c", "contains nested quantifiers"),
        ("(ab|a)+c", "repeats alternatives"),
        (r"(.*)\\.\1", "contains a backreference"),
        ("(?P<name>.)(?P=name)", "contains a backreference"),
        ("(a)?(?(1)b|c)", "contains a backreference"),
        (r"(?i)[\x00-\U0010ffff]" + r"[^\x00-\U0010ffff]" * 24, "contains a range of characters beyond ASCII"),
        (r"(?i)(?:[a-\uffff])*x", "contains a range of characters beyond ASCII"),
        (r"(?<=a*)b", "is not a valid regular expression: look-behind requires fixed-width pattern"),
        ("*.vision", "is not a valid regular expression: nothing to repeat"),
        ("a{99999999999999999999}", "is not a valid regular expression"),
        ("a" * 513, "has 513 characters, more than 512"),
    ],
)
def test_patterns_are_refused_by_what_they_contain(tmp_path, pattern, why):
    for key in ("ignored_layers", "modules_to_not_convert"):
        config = QWEN | {"quantization_config": FP8 | {key: ["lm_head", f"re:{pattern}"]}}
        with pytest.raises(UnsupportedError, match=f"{key} .* has the pattern '.*', which {why}") as caught:
            read_model(describe(tmp_path, config))
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("pattern", [".*" * 4 + "x", "a?" * 30 + "a" * 30, "(aab|ab|b)" * 30, "(?:.?|.)" * 40 + "x"])
def test_patterns_that_multiply_are_refused(pattern):
    with pytest.raises(UnsupportedError, match="may take long to match"):
        patterns.check_patterns([f"re:{pattern}"], "ignore")


@pytest.mark.parametrize(
    "names",
    [[rf"re:.*\.{re.escape(name)}$" for name in LAGUNA], KIMI, [rf"re:.*layers\.{i}\..*gate" for i in range(512)]],
    ids=["Laguna", "Kimi", "most"],
)
def test_lists_in_use_are_accepted(names):
    patterns.check_patterns(["lm_head", *names], "ignore")


@pytest.mark.parametrize("pattern", [".*.*.*Z", ".*?.*?.*?Z", ".*e.*e.*e.*Z", ".*.*$Z", "(l|a|.)(.|g)(.|u).*.*Z"])
def test_a_name_is_matched_quickly(pattern):
    patterns.check_patterns([f"re:{pattern}"], "ignore")
    start = time.process_time()
    assert not patterns.matches([f"re:{pattern}"], NAME)
    assert time.process_time() - start < 0.05


def test_patterns_of_quant_method_fp8_match_layers(tmp_path):
    quantization = FP8 | {"modules_to_not_convert": [r"re:model\.layers\.[0-9]+\.self_attn\..*"]}
    model = read_model(describe(tmp_path, without(QWEN, "quantization_config"), quantization_config=quantization))
    assert {layer.name for layer in model.plain} == {"self_attn.qkv_proj", "self_attn.o_proj"}


@pytest.mark.parametrize("nested", [False, True])
def test_patterns_match_names_of_vllm(tmp_path, nested):
    """vLLM's names of a language model within another begin with language_model.model."""

    def plain(pattern: str) -> set[str]:
        config = without(QWEN, "quantization_config")
        config = {"architectures": ["Sees"], "text_config": config} if nested else config
        quantization = FP8 | {"modules_to_not_convert": [pattern]}
        return {layer.name for layer in read_model(describe(tmp_path, config, quantization_config=quantization)).plain}

    attention = {"self_attn.qkv_proj", "self_attn.o_proj"}
    assert plain(r"re:.*self_attn.*") == attention
    assert plain(r"re:model\.layers\.\d+\.self_attn.*") == (set() if nested else attention)
    assert plain(r"re:language_model\.model\.layers\.\d+\.self_attn.*") == (attention if nested else set())
