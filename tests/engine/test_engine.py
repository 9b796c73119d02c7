import itertools
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

SERVES = "fp8moe serves the experts: backend "
# In log-probability. Both engines round activations, ours to FP8: a lead smaller than that decides nothing.
CLEAR_LEAD = 0.5


def answers(done):
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"prompts"')))


def same_history(ours, twin):
    """Pairs of ours and the twin's (token, lead) after the same tokens: of an answer, up to the first difference."""
    for mine, other in zip(ours["prompts"], twin["prompts"], strict=True):
        yield from zip(mine, other, strict=True)
    for mine, other in zip(ours["generated"], twin["generated"], strict=True):
        pairs = list(zip(mine, other, strict=True))
        equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))
        yield from pairs[: equal + 1]


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(("deepseek_v3", mode) for mode in ("eager", "compile", "multiprocess", "tp2", "mtp")),
        *(("qwen3_moe", mode) for mode in ("eager", "tp2")),
    ],
)
def test_the_engine_says_what_its_unquantized_twin_says(start_both, family, mode):
    ours, twin = start_both(family, mode)
    mine, other = answers(ours), answers(twin)
    positions = sum(len(tokens) for texts in other.values() for tokens in texts)
    decided = [(token, wanted) for (token, _), (wanted, lead) in same_history(mine, other) if lead > CLEAR_LEAD]
    assert SERVES + "reference" in ours.stdout + ours.stderr
    assert SERVES not in twin.stdout + twin.stderr
    assert len(decided) > positions / 2
    assert [pair for pair in decided if pair[0] != pair[1]] == []


def test_an_installed_plugin_changes_nothing_for_other_models(checkpoints, start, start_both):
    _, twin = start_both("qwen3_moe", "eager")
    assert answers(twin) == answers(start(checkpoints / "qwen3_moe-bf16", "eager", {"VLLM_PLUGINS": ""}))


def test_an_engine_does_not_start_without_the_scales_of_an_expert(checkpoints, start, tmp_path):
    broken = shutil.copytree(checkpoints / "qwen3_moe-fp8", tmp_path / "broken")
    (shard,) = broken.glob("*.safetensors")
    tensors = load_file(shard)
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight_scale_inv"]
    save_file(tensors, shard, metadata={"format": "pt"})
    index = broken / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard.name)}))
    done = start(broken, "eager", quantization="fp8moe")
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    (error,) = {line.partition("CheckpointError: ")[2] for line in lines if "errors.CheckpointError: " in line}
    assert "model.layers.1.mlp.experts" in error
    assert "w2_weight_scale_inv of local expert 3: a tensor is missing" in error
