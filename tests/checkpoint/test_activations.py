"""The activations that a config.json gives its experts, under the names of each family."""

import pytest

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import merges_shared_expert
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.activation import SILU, Activation
from tests.checkpoint.published import described
from tests.checkpoint.test_model import V3, describe
from tests.helpers import environment

CLAMPED, STEP = Activation(limit=7), Activation("swiglustep", 7)
OAI = Activation("swigluoai_uninterleave", 7, 1.702, 1)
LAST_TWO = [0.0] * 59 + [7, 7]  # of V3's 61 layers; that for multi-token prediction is past its end


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [SILU]),
        ({"swiglu_limit": 7}, [CLAMPED]),
        ({"swiglu_limit": 7.0}, [CLAMPED]),
        ({"swiglu_limit": 0}, [SILU]),
        ({"swiglu_limit": -1}, [SILU]),
        ({"swiglu_limits": [7] * 62}, [CLAMPED]),
        ({"swiglu_limits": LAST_TWO}, [SILU, CLAMPED]),
        ({"swiglu_limits": [7, 7, 7]}, [SILU]),  # of dense layers
        ({"swiglu_limits": [None] * 60 + [7, 5.0]}, [SILU, CLAMPED, Activation(limit=5)]),
        ({"swiglu_limits": [7] * 61}, [CLAMPED, SILU]),
        ({"swiglu_limits": None, "swiglu_limit": 7}, [CLAMPED]),
        ({"model_type": "step3p5", "swiglu_limits": LAST_TWO}, [SILU, STEP]),
        ({"model_type": "step3p7_text", "swiglu_limits": LAST_TWO}, [SILU, STEP]),
        ({"model_type": "gigachat35", "swiglu_limit": 7}, [STEP]),
        ({"model_type": "bailing_hybrid", "expert_swiglu_limit_list": LAST_TWO}, [SILU, CLAMPED, STEP]),
        ({"hidden_act": "swigluoai"}, [OAI]),
        ({"hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}, [OAI]),
        ({"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}, [OAI]),
        ({"hidden_act": "swigluoai", "swiglu_alpha": 1, "swiglu_beta": 0, "swiglu_limit": 9}, [(OAI.kind, 9, 1, 0)]),
        ({"model_type": "hy_v4"}, [Activation(limit=10)]),
        ({"model_type": "hy_v4", "swiglu_limit": 0}, [SILU]),
        ({"model_type": "glm5_next_text", "swiglu_limit": None}, [SILU]),
    ],
)
def test_activations_of_experts(tmp_path, fields, expected):
    assert read_model(describe(tmp_path, V3, **fields)).activations == tuple(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GLM-5.3-Flash", [Activation(limit=10)]),
        ("MiniMax-M3", [OAI]),
        ("Step-3.5-Flash-FP8", [SILU, STEP]),
        ("Qwen3.6-35B-A3B-FP8", [SILU]),
    ],
)
def test_activations_of_models(tmp_path, name, expected):
    config = described(name)
    assert read_model(describe(tmp_path, config)).activations == tuple(expected)


@pytest.mark.parametrize("field", ["swiglu_limit", "swiglu_alpha", "swiglu_beta", "swiglu_limits"])
@pytest.mark.parametrize("value", ["7", True, float("nan"), float("inf"), 10**400, {}])
def test_what_is_no_number_is_refused(tmp_path, field, value):
    fields = {field: [value] if field.endswith("s") else value}
    with pytest.raises(CheckpointError, match=f"{field} is"):
        read_model(describe(tmp_path, V3, **fields))


@pytest.mark.parametrize("limit", [0, -1.0])
def test_a_limit_that_engines_take_as_a_clamp_to_zero_is_refused(tmp_path, limit):
    """vLLM's class passes it on, and the layer runs on vLLM's own kernels."""
    with pytest.raises(UnsupportedError, match=rf"swiglu_limit is {limit}.*'glm5_next_text'.* null in config.json"):
        read_model(describe(tmp_path, V3, model_type="glm5_next_text", swiglu_limit=limit))


def test_a_shared_expert_is_merged_only_if_it_computes_the_same(tmp_path):
    assert merges_shared_expert(read_model(describe(tmp_path, V3)), Parallel())
    with environment("FP8MOE_FP4_EXPERTS", "fp8"):
        assert merges_shared_expert(read_model(describe(tmp_path, described("DeepSeek-V4-Flash"))), Parallel())
    assert not merges_shared_expert(read_model(describe(tmp_path, V3, swiglu_limits=LAST_TWO)), Parallel())


@pytest.mark.parametrize("name", ["Qwen3.5-397B-A17B-FP8", "Qwen3.6-35B-A3B-FP8", "Qwen3-Next-80B-A3B-Thinking"])
def test_a_shared_expert_with_a_gate_is_merged_under_vllm(tmp_path, name):
    model = read_model(describe(tmp_path, described(name)))
    assert merges_shared_expert(model, Parallel())
    assert merges_shared_expert(model, Parallel(8))
    assert not merges_shared_expert(model, Parallel(1, 8, ep=8))
    assert not merges_shared_expert(model, Parallel(sglang=True))
