"""Synthetic checkpoints have the layers of the published ones."""

from benchmarks.checkpoints.synthetic import PRESETS, config, write_checkpoint
from fp8moe_plugin.checkpoint.model import read_model
from tests.checkpoint.published import described
from tests.checkpoint.test_model import describe
from warmup.memory import without_mtp


def test_qwen3_5_has_the_published_layers(tmp_path):
    shape = PRESETS["qwen3_5_moe", "qwen3.5-35b"]
    ours = read_model(describe(tmp_path, config(shape, fp8=True)))
    published = without_mtp(read_model(describe(tmp_path, described("Qwen3.6-35B-A3B-FP8"))))
    assert ours.experts == published.experts
    assert {*ours.dense} == {*published.dense}


def test_qwen3_5_writes_all_weights(tmp_path):
    shape = PRESETS["qwen3_5_moe", "tiny"]
    write_checkpoint(tmp_path, shape)
    assert read_model(tmp_path).experts.layers == shape.layers
