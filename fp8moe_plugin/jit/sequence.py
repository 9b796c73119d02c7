"""Several kernel launches as one call: `Sequence`, in C if the extension is installed, else with cuda-bindings.

    sequence = make_sequence(template, launches, patches)
    refused = sequence.run(addresses, stream)

`template` holds the parameters of all launches. A call copies it and writes the address of each patch into the copy.
"""

import ctypes
import functools
import importlib
import logging
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from fp8moe_plugin.logs import log_once

TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64
WITHOUT_EXTENSION = (
    "without the C extension of the launcher, each kernel launch outside CUDA graphs costs the host about 20 us more. "
    "Install a wheel, or build with a C compiler"
)


class PreparedLaunch(NamedTuple):
    function: int  # CUfunction
    grid_x: int
    grid_y: int
    threads: int
    smem_bytes: int
    pdl: bool
    cluster: int
    parameters: tuple[int, ...]  # the offset of each parameter in the template


class Patch(NamedTuple):
    """A place for the address `addresses[slot] + offset` of a call."""

    at: int  # offset in the template, in bytes
    slot: int
    offset: int
    is_map: bool  # the address of a CUtensorMap, else a pointer


Refusal = tuple[int, int]  # the driver's status, and the number of kernels launched before it


class Sequence(Protocol):
    def run(self, addresses: tuple[int, ...], stream: int) -> Refusal | None:
        """Launch the kernels in order, until the driver refuses one. Thread-safe.

        Raises:
            ValueError: there are fewer addresses than slots.
        """
        ...


def make_sequence(template: bytes, launches: list[PreparedLaunch], patches: list[Patch]) -> Sequence:
    """Returns a sequence. Raises ValueError if there are more parameters than fit into the extension's buffer."""
    try:
        native = extension()
    except ImportError as error:
        log_once(logging.WARNING, f"{WITHOUT_EXTENSION} ({error})")
        return BindingsSequence(template, launches, patches)
    cuda = libcuda()
    launch, replace = address_of(cuda.cuLaunchKernelEx), address_of(cuda.cuTensorMapReplaceAddress)
    sequence: Sequence = native.Sequence(template, launches, patches, launch, replace)
    return sequence


def extension() -> ModuleType:
    """Returns the C extension. Raises ImportError if it was not built."""
    return importlib.import_module("fp8moe_plugin.jit._sequence")


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class BindingsSequence:
    """`Sequence` with cuda-bindings, which take about 20 us per launch."""

    def __init__(self, template: bytes, launches: list[PreparedLaunch], patches: list[Patch]) -> None:
        self.template, self.launches, self.patches = template, launches, patches
        self.slots = max((patch.slot + 1 for patch in patches), default=0)

    def run(self, addresses: tuple[int, ...], stream: int) -> Refusal | None:
        if len(addresses) < self.slots:
            raise ValueError(f"{len(addresses)} addresses, {self.slots} are needed")
        buffer, begin = aligned_buffer(len(self.template))
        ctypes.memmove(begin, self.template, len(self.template))
        for at, slot, offset, is_map in self.patches:
            address = ctypes.c_void_p(addresses[slot] + offset)
            if not is_map:
                ctypes.memmove(begin + at, ctypes.byref(address), ctypes.sizeof(address))
            elif status := libcuda().cuTensorMapReplaceAddress(ctypes.c_void_p(begin + at), address):
                return status, 0
        for number, launch in enumerate(self.launches):
            if status := _launch(launch, begin, stream):
                return status, number
        del buffer  # the driver reads it until here
        return None


def _launch(launch: PreparedLaunch, begin: int, stream: int) -> int:
    """Launch a kernel whose parameters start at address `begin`. Returns the driver's status."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid_x, launch.grid_y, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes, config.hStream = launch.smem_bytes, stream
    config.attrs = _attributes(launch.pdl, launch.cluster)
    config.numAttrs = len(config.attrs)
    parameters = (ctypes.c_void_p * len(launch.parameters))(*(begin + offset for offset in launch.parameters))
    function = driver.CUfunction(launch.function)
    (status,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0)
    return int(status)


@functools.lru_cache(maxsize=64)
def _attributes(pdl: bool, cluster: int) -> list[Any]:
    from cuda.bindings import driver

    attributes, kinds = [], driver.CUlaunchAttributeID
    if pdl:
        attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.id, attribute.value = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value
        attributes.append(attribute)
    if cluster > 1:
        attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
        attribute.id, attribute.value = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value
        attributes.append(attribute)
    return attributes


@functools.cache
def libcuda() -> ctypes.CDLL:
    """Returns the driver's library: cuda-bindings may encode tensor maps into memory that is not aligned."""
    return ctypes.CDLL("libcuda.so.1")


def aligned_buffer(size: int) -> tuple[Any, int]:
    """Returns a buffer, and the address in it of `size` bytes with the alignment of a tensor map."""
    buffer = ctypes.create_string_buffer(size + TENSOR_MAP_ALIGNMENT)
    begin = ctypes.addressof(buffer)
    return buffer, begin + -begin % TENSOR_MAP_ALIGNMENT
