"""What the launcher passes to the driver, and its errors if the driver refuses; the GPU tests run the rest."""

import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver

import fp8moe_plugin
from fp8moe_plugin.errors import LaunchError
from fp8moe_plugin.formats.activation import ActivationNumbers
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.jit import launcher, sequence
from fp8moe_plugin.jit.driver import check
from fp8moe_plugin.jit.launch import Address, Argument, Chunks, Launch, PerGroup, Slot, TensorMap
from fp8moe_plugin.jit.launcher import FORMATS
from fp8moe_plugin.jit.sequence import TENSOR_MAP_BYTES
from fp8moe_plugin.launches.kernel_sets import all_kernels
from fp8moe_plugin.plan.keys import SM90, KernelKey
from fp8moe_plugin.plan.parameters import ARGUMENTS, K_GROUPS, PARAMETERS, Kind
from fp8moe_plugin.plan.sm90.catalog import (
    dense_gemm_few_rows_key,
    grouped_gemm_few_rows_key,
    k_grouped_gemm_key,
    route_key,
)
from fp8moe_plugin.plan.triton.catalog import TARGETS, quantize_key
from fp8moe_plugin.plan.triton.signatures import TRITON_SIGNATURES
from tests import helpers as h
from tests.jit.fake_driver import Driver

STREAM, FUNCTION = 0x7F00_0000_1000, 0x5500_0000_2000
SHARED = 4321  # of a kernel whose key does not say, as Triton's


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for torch's current device."""
    current = SimpleNamespace(index=0)

    class Switch:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current.index = current.index, self.index

        def __exit__(self, *_: object) -> None:
            current.index = self.before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current.index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Switch)
    return current


