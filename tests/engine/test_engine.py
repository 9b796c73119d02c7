import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

SERVES = "fp8moe serves the experts: backend "
BACKEND = "sm90" if torch.cuda.is_available() else "reference"
# Of the log-probabilities at a position, as vectors: rounding activations to FP8 moves them by 0.01 to 0.03 of their
# length, a mistake in the experts by 0.08 and more. 9 of 10 positions must be nearer: rounding may change an expert.
LARGEST_DIFFERENCE = 0.05
# In log-probability: below it, rounding decides which token is the likeliest.
CLEAR_LEAD = 0.5
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


def same_history(ours, twin):
    """Our log-probabilities and the twin's after the same tokens: of an answer, up to the first difference."""
    pairs = []
    for mine, other in zip(ours["prompts"], twin["prompts"], strict=True):
        pairs += zip(mine, other, strict=True)
    for i, (mine, other) in enumerate(zip(ours["generated"], twin["generated"], strict=True)):
        tokens = list(zip(ours["tokens"][i], twin["tokens"][i], strict=True))
        equal = next((n for n, (token, wanted) in enumerate(tokens) if token != wanted), len(tokens))
        pairs += list(zip(mine, other, strict=True))[: equal + 1]
    return torch.tensor(pairs).unbind(1)


def compare(ours, twin):
    """How far apart 9 of 10 positions are at most, and of those where the twin's best token leads clearly:
    the share of all, and the share where ours is the same."""
    mine, other = (x - x.mean(1, keepdim=True) for x in same_history(ours, twin))
    difference = ((mine - other).norm(dim=1) / other.norm(dim=1)).quantile(0.9)
    first, second = other.topk(2).values.unbind(1)
    clear = first - second > CLEAR_LEAD
    same = mine.argmax(1) == other.argmax(1)
    return difference.item(), clear.float().mean().item(), same[clear].float().mean().item()


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("deepseek_v3", "eager"),
        ("deepseek_v3", "multiprocess"),
        ("deepseek_v3", "mtp"),
        ("qwen3_moe", "eager"),
        pytest.param("qwen3_moe", "tp2", marks=needs_two_gpus),
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
    for cost in ("is 256 channels instead of 192, so that it takes 33.3%", "is 384 channels instead of 288"):
        assert cost in done.stdout + done.stderr


def test_experts_with_gate_and_up_swapped_do_not_pass_for_the_twin(checkpoints, start, engines):
    swapped = start(checkpoints / "qwen3_moe-fp8", "eager", script="generate_swapped", quantization="fp8moe")
    difference, *_ = compare(answers(swapped), answers(engines("qwen3_moe", "twin").result()))
    assert difference > 2 * LARGEST_DIFFERENCE


def test_an_installed_plugin_changes_nothing_for_other_models(checkpoints, start, engines):
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
