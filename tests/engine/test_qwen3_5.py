"""A tiny Qwen3.5 with multi-token prediction, on a CPU."""

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.checkpoints.answers import compare
from tests import faults
from tests.conftest import has_hopper
from tests.engine.conftest import Start
from tests.engine.tiny_qwen3_5 import write

pytestmark = [
    pytest.mark.skipif(has_hopper(), reason="vLLM's CPU kernels are what it needs"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(not faults.FULL, reason="only with FULL_COUNTS=1"),
]


def test_multi_token_prediction_gives_the_same_tokens(start: Start, tmp_path: Path) -> None:
    """Where one token leads clearly: a step of two tokens rounds the states of linear attention otherwise."""
    write(tmp_path / "tiny")
    done = start("generate_qwen3_5", tmp_path / "tiny", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-4000:]
    *answers, ours = map(json.loads, done.stdout.splitlines())
    difference, clear, same = compare(*answers)
    assert difference < 0.1
    assert clear > 0.4
    assert same == 1
    assert ours == 1
