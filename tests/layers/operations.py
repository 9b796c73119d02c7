"""Counts what code does with torch: on a GPU, launches of kernels and waits for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh")
WAIT = ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__")


@dataclass
class Operations:
    launches: int = 0
    waits: int = 0


@contextmanager
def counted() -> Iterator[Operations]:
    """Counts the operations of a block, without views of tensors."""
    found = Operations()

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.launches += not op.is_view and op.overloadpacket.__name__ not in ALLOCATE
            return op(*args, **(kwargs or {}))

    class Waits(TorchFunctionMode):
        def __torch_function__(self, call: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.waits += call.__name__ in WAIT
            return call(*args, **(kwargs or {}))

    with Waits(), Launches():
        yield found
