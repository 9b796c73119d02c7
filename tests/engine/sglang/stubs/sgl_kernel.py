"""Stands in for sglang-kernel, which the package index does not have for CPUs.

SGLang imports its names; plain prefill and decode on a CPU call none.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but this is a stub of sgl_kernel for tests on a CPU")

    kernel.__name__ = name
    return kernel
