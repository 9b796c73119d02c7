"""Checkpoints with nothing but config.json, and a kernel cache of its own for each test."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.shapes import Model
from tests.checkpoint.published import PATHS, SERVED
from tests.jit.conftest import forget, set_variables
from tests.shared import every_kernel


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a model."""
    folders = tmp_path_factory.mktemp("checkpoints")
    for name in SERVED:
        (folders / name).mkdir()
        shutil.copy(PATHS[name], folders / name / "config.json")
    return lambda name: folders / name


@pytest.fixture(scope="session")
def models(checkpoint: Callable[[str], Path]) -> dict[str, Model]:
    return {name: read_model(checkpoint(name)) for name in SERVED}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that is going to be the cache."""
    for name in ("FP8MOE_BUNDLE", "FP8MOE_JIT"):
        monkeypatch.delenv(name, raising=False)
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=tmp_path / "cache")
    yield tmp_path / "cache"
    forget()


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with every kernel there is."""
    return every_kernel(tmp_path_factory) / "cache"


@pytest.fixture
def full_cache(filled: Path, cache: Path) -> Path:
    """A cache of the test's own with every kernel there is."""
    shutil.copytree(filled, cache)
    return cache
