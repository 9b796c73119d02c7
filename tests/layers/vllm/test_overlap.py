"""vLLM's dual-batch overlap tells our ops how many multiprocessors they may take."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.v1.worker import gpu_ubatch_wrapper, ubatch_utils

from fp8moe_plugin.layers.vllm import compat

pytestmark = pytest.mark.seam

MODULE = next(m for m in (gpu_ubatch_wrapper, ubatch_utils) if hasattr(m, "deep_gemm_set_num_sms"))


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What DeepGEMM is told; what is changed in vLLM is undone."""
    told: list[int] = []
    monkeypatch.setattr(MODULE, "deep_gemm_set_num_sms", told.append)
    monkeypatch.setattr(MODULE, "has_deep_gemm", lambda: False)
    monkeypatch.setattr(MODULE, "SMControlContextManager", lambda **functions: functions["set_compute_sms"])
    monkeypatch.setattr(envs, "VLLM_DBO_COMM_SMS", 20, raising=False)
    return told


def limit_of_computation() -> Any:
    """Returns the function by which vLLM limits computation."""
    parallel = SimpleNamespace(enable_expert_parallel=False, enable_dbo=True, all2all_backend="")
    if hasattr(MODULE, "create_sm_control_context"):
        return MODULE.create_sm_control_context(parallel)
    return MODULE.UBatchWrapper._create_sm_control_context(SimpleNamespace(parallel_config=parallel))


def test_without_deepgemm_ours_are_told(theirs: list[int]) -> None:
    ours: list[int] = []
    compat.share_num_sms(ours.append)
    limit_of_computation()(112)
    assert (ours, theirs) == ([112], [])


def test_deepgemm_is_told_as_before(theirs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours: list[int] = []
    monkeypatch.setattr(MODULE, "has_deep_gemm", lambda: True)
    tell = ours.append
    for _ in range(2):  # a second model
        compat.share_num_sms(tell)
    limit_of_computation()(112)
    assert (ours, theirs) == ([112], [112])


def test_unless_they_are_asked_for_no_one_is_told(theirs: list[int]) -> None:
    limit_of_computation()(112)
    assert theirs == []
