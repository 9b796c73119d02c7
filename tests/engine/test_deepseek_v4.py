"""A tiny DeepSeek-V4 with every kind of layer, beside vLLM's own kernels for its experts in MXFP4, on a CPU."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoints.answers import LARGEST_DIFFERENCE, compare, same_history
from tests import faults
from tests.conftest import has_hopper
from tests.engine.conftest import Start
from tests.engine.tiny_deepseek_v4 import write

pytestmark = [
    pytest.mark.skipif(has_hopper(), reason="on a GPU, vLLM's DeepSeek-V4 needs packages that are not installed here"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm.models.deepseek_v4.cpu") is None, reason="needs vLLM 0.32 or newer"
    ),
    pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's own kernels for it need AMX"),
]


def answers(start: Start, folder: Path, *engines: str, merged: bool) -> list[Any]:
    """merged: whether one of these engines computes shared experts together with the others, as block FP8."""
    done = start("generate_deepseek_v4", folder, *engines, TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="0")
    assert done.returncode == 0, done.stderr[-4000:]
    assert ("shared experts are computed as one more expert" in done.stderr) == merged
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_same(one: Any, other: Any) -> None:
    mine, theirs = (x - x.mean(1, keepdim=True) for x in same_history(one, other))
    differences = (mine - theirs).norm(dim=1) / theirs.norm(dim=1)
    _, clear, same = compare(one, other)
    # The median: for some tokens rounding decides which is the last of 6 of 256 experts.
    assert differences.median() < LARGEST_DIFFERENCE
    assert clear > 0.5
    assert same > 0.95


def test_experts_in_mxfp4_answer_as_under_vllm(start: Start, tmp_path: Path) -> None:
    write(tmp_path / "fp4", fp8=False)
    check_same(*answers(start, tmp_path, "fp4,fp8moe", "fp4,", merged=False))


@pytest.mark.skipif(not faults.FULL, reason="only with FULL_COUNTS=1")
def test_each_form_of_experts_gives_the_same_answers(start: Start, tmp_path: Path) -> None:
    """Recoded, converted, converted with a separate shared expert, and packed, where it always is separate."""
    for name in ("fp4", "fp8"):
        write(tmp_path / name, fp8=name == "fp8")
    separate = "fp8,fp8moe,FP8MOE_MERGE_SHARED_EXPERT=0"
    recoding = "fp4,fp8moe,FP8MOE_FP4_EXPERTS=fp8"
    engines = recoding, "fp8,fp8moe", separate, "fp4,fp8moe"
    recoded, stored, apart, kept = answers(start, tmp_path, *engines, merged=True)
    assert recoded == stored
    assert kept == apart
    check_same(stored, apart)
