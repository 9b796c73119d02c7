"""What the workers of a run make once, and share."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tests.jit.conftest import forget, set_variables


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """Returns a folder that `build` fills, in the first worker that needs it; the others wait."""
    own = factory.getbasetemp()
    common = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = common / name
    with FileLock(common / f"{name}.lock"):
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(dir=common))
            build(unfinished)
            unfinished.rename(folder)
    return folder


def every_kernel(factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with `cache`, where `fp8moe-warmup` has compiled every kernel, and its `report.json`."""

    def fill(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            set_variables(patch, FP8MOE_CACHE_DIR=folder / "cache")
            from warmup.__main__ import main

            assert main(["--json", str(folder / "report.json")]) == 0
        forget()

    return built_once(factory, "every_kernel", fill)
