"""Stands in for torchvision, whose builds in the package index need torch with CUDA.

SGLang and transformers import its names at start; a text model calls none of them.
"""

import enum
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(enum.Enum):
    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


class Stub(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*_: object, **__: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} was called, but this is a stub for tests on a CPU")

        return function


for name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    module = Stub(f"{__name__}.{name}")
    module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
    module.InterpolationMode, module.ImageReadMode = InterpolationMode, ImageReadMode  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)
