"""A tiny Qwen3.5 with multi-token prediction, and with its shared expert as one more of the experts, on a CPU."""

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


def test_all_engines_give_nearly_the_same_tokens(start: Start, tmp_path: Path) -> None:
    """Where one token leads clearly: a step of two tokens rounds the states of linear attention otherwise."""
    write(tmp_path / "tiny")
    done = start("generate_qwen3_5", tmp_path / "tiny", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-4000:]
    plain, speculative, ours, merged = map(json.loads, done.stdout.splitlines())
    for other in (speculative, merged):
        difference, clear, same = compare(plain, other)
        assert 0 < difference < 0.1
        assert clear > 0.4
        assert same > 0.95
    assert ours == 1
    assert "shared experts with a gate are not merged: the other experts are chosen by vLLM's router" in done.stderr
    assert "shared experts are computed as one more expert" in done.stderr
