from importlib.metadata import entry_points

import pytest
import torch

from benchmarks.checkpoints.answers import LARGEST_DIFFERENCE, compare
from tests import faults
from tests.engine.conftest import NARROW, needs_attention_with_sinks, needs_compiler, needs_two_gpus

MERGES = "fp8moe: shared experts are computed as one more expert"
SERVES = "fp8moe serves the experts: backend "
BACKEND = "sm90" if torch.cuda.is_available() else "reference"


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "deepseek_v3_ue8m0",
        "qwen3_moe",
        "deepseek_v3 static",
        "qwen3_moe by row",
        "deepseek_v3 mtp",
        *[
            pytest.param(f"gpt_oss{how}", marks=needs_attention_with_sinks)
            for how in ("", " multiprocess", " tp2", " ep2")
        ],
        "qwen3_moe multiprocess",
        "deepseek_v3 unmerged",
        pytest.param("deepseek_v3 compiled", marks=needs_compiler),
        pytest.param("qwen3_moe ep2", marks=needs_two_gpus),
        pytest.param("deepseek_v3_odd tp2", marks=needs_two_gpus),
        pytest.param("deepseek_v3_odd online", marks=needs_two_gpus),
        *[pytest.param("qwen3_moe tp2", marks=needs_two_gpus)] * faults.FULL,
    ],
)
def test_the_engine_says_what_its_unquantized_twin_says(engines, name):
    ours, twin = engines(name), engines(f"{name.partition(' ')[0]} twin")
    assert ours.refused is None
    difference, clear, same = compare(ours.answers[0], twin.answers[0])
    assert SERVES + BACKEND in ours.log
    assert SERVES not in twin.log
    assert (MERGES in ours.log) == (name.startswith("deepseek_v3") and not name.endswith("unmerged"))
    assert difference < LARGEST_DIFFERENCE
    assert clear > 0.5
    assert same > 0.95


def test_experts_on_methods_of_vllm_answer_as_their_twin(engines):
    ours, twin = engines(NARROW), engines(f"{NARROW} twin")
    assert ours.refused is None
    own = "model.layers.N.mlp.experts runs on vLLM's own UnquantizedFusedMoEMethod: hidden size 320 is not a multiple"
    assert own in ours.log
    assert "fp8moe: 1 layers run on the plugin's kernels, 2 on vLLM's own: model.layers.N.mlp.experts (1)" in ours.log
    assert SERVES not in ours.log
    difference, clear, same = compare(ours.answers[0], twin.answers[0])
    assert difference < LARGEST_DIFFERENCE
    assert clear > 0.5
    assert same > 0.95


@needs_two_gpus
def test_ranks_that_cannot_share_blocks_equally_say_what_it_costs(engines):
    log = engines("deepseek_v3_odd tp2").log
    for cost in ("holds 256 channels instead of 192, which takes 33.3%", "holds 384 channels instead of 288"):
        assert cost in log


def test_experts_with_gate_and_up_swapped_do_not_pass_for_the_twin(engines):
    difference, *_ = compare(engines("qwen3_moe swapped").answers[0], engines("qwen3_moe twin").answers[0])
    assert difference > 2 * LARGEST_DIFFERENCE


def test_an_installed_plugin_changes_nothing_for_other_models(engines):
    assert entry_points(group="vllm.general_plugins", name="fp8moe")  # each vLLM loads it, but one with VLLM_PLUGINS
    with_plugin = engines("qwen3_moe unquantized")
    assert SERVES not in with_plugin.log
    assert with_plugin.answers == engines("qwen3_moe twin").answers


def test_an_engine_does_not_start_without_the_scales_of_an_expert(engines):
    refused = engines("qwen3_moe without a scale").refused
    assert refused
    assert "model.layers.0.mlp.experts" in refused
    assert "w2_weight_scale_inv of local expert 3: a tensor is missing" in refused


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("deepseek_v3_odd online", marks=needs_two_gpus),
        pytest.param("gpt_oss", marks=needs_attention_with_sinks),
    ],
)
def test_an_engine_loads_again_what_it_loaded(engines, name):
    first, other, again = engines(name).answers
    difference, *_ = compare(other, engines(f"{name.partition(' ')[0]} twin").answers[0])
    assert difference > 2 * LARGEST_DIFFERENCE
    assert again == first


@pytest.mark.parametrize("name", ["qwen3_moe multiprocess", pytest.param("qwen3_moe ep2", marks=needs_two_gpus)])
def test_an_engine_in_processes_of_its_own_ends_with_the_reason(engines, name):
    """Under `ep2` the expert is one of the second rank alone: the first must not wait for it."""
    served = engines(name)
    assert len(served.answers) == 1
    assert served.status != 0
    assert "a tensor is missing" in served.log
    assert "The failed reload left a mixture of old and new weights" in served.log
