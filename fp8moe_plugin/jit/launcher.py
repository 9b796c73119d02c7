"""Preparation of launches for torch's current stream, so that a call of a whole layer is one call of C."""

import functools
import struct
from collections.abc import Callable, Iterable, Iterator

import torch

from fp8moe_plugin.formats.activation import ActivationNumbers
from fp8moe_plugin.jit.driver import INVALID_CONTEXT, bind_context, check, encode, load, shared_memory
from fp8moe_plugin.jit.launch import Argument, Chunks, Launch, PerGroup, Slot, TensorMap
from fp8moe_plugin.jit.sequence import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, Patch, PreparedLaunch, make_sequence
from fp8moe_plugin.plan.parameters import K_GROUPS, PARAMETERS, Kind

NUMBERS = f"{len(ActivationNumbers._fields)}f"
FORMATS = {  # of `struct`, for each kind of parameter
    Kind.MAP: f"{TENSOR_MAP_BYTES}s",
    Kind.POINTER: "P",
    Kind.INT: "i",
    Kind.FLOAT: "f",
    Kind.MAPS: f"{K_GROUPS * TENSOR_MAP_BYTES}s",
    Kind.INTS: f"{K_GROUPS * struct.calcsize('i')}s",
    Kind.ACTIVATION: f"{struct.calcsize(NUMBERS)}s",
}
UNKNOWN_ADDRESS = 2**40  # placeholder in descriptors until a call provides the address

Prepared = Callable[[tuple[int, ...]], None]


def prepare(launches: Iterable[Launch], device_index: int) -> Prepared:
    """Returns a callable that launches these kernels on the device's current stream, given the slots' addresses.

    Kernels are compiled and loaded here if necessary. The callable is thread-safe. It raises `LaunchError` if the
    driver refuses a launch.

    Raises:
        CompileError: a kernel does not compile.
        LaunchError: the driver refuses a kernel or a tensor map, or a kernel is not loaded yet while the stream is
            being captured.
        struct.error: the arguments do not match the kinds of the kernel's parameters, or do not fit.
        ValueError: the parameters of all launches take more than the 8 KiB of a sequence.
    """
    launches, template, prepared = tuple(launches), bytearray(), []
    patches: list[Patch] = []
    with torch.cuda.device(device_index):
        for launch in launches:
            template.extend(bytes(-len(template) % TENSOR_MAP_ALIGNMENT))
            packer, offsets = layout(launch.key.source)
            begins = tuple(len(template) + offset for offset in offsets)
            template.extend(packer.pack(*_known(launch.args, begins, patches)))
            function = int(load(launch.key, device_index))
            prepared.append(_prepared(launch, function, shared_memory(launch.key, device_index), begins))
    sequence = make_sequence(bytes(template), prepared, patches)

    def run(addresses: tuple[int, ...]) -> None:
        if device_index != torch._C._cuda_getDevice():
            with torch.cuda.device(device_index):
                return run(addresses)
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        refusal = sequence.run(addresses, stream)
        if refusal == (INVALID_CONTEXT, 0):  # the first CUDA call of this thread
            bind_context(device_index)
            refusal = sequence.run(addresses, stream)
        if refusal:
            status, number = refusal
            check(status, f"launch of {launches[number].key.source} with grid {launches[number].grid}")

    return run


def _prepared(launch: Launch, function: int, smem_bytes: int, parameters: tuple[int, ...]) -> PreparedLaunch:
    x, y = launch.grid if isinstance(launch.grid, tuple) else (launch.grid, 1)
    return PreparedLaunch(function, x, y, launch.key.threads, smem_bytes, launch.pdl, launch.cluster, parameters)


def _known(args: Iterable[Argument], begins: Iterable[int], patches: list[Patch]) -> Iterator[bytes | int | float]:
    """Yields the arguments with placeholders for the addresses of slots, and adds a patch for each of them."""
    for at, argument in zip(begins, args, strict=False):  # `struct` refuses a wrong number of arguments
        if isinstance(argument, int | float):
            yield argument
        elif isinstance(argument, Slot):
            patches.append(Patch(at, argument.index, argument.offset, is_map=False))
            yield 0
        elif isinstance(argument, ActivationNumbers):
            yield struct.pack(NUMBERS, *argument)
        elif isinstance(argument, Chunks):
            if isinstance(address := argument.address, Slot):
                patches.append(Patch(at, address.index, address.offset, is_map=False))
                address = 0
            yield packed_chunks(argument, address)
        elif isinstance(argument, PerGroup):
            yield _known_elements(argument, at, patches)
        else:
            yield _known_map(argument, at, patches)


def _known_map(tensor_map: TensorMap, at: int, patches: list[Patch]) -> bytes:
    if not isinstance(address := tensor_map.address, Slot):
        return encode(tensor_map)
    patches.append(Patch(at, address.index, address.offset, is_map=True))
    return encode(tensor_map._replace(address=UNKNOWN_ADDRESS))


def packed_chunks(chunks: Chunks, address: int) -> bytes:
    """Returns the WeightMap of csrc/formats/weights_mxfp4.cuh, which `struct` pads to the size of a descriptor."""
    return struct.pack("Piii", address, chunks.steps, chunks.further, chunks.groups)


def _known_elements(argument: PerGroup, at: int, patches: list[Patch]) -> bytes:
    """Returns the elements as bytes. `struct` pads them with zeros to `K_GROUPS` elements.

    Raises:
        struct.error: there are more than `K_GROUPS` elements.
    """
    if len(argument.elements) > K_GROUPS:
        raise struct.error(f"{len(argument.elements)} groups, a launch takes up to {K_GROUPS}")
    parts = []
    for i, element in enumerate(argument.elements):
        if isinstance(element, int):
            parts.append(struct.pack("i", element))
        else:
            parts.append(_known_map(element, at + i * TENSOR_MAP_BYTES, patches))
    return b"".join(parts)


@functools.cache
def layout(source: str) -> tuple[struct.Struct, tuple[int, ...]]:
    """Returns a `struct.Struct` for the arguments of a kernel, and the offset of each argument."""
    formats = [FORMATS[parameter.kind] for parameter in PARAMETERS[source]]
    ends = [struct.calcsize("".join(formats[: i + 1])) for i in range(len(formats))]
    begins = tuple(end - struct.calcsize(form) for end, form in zip(ends, formats, strict=True))
    return struct.Struct("".join(formats)), begins
