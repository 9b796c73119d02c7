"""Folders that the workers of a run share."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """A folder that `build` fills, in the first worker that needs it; the others wait."""
    own = factory.getbasetemp()
    common = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = common / name
    with FileLock(common / f"{name}.lock"):
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(dir=common))
            build(unfinished)
            unfinished.rename(folder)
    return folder
