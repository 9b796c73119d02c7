"""SGLang's block of DeepSeek-V3: who multiplies by `routed_scaling_factor`; the shared expert as one of the experts.
And its block of gpt-oss.

On a GPU the experts owe the factor, on a CPU SGLang's block applies it, so only a GPU shows that ours do.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.engine.sglang.conftest import ENVIRONMENT, ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang (make sglang)")

ROUNDED = 0.06  # relative error of FP8; without the factor it is 0.4 and more


def measured(device: str, experts: int, *fused: str) -> dict[str, Any]:
    environment = os.environ | (ENVIRONMENT if device == "cpu" else {})
    return printed("moe_block", environment, device, str(experts), *fused)


def printed(module: str, environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Returns what a module of this folder prints as JSON."""
    command = [sys.executable, "-m", f"tests.layers.sglang.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.gpu
def test_on_a_gpu_the_experts_multiply_by_the_routed_scaling_factor():
    found = measured("cuda", 32)
    assert (found["experts"], found["topk"]) == (32, 8)
    assert found["error"] < ROUNDED
    assert found["unscaled"] > 5 * ROUNDED


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_shared_expert_fused_with_the_routed_ones_is_one_more(device):
    found = measured(device, 256, "fused")
    assert (found["experts"], found["topk"]) == (257, 9)
    assert found["error"] < ROUNDED


def test_the_block_of_gpt_oss_computes_its_experts():
    found = printed("gpt_oss_block", os.environ | ENVIRONMENT)
    for form in ("fp8", "mxfp4"):
        assert found[form]["error"] < ROUNDED
        assert found[form]["name"] == "mxfp4"
