from importlib.metadata import entry_points

import pytest

from benchmarks.checkpoints.answers import LARGEST_DIFFERENCE, compare
from tests.engine.sglang.conftest import ENGINES

pytestmark = pytest.mark.seam

SERVES = "fp8moe serves the experts: backend reference"


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        "qwen3_moe tp2",
        "qwen3_moe ep2",
        "qwen3_moe dp2",
        "qwen3_moe compressed",
        "qwen3_moe compressed ep2",
        "deepseek_v3 compressed",
        "qwen3_moe by row",
        "deepseek_v3 static",
        "deepseek_v3",
        "deepseek_v3_ue8m0",
        "deepseek_v3_odd tp2",
        "deepseek_v3_odd online",
    ],
)
def test_the_engine_says_what_its_unquantized_twin_says(engines, name):
    if name not in ENGINES:
        pytest.skip("this SGLang cannot run it on a CPU")
    ours, twin = engines(name), engines(f"{name.partition(' ')[0]} twin")
    assert SERVES in ours.log, ours.log[-4000:]
    assert SERVES not in twin.log
    difference, clear, same = compare(ours.answers[0], twin.answers[0])
    assert difference < LARGEST_DIFFERENCE
    assert clear > 0.5
    assert same > 0.95


def test_ranks_that_cannot_share_blocks_equally_say_what_it_costs(engines):
    log = engines("deepseek_v3_odd tp2").log
    for cost in ("holds 256 channels instead of 192, which takes 33.3%", "holds 384 channels instead of 288"):
        assert cost in log
    assert "With --ep-size it would be 0.0%." in log


def test_experts_with_gate_and_up_swapped_do_not_pass_for_the_twin(engines):
    difference, *_ = compare(engines("qwen3_moe swapped").answers[0], engines("qwen3_moe twin").answers[0])
    assert difference > 2 * LARGEST_DIFFERENCE


def test_an_installed_plugin_changes_nothing_for_other_models(engines):
    assert entry_points(group="sglang.srt.plugins", name="fp8moe")  # each SGLang loads it, but one with SGLANG_PLUGINS
    with_plugin, without = engines("qwen3_moe unquantized"), engines("qwen3_moe twin")
    assert SERVES not in with_plugin.log
    assert with_plugin.answers == without.answers


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe compressed"])
def test_an_engine_serves_the_weights_that_it_was_updated_with(engines, name):
    first, other, again = engines(name).answers
    difference, *_ = compare(other, first)
    assert difference > 2 * LARGEST_DIFFERENCE
    assert again == first


def test_what_is_quantized_as_it_loads_is_what_convert_writes(engines):
    """Also when it is updated."""
    (converted,) = engines("qwen3_moe converted").answers
    assert engines("qwen3_moe online").answers == [converted, converted]


def test_an_engine_answers_why_it_refuses_an_update(engines):
    """It goes on if nothing was written, and otherwise ends: SGLang itself would cast the weights, or end at once."""
    served = engines("other dtype")
    first, not_found, again, other_dtype = served.answers
    assert "Nothing has been written: the engine keeps its weights." in not_found["refused"]
    assert again == first
    for message in ("has dtype torch.bfloat16, but a block-FP8 checkpoint has", "so the engine ends at its next step"):
        assert message in other_dtype["refused"]
    assert served.status != 0
    assert "CheckpointError: " + other_dtype["refused"] in served.log


def test_ranks_refuse_an_update_without_a_scale(engines):
    served = engines("lacking ep2")
    assert "w2 of expert 3): new weight arrived without the scales" in served.answers[1]["refused"]
    assert (len(served.answers), served.status != 0) == (2, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("without a scale", "w2_weight_scale_inv of local expert 3: a tensor is missing"),
        ("lora", "LoRA is not supported by --quantization fp8moe"),
        ("runner backend", "--moe-runner-backend triton cannot be combined with --quantization fp8moe"),
    ],
)
def test_an_engine_does_not_start(engines, name, message):
    refused = engines(name)
    assert not refused.answers
    assert refused.status != 0
    assert message in refused.log
