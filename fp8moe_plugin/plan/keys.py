"""The key of a kernel: its source, its macros, and the GPUs that it runs on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8moe_plugin.plan.parameters import ARGUMENTS

HOPPER = (9, 0)  # the only compute capability with the instructions of the kernels in csrc
SM90 = "sm_90a"  # the target of these kernels; plan/triton/catalog.py has the other targets
KIB = 1024


@dataclass(frozen=True)
class KernelKey:
    """One kernel to compile: `csrc/<source>.cu`, whose entry point is named `<source>` too.

    It is compiled with the macros `defines`, THREADS, SMEM_BYTES and `sm90.constants.MACROS`, and launched with this
    many threads and bytes of dynamic shared memory. The source defines the layout of shared memory, and does not
    compile if the layout needs more than SMEM_BYTES.
    """

    source: str
    defines: tuple[tuple[str, int], ...] = ()
    threads: int = 128
    smem_bytes: int = 0
    target: str = SM90

    @property
    def arguments(self) -> Callable[..., tuple[Any, ...]]:
        """A callable that packs the keyword arguments of a launch; it raises TypeError if one is missing or unknown."""
        return ARGUMENTS[self.source]

    def __str__(self) -> str:
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.defines)])


KernelSet = dict[KernelKey, str]  # kernels, each with the reason that `warmup list` prints
