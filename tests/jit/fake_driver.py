"""A CUDA driver that keeps the launches it is asked for, each as the real one would read it."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = [(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "smem")] + [
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
REPLACE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Seen(NamedTuple):
    """A launch as the driver reads it."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    stream: int | None
    attributes: list[tuple[int, list[int]]]
    parameters: list[bytes]


class Driver:
    """Writes the address of a tensor map to its first 8 bytes."""

    def __init__(self, sizes: Callable[[int], list[int]]) -> None:
        """`sizes`: the bytes of each parameter of a function."""
        self.sizes = sizes
        self.seen: list[Seen] = []
        self.status, self.refuses = 0, 10**9  # the launch that gets the status
        self.cuLaunchKernelEx, self.cuTensorMapReplaceAddress = LAUNCH(self.launch), REPLACE(self.replace)
        self.replace_status = 0

    def launch(self, config: Any, function: int, parameters: Any, extra: int | None) -> int:
        assert not extra
        if len(self.seen) == self.refuses:
            return self.status
        c = config.contents
        values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(self.sizes(function))]
        attributes = [(c.attributes[i].id, list(c.attributes[i].value[:3])) for i in range(c.num_attributes)]
        grid, block = (c.gx, c.gy, c.gz), (c.bx, c.by, c.bz)
        self.seen.append(Seen(function, grid, block, c.smem, c.stream, attributes, values))
        return 0

    def replace(self, tensor_map: int, address: int) -> int:
        assert tensor_map % 64 == 0, "as the driver demands"
        ctypes.memmove(tensor_map, ctypes.byref(ctypes.c_uint64(address)), 8)
        return self.replace_status
