"""Links between GPUs, from an NVML that is not there."""

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import pytest

from fp8moe_plugin.layers.nvlink import has_nvlinks
from fp8moe_plugin.logs import log_once

NOT_FOUND, NOT_SUPPORTED = 6, 5


class Nvml:
    """Some of these GPUs are connected by NVLink; a handle is 1 + the place of a GPU."""

    def __init__(self, links: set[tuple[str, str]], init: int = 0) -> None:
        self._gpus, self._links, self._init = ["a", "b", "c"], links, init
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += not self._init
        return self._init

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        gpu = uuid.decode().removeprefix("GPU-")
        if gpu not in self._gpus or not uuid.startswith(b"GPU-"):
            return NOT_FOUND
        handle._obj.value = 1 + self._gpus.index(gpu)
        return 0

    def nvmlDeviceGetP2PStatus(self, gpu: Any, other: Any, capability: int, status: Any) -> int:
        pair = self._gpus[gpu.value - 1], self._gpus[other.value - 1]
        status._obj.value = 0 if capability == 2 and pair in self._links else NOT_SUPPORTED
        return 0


Use = Callable[..., Nvml]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    def replace(*arguments: Any) -> Nvml:
        nvml = Nvml(*arguments)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
        return nvml

    return replace


@pytest.mark.parametrize(
    ("others", "linked"), [([], True), (["b"], True), (["b", "c"], False), (["c"], False), (["elsewhere"], False)]
)
def test_each_pair_needs_a_link(use: Use, others: list[str], linked: bool) -> None:
    nvml = use({("a", "b"), ("b", "c")})
    assert has_nvlinks("a", others) == linked
    assert nvml.open == 0


def test_a_machine_without_nvml(use: Use, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    use({("a", "b")}, 9)
    assert not has_nvlinks("a", ["b"])

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with caplog.at_level(logging.WARNING, "fp8moe"):
        assert not has_nvlinks("a", ["b"])
    assert "(nvmlInit returns 9)" in caplog.text
    assert "(libnvidia-ml.so.1: cannot open shared object file). In a container, add `utility`" in caplog.text