@pytest.fixture
def fake(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver that takes every launch of the catalogue's kernels, and encodes a tensor map as its own text."""
    keys = [*all_kernels(), *all_kernels("sm_90")]
    numbers = {key: FUNCTION + i for i, key in enumerate(keys)}

    def sizes(function: int) -> list[int]:
        return [struct.calcsize(FORMATS[parameter.kind]) for parameter in PARAMETERS[keys[function - FUNCTION].source]]

    driver = Driver(sizes)
    monkeypatch.setattr(sequence, "libcuda", lambda: driver)
    monkeypatch.setattr(launcher, "load", lambda key, index: numbers[key])
    monkeypatch.setattr(launcher, "shared_memory", lambda key, index: key.smem_bytes or SHARED)
    monkeypatch.setattr(launcher, "encode", encoded)
    return driver


def encoded(tensor_map: TensorMap) -> bytes:
    """Returns the address in 8 bytes, then the other fields."""
    return tensor_map.address.to_bytes(8, "little") + f"{tensor_map[1:]}".ljust(120).encode()


def arguments(key: KernelKey, first: int, slots: bool) -> tuple[tuple[Argument, ...], tuple[int, ...]]:
    """Another value for each parameter, so that an exchange shows, and the addresses of the slots in it."""
    addresses = tuple(2**47 + (first + i) * 4096 for i in range(len(PARAMETERS[key.source])))

    def address(i: int) -> Address:
        return Slot(i, i * 16) if slots else 0 if i == 1 else addresses[i] + i * 16

    kinds: dict[Kind, Callable[[int], Argument]] = {
        Kind.MAP: lambda i: TensorMap(address(i), (first, i), (128,), (128, 8), 1, 128),
        Kind.POINTER: address,
        Kind.INT: lambda i: (-1) ** i * (2**31 - 1 - first - i),
        Kind.FLOAT: lambda i: first + i + 0.5,
        Kind.MAPS: lambda i: PerGroup(tuple(kinds[Kind.MAP](i + j) for j in range(3))),
        Kind.INTS: lambda i: PerGroup(tuple(range(first + i, first + i + K_GROUPS))),
        Kind.ACTIVATION: lambda i: ActivationNumbers(*(first + i + 0.5 * j for j in range(5))),
    }
    return tuple(kinds[parameter.kind](i) for i, parameter in enumerate(PARAMETERS[key.source])), addresses


def as_read(argument: Argument, addresses: tuple[int, ...], kind: Kind) -> bytes:
    """Returns what the driver reads of an argument."""
    known = h.resolved(argument, addresses)
    if isinstance(known, TensorMap):
        return encoded(known)
    if isinstance(known, PerGroup):
        parts = (encoded(e) if isinstance(e, TensorMap) else struct.pack("i", e) for e in known.elements)
        return b"".join(parts).ljust(struct.calcsize(FORMATS[kind]), b"\0")
    if isinstance(known, ActivationNumbers):
        return struct.pack("5f", *known)
    return struct.pack(FORMATS[kind], known)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("key", [*all_kernels(), *all_kernels("sm_90")], ids=str)
def test_the_driver_reads_each_argument_where_the_kernel_has_it(fake, key, slots):
    for first, grid in ((1, 132), (40, (3, 5)), (7, 1)):
        args, addresses = arguments(key, first, slots)
        launcher.prepare([Launch(key, grid, args)], 0)(addresses)
        seen = fake.seen.pop()
        kinds = [parameter.kind for parameter in PARAMETERS[key.source]]
        assert seen.parameters == [as_read(*each) for each in zip(args, [addresses] * len(args), kinds, strict=True)]
        assert seen.grid == (*(grid if isinstance(grid, tuple) else (grid, 1)), 1)
        assert (seen.block, seen.smem, seen.stream) == ((key.threads, 1, 1), key.smem_bytes or SHARED, STREAM)
        assert not seen.attributes


def test_triton_gets_the_pointers_that_it_adds_to_the_parameters(fake):
    key = quantize_key("sm_90", ue8m0=False)
    arguments = key.arguments(x=1, q=2, scales=3, tokens=4, k=5, scale_row=6, scale_k_block=7)
    launcher.prepare([Launch(key, 1, arguments, pdl=True)], 0)(())
    (seen,) = fake.seen
    numbers = [int.from_bytes(value, "little") for value in seen.parameters]
    assert (numbers, [len(value) for value in seen.parameters]) == ([*range(1, 8), 0, 0], [8] * 3 + [4] * 4 + [8] * 2)
    assert [kind for kind, _ in seen.attributes] == [6]  # programmatic stream serialization


def test_launches_are_made_in_their_order_with_what_each_asks_for(fake):
    keys = route_key(), dense_gemm_few_rows_key(), grouped_gemm_few_rows_key()
    launches, expected = [], []
    for i, (key, pdl, cluster) in enumerate(zip(keys, (False, True, True), (1, 6, 1), strict=True)):
        args, addresses = arguments(key, 100 * i, False)
        launches.append(Launch(key, i + 1, args, pdl, cluster))
        expected.append(as_read(args[-1], addresses, PARAMETERS[key.source][-1].kind))
    launcher.prepare(launches, 0)(())
    assert [seen.parameters[-1] for seen in fake.seen] == expected
    assert [seen.grid[0] for seen in fake.seen] == [1, 2, 3]
    assert [len(seen.attributes) for seen in fake.seen] == [0, 2, 1]
    assert fake.seen[1].attributes[1][1] == [6, 1, 1]


def test_a_launch_for_another_device_is_made_there(fake, device):
    for index in (0, 1, 0):
        launcher.prepare([Launch(route_key(), 1, arguments(route_key(), 1, False)[0])], index)(())
    assert [seen.stream for seen in fake.seen] == [STREAM, STREAM + 1, STREAM]
    assert device.index == 0


def test_a_thread_without_a_context_gets_one(fake, monkeypatch):
    """A thread that has not called CUDA yet is refused; it binds the device's context and tries again."""
    bound = []

    def bind(index: int) -> None:
        bound.append(index)
        fake.refuses = 10**9

    monkeypatch.setattr(launcher, "bind_context", bind)
    fake.status, fake.refuses = int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT), 0
    launcher.prepare([Launch(route_key(), 1, arguments(route_key(), 1, False)[0])] * 2, 0)(())
    assert (bound, len(fake.seen)) == ([0], 2)


