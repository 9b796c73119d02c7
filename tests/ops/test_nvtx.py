"""FP8MOE_NVTX=1 puts a range around each layer; without it, ops are unchanged."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from fp8moe_plugin.ops import torch_ops
from tests import helpers as h


@pytest.fixture
def nvtx() -> Iterator[None]:
    with h.environment("FP8MOE_NVTX", "1"):
        yield


def impl(*args: object) -> int:
    return len(args)


def test_an_op_is_itself_by_default() -> None:
    assert torch_ops.in_range("linear", impl) is impl


def test_a_range_has_the_name_and_the_sizes_of_its_op(nvtx: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []

    @contextlib.contextmanager
    def record(name: str) -> Iterator[None]:
        ranges.append(name)
        yield
        ranges.append("end")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range", record)
    assert torch_ops.in_range("fused_moe", impl)(torch.empty(5, 256), torch.empty(4, 512, 256), None, True) == 4
    assert ranges == ["fp8moe.fused_moe 5x256, 4x512x256", "end"]


def test_without_cuda_a_line_says_that_there_are_no_ranges(
    nvtx: None, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [torch_ops.in_range(op, impl) for op in ("linear", "fused_moe")] == [impl, impl]
    assert plugin_log.messages == ["fp8moe: FP8MOE_NVTX=1 is ignored, this torch is built without CUDA and NVTX"]
