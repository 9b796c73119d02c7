"""An empty kernel cache, and a csrc of one small kernel that compiles in milliseconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda.bindings import nvrtc
from cuda.pathfinder import DynamicLibNotFoundError

from fp8moe_plugin.jit import bundle, compiler
from fp8moe_plugin.jit.compiler import nvrtc_version
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.settings import settings

SOURCE = 'extern "C" __global__ void tiny(int* out) { *out = VALUE; }'


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that is going to be the cache."""
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=tmp_path / "cache")
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: {"tiny.cu": SOURCE}[name])
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From now on libnvrtc cannot be loaded."""

    def fail() -> None:
        raise DynamicLibNotFoundError('Failure finding "libnvrtc.so.13": \x1b[31m')

    monkeypatch.setattr(nvrtc, "nvrtcVersion", fail)
    nvrtc_version.cache_clear()
    yield
    nvrtc_version.cache_clear()


def set_variables(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    """Environment variables, as a process that starts now would read them."""
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    forget()


def forget() -> None:
    settings.cache_clear()
    bundle._read_once.cache_clear()
    log_once.cache_clear()