def test_what_does_not_fit_a_parameter_is_not_prepared(fake):
    key = route_key()
    args = arguments(key, 1, False)[0]
    with pytest.raises(struct.error, match="'i' format requires"):
        launcher.prepare([Launch(key, 1, (*args[:-1], 2**31))], 0)
    with pytest.raises(struct.error, match="17 items"):
        launcher.prepare([Launch(key, 1, args[:-1])], 0)


def test_more_groups_than_a_launch_takes_are_not_prepared(fake):
    key = k_grouped_gemm_key()
    args = key.arguments(*arguments(key, 1, False)[0])
    many = PerGroup(tuple(range(K_GROUPS + 1)))
    with pytest.raises(struct.error, match=f"{K_GROUPS + 1} groups, a launch takes up to {K_GROUPS}"):
        launcher.prepare([Launch(key, 1, args._replace(indices=many))], 0)


@pytest.mark.parametrize("address", [4096, Slot(0, 16)])
def test_chunks_take_the_place_of_a_descriptor(fake, address):
    key = grouped_gemm_few_rows_key(PACKED_MXFP4)
    args = key.arguments(*arguments(key, 1, False)[0])._replace(b_map=Chunks(address, 9, 1, 4))
    launcher.prepare([Launch(key, 1, args)], 0)((4080,))
    (seen,) = fake.seen
    of_chunks = seen.parameters[list(args._fields).index("b_map")]
    assert of_chunks == struct.pack("Piii", 4096, 9, 1, 4).ljust(TENSOR_MAP_BYTES, b"\0")


def test_slots_of_one_tensor_have_offsets():
    assert Slot(3) + 16 + 256 == Slot(3, 272)


def signatures() -> dict[str, list[tuple[Kind, str]]]:
    """Returns the kind and the name of each parameter of the kernels in csrc."""
    kinds = {"TensorMap": Kind.MAP, "WeightMap": Kind.MAP, "int": Kind.INT, "float": Kind.FLOAT}
    kinds |= {"TensorMaps": Kind.MAPS, "Ints": Kind.INTS, "Activation": Kind.ACTIVATION}
    found = {}
    for path in (Path(fp8moe_plugin.__file__).parent / "csrc").glob("*.cu"):
        for kernel, text in re.findall(r'extern "C" __global__ [^;{]*?(\w+)\(([^()]*)\) \{', path.read_text()):
            parameters = [parameter.split() for parameter in text.split(",")]
            found[kernel] = [(Kind.POINTER if "*" in "".join(p) else kinds[p[-2]], p[-1]) for p in parameters]
    return found


def test_the_parameters_are_those_of_the_sources():
    """Including their names, so that pointers swapped in a launch are detected there."""
    of_csrc = {kernel: list(map(tuple, p)) for kernel, p in PARAMETERS.items() if kernel not in TRITON_SIGNATURES}
    assert of_csrc == signatures()


def test_every_kernel_has_named_arguments():
    keys = [key for target in (SM90, *TARGETS) for key in all_kernels(target)]
    assert {key.source for key in keys} == PARAMETERS.keys() == ARGUMENTS.keys()
    for key in keys:
        names = [parameter.name for parameter in PARAMETERS[key.source]]
        assert key.arguments(**{name: i for i, name in enumerate(names)}) == tuple(range(len(names)))


def test_a_refused_launch_names_the_kernel_and_the_grid(fake, monkeypatch):
    fake.status, fake.refuses = int(driver.CUresult.CUDA_ERROR_INVALID_VALUE), 1
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (None, b"the reason"))
    args = arguments(route_key(), 1, False)[0]
    run = launcher.prepare([Launch(route_key(), 1, args), Launch(route_key(), (0, 3), args)], 0)
    with pytest.raises(
        LaunchError, match=r"refused the launch of route with grid \(0, 3\): the reason .*INVALID_VALUE"
    ):
        run(())


def test_a_refusal_of_the_driver_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (None, b"the reason"))
    with pytest.raises(LaunchError, match=r"refused the load of tiny: the reason .*nvidia-smi.*report this"):
        check(driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None, "load of tiny")
