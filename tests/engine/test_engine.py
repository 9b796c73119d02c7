import json
import os
import shutil
from importlib.metadata import entry_points

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.engine.small_engines import LARGEST_DIFFERENCE, compare

SERVES = "fp8moe serves the experts: backend "
BACKEND = "sm90" if torch.cuda.is_available() else "reference"
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="tensor parallelism needs two GPUs")
needs_compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++")), reason="torch.compile on a CPU needs a C++ compiler"
)


def results(done):
    """What a script printed as lines of JSON."""
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def answers(done):
    return results(done)[0]


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("deepseek_v3", "eager"),
        ("deepseek_v3", "multiprocess"),
        ("deepseek_v3", "mtp"),
        ("deepseek_v3_ue8m0", "eager"),
        ("qwen3_moe", "eager"),
        pytest.param("qwen3_moe", "tp2", marks=needs_two_gpus),
        pytest.param("qwen3_moe", "ep2", marks=needs_two_gpus),
        pytest.param("deepseek_v3_odd", "tp2", marks=needs_two_gpus),
        pytest.param("deepseek_v3_odd", "tp2_online", marks=needs_two_gpus),
        pytest.param("deepseek_v3", "compile", marks=needs_compiler),
    ],
)
def test_the_engine_says_what_its_unquantized_twin_says(engines, family, mode):
    ours, twin = engines(family, mode).result(), engines(family, "twin").result()
    difference, clear, same = compare(answers(ours), answers(twin))
    assert SERVES + BACKEND in ours.stdout + ours.stderr
    assert SERVES not in twin.stdout + twin.stderr
    assert difference < LARGEST_DIFFERENCE
    assert clear > 0.5
    assert same > 0.95


@needs_two_gpus
def test_ranks_that_cannot_share_blocks_equally_say_what_it_costs(engines):
    done = engines("deepseek_v3_odd", "tp2").result()
    answers(done)
    for cost in ("holds 256 channels instead of 192, which takes 33.3%", "holds 384 channels instead of 288"):
        assert cost in done.stdout + done.stderr


def test_experts_with_gate_and_up_swapped_do_not_pass_for_the_twin(checkpoints, start, engines):
    swapped = start(checkpoints / "qwen3_moe-fp8", "eager", script="generate_swapped", quantization="fp8moe")
    difference, *_ = compare(answers(swapped), answers(engines("qwen3_moe", "twin").result()))
    assert difference > 2 * LARGEST_DIFFERENCE


def test_an_installed_plugin_changes_nothing_for_other_models(checkpoints, start, engines):
    assert entry_points(group="vllm.general_plugins", name="fp8moe")  # each vLLM loads it, but one with VLLM_PLUGINS
    twin = engines("qwen3_moe", "twin").result()
    assert answers(twin) == answers(start(checkpoints / "qwen3_moe-bf16", "eager", {"VLLM_PLUGINS": ""}))


def test_an_engine_does_not_start_without_the_scales_of_an_expert(checkpoints, start, tmp_path):
    broken = shutil.copytree(checkpoints / "qwen3_moe-fp8", tmp_path / "broken")
    (shard,) = broken.glob("*.safetensors")
    tensors = load_file(shard)
    del tensors["model.layers.0.mlp.experts.3.down_proj.weight_scale_inv"]
    save_file(tensors, shard, metadata={"format": "pt"})
    index = broken / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard.name)}))
    done = start(broken, "eager", quantization="fp8moe")
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    (error,) = {line.partition("CheckpointError: ")[2] for line in lines if "errors.CheckpointError: " in line}
    assert "model.layers.0.mlp.experts" in error
    assert "w2_weight_scale_inv of local expert 3: a tensor is missing" in error
