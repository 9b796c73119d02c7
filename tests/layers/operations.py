"""Counts what code does with torch: on a GPU, launches of kernels and waits for them, and memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_LAUNCH = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh", "is_pinned")
WAIT = ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__")


@dataclass
class Operations:
    launches: int = 0
    waits: int = 0


@contextmanager
def counted(device: str) -> Iterator[Operations]:
    """Counts the operations of a block, without views of tensors: launches with a tensor of a device, and all waits."""
    found = Operations()

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            tensors = (leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor))
            launches = not op.is_view and op.overloadpacket.__name__ not in NO_LAUNCH
            found.launches += launches and any(tensor.device.type == device for tensor in tensors)
            return result

    class Waits(TorchFunctionMode):
        def __torch_function__(self, call: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.waits += call.__name__ in WAIT
            return call(*args, **(kwargs or {}))

    with Waits(), Launches():
        yield found


@dataclass
class Memory:
    peak: int = 0  # bytes


@contextmanager
def held(device: str) -> Iterator[Memory]:
    """Measures how much memory the tensors take that a block makes on a device, the meta device, too."""
    found, storages = Memory(), dict[int, tuple[StorageWeakRef, int]]()

    class Storages(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given, result = storages_of((args, kwargs)), op(*args, **(kwargs or {}))
            for key, storage in storages_of(result).items():
                if key not in given and storage.device.type == device:
                    storages[key] = StorageWeakRef(storage), storage.nbytes()
            for key in [key for key, (reference, _) in storages.items() if reference.expired()]:
                del storages[key]
            found.peak = max(found.peak, sum(size for _, size in storages.values()))
            return result

    with Storages():
        yield found


def storages_of(tree: Any) -> dict[int, torch.UntypedStorage]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
