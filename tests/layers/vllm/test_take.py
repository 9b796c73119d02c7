"""FP8MOE_TAKE_FP8=1: vLLM serves a checkpoint with the plugin without --quantization fp8moe."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from transformers import PretrainedConfig

from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig
from fp8moe_plugin.layers.vllm.entry import Entry
from tests.helpers import environment
from tests.layers.vllm.test_config import CHECKPOINT

pytestmark = pytest.mark.seam


@pytest.mark.parametrize("user_quant", [None, "fp8"])
def test_a_checkpoint_is_taken_over_by_a_variable(plugin_log, user_quant):
    plugin_log.set_level("INFO")
    hf_config = PretrainedConfig(num_experts=8)
    with environment("FP8MOE_TAKE_FP8", "1"):
        assert Entry.override_quantization_method(CHECKPOINT, user_quant, hf_config=hf_config) == "fp8moe"
        assert plugin_log.messages == [
            "fp8moe: FP8MOE_TAKE_FP8: the checkpoint is served as vLLM would with --quantization fp8moe"
        ]
        assert Entry.override_quantization_method(CHECKPOINT, "awq", hf_config=hf_config) is None
    assert len(plugin_log.messages) == 1


@pytest.mark.parametrize(
    ("checkpoint", "fields", "why"),
    [
        ({"quant_method": "awq"}, {}, "--quantization fp8moe: the checkpoint's quant_method is 'awq'"),
        (CHECKPOINT, {"num_experts": None}, "It describes no model with experts"),
        (CHECKPOINT, {"hidden_act": "relu2"}, "The checkpoint's hidden_act is 'relu2'"),
    ],
)
def test_what_the_plugin_does_not_support_stays_with_the_engine(plugin_log, checkpoint, fields, why):
    with environment("FP8MOE_TAKE_FP8", "1"):
        hf_config = PretrainedConfig(**({"num_experts": 8} | fields))
        assert Entry.override_quantization_method(checkpoint, None, hf_config=hf_config) is None
    (line,) = plugin_log.messages
    assert line.startswith(f"fp8moe: FP8MOE_TAKE_FP8: the checkpoint stays with vLLM's own method. {why}")


def test_an_error_while_taking_a_checkpoint_leaves_it_to_the_engine(monkeypatch, plugin_log):
    monkeypatch.setattr(Fp8MoeConfig, "check", lambda *_: 1 / 0)
    with environment("FP8MOE_TAKE_FP8", "1"):
        assert Entry.override_quantization_method(CHECKPOINT, None) is None
    (record,) = plugin_log.records
    assert record.exc_info


def test_an_invalid_variable_does_not_stop_an_engine_that_does_not_use_the_plugin(plugin_log):
    with environment("FP8MOE_BACKEND", "cuda"):
        assert Entry.override_quantization_method(CHECKPOINT, None) is None
    (line,) = plugin_log.messages
    assert "FP8MOE_BACKEND is 'cuda'" in line
