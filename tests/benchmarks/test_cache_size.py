"""benchmarks.engine.cache_size: what it expects, and what it reads from vLLM's log."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.checkpoints.synthetic import PRESETS, config
from benchmarks.engine import cache_size
from tests.warmup.conftest import CONFIGS


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes((CONFIGS / "Qwen3-30B-A3B-FP8.json").read_bytes())
    return tmp_path


def test_a_cache_in_fp8_holds_more_tokens_of_the_memory_that_is_left(qwen: Path) -> None:
    sizes = {name: cache_size.predicted(qwen, setting, "h200") for name, setting in cache_size.SETTINGS.items()}
    assert 0 < sizes["small"] < sizes["server"]
    half = cache_size.SETTINGS["small"] | {"gpu_memory_utilization": 0.9}
    assert cache_size.predicted(qwen, half, "h200") > 1.9 * sizes["server"]


def test_the_size_is_read_from_the_log() -> None:
    line = "INFO 11-24 14:38:20 [kv_cache_utils.py:2146] GPU KV cache size: 1,672,448 tokens"
    found = cache_size.REPORTED.search(line)
    assert found
    assert found[1] == "1,672,448"


def test_what_vllm_reported_is_expected_within_one_percent(tmp_path: Path) -> None:
    measured = json.loads(Path("benchmarks/results/cache_size-2026-11-25.json").read_text())
    shapes = {
        "qwen3-4layer": replace(PRESETS["qwen3_moe", "qwen3-24layer"], moe_layers=4),
        "dsv3-2layer": replace(PRESETS["deepseek_v3", "dsv3-3layer"], moe_layers=1, experts=64),
    }
    points = {(name, setting) for name in shapes for setting in cache_size.SETTINGS}
    assert {(point["model"], point["setting"]) for point in measured["points"]} == points
    for point in measured["points"]:
        (tmp_path / "config.json").write_text(json.dumps(config(shapes[point["model"]], fp8=True)))
        tokens = cache_size.predicted(tmp_path, measured["settings"][point["setting"]], "h200")
        assert tokens == point["explain"]
        assert tokens == pytest.approx(point["vllm"], rel=0.01)
