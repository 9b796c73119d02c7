"""What the launcher hands to the driver, and what it says when that refuses; the GPU tests run the rest."""

import ctypes
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from cuda.bindings import driver

import fp8moe_plugin
from fp8moe_plugin.errors import LaunchError
from fp8moe_plugin.jit import launcher
from fp8moe_plugin.plan import KernelKey, all_kernels
from fp8moe_plugin.plan.catalog import dense_gemm_few_rows_key, grouped_gemm_few_rows_key, route_key
from fp8moe_plugin.plan.parameters import ARGUMENTS, PARAMETERS, Kind

STREAM, FUNCTION = 0x7F00_0000_1000, 0x5500_0000_2000
TYPES = {
    Kind.MAP: ctypes.c_char * launcher.TENSOR_MAP_BYTES,
    Kind.POINTER: ctypes.c_void_p,
    Kind.INT: ctypes.c_int,
}
CALL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(launcher.LaunchConfig),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


class Seen(NamedTuple):
    """A launch as the driver reads it."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    stream: int | None
    attributes: list[bytes]
    args: tuple[Any, ...]


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
def launches(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """What a driver that takes every launch reads of them."""
    seen: list[Seen] = []

    def read(config: Any, function: int, parameters: Any, extra: object) -> int:
        c = config.contents
        key = next(key for key in all_kernels() if launcher.load(key, 0) == function)
        kinds = [parameter.kind for parameter in PARAMETERS[key.source]]
        values = [ctypes.cast(parameters[i], ctypes.POINTER(TYPES[x])).contents for i, x in enumerate(kinds)]
        args = tuple(v.raw if isinstance(v, ctypes.Array) else v.value or 0 for v in values)
        grid, block = (c.gridDimX, c.gridDimY, c.gridDimZ), (c.blockDimX, c.blockDimY, c.blockDimZ)
        attributes = [bytes(c.attrs[i]) for i in range(c.numAttrs)]
        assert extra is None
        seen.append(Seen(function, grid, block, c.sharedMemBytes, c.hStream, attributes, args))
        return 0

    call = CALL(read)
    numbers = {key: FUNCTION + i for i, key in enumerate(all_kernels())}
    monkeypatch.setattr(launcher, "_thread", launcher._Thread())
    monkeypatch.setattr(launcher, "_libcuda", lambda: SimpleNamespace(cuLaunchKernelEx=call))
    monkeypatch.setattr(launcher, "_bind_context", lambda index: None)
    monkeypatch.setattr(launcher, "load", lambda key, index: numbers[key])
    return seen


def arguments(key: KernelKey, first: int) -> tuple[launcher.Argument, ...]:
    """Another value for each parameter, so that an exchange shows; the second address is none."""
    kinds: dict[str, Callable[[int], launcher.Argument]] = {
        Kind.MAP: lambda i: bytes([first + i]) * launcher.TENSOR_MAP_BYTES,
        Kind.POINTER: lambda i: 0 if i == 1 else 2**47 + (first + i) * 16,
        Kind.INT: lambda i: (-1) ** i * (2**31 - 1 - first - i),
    }
    return tuple(kinds[parameter.kind](i) for i, parameter in enumerate(PARAMETERS[key.source]))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("key", all_kernels(), ids=str)
def test_the_driver_reads_each_argument_where_the_kernel_has_it(launches, key, early):
    for first, grid in ((1, 132), (40, (3, 5)), (7, 1)):
        args = arguments(key, first)
        launcher.launch(key, grid, args, 0, early)
        seen = launches.pop()
        assert seen.args == args
        assert seen.grid == (*(grid if isinstance(grid, tuple) else (grid, 1)), 1)
        assert (seen.block, seen.smem, seen.stream) == ((key.threads, 1, 1), key.smem_bytes, STREAM)
        assert len(seen.attributes) == early


def test_early_launches_have_the_attribute_and_others_of_the_kernel_do_not(launches):
    key = route_key()
    for early in (True, False, True):
        launcher.launch(key, 1, arguments(key, 1), 0, early)
    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    size = ctypes.sizeof(launcher.LaunchAttribute)
    expected = ctypes.string_at(int(attribute.getPtr()), size)
    used = slice(0, 12)  # the id, padding and the int in the union
    assert [[a[used] for a in seen.attributes] for seen in launches] == [[expected[used]], [], [expected[used]]]


def test_blocks_of_a_cluster_are_an_attribute_beside_that_of_an_early_launch(launches):
    key = dense_gemm_few_rows_key()
    for cluster in (1, 6):
        launcher.launch(key, 12, arguments(key, 1), 0, True, cluster)
    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = 6, 1, 1
    attribute.value = value
    used = slice(0, 20)  # the id, padding and three ints in the union
    alone, beside = (seen.attributes for seen in launches)
    assert beside[0] == alone[0]
    assert [a[used] for a in beside[1:]] == [ctypes.string_at(int(attribute.getPtr()), 20)]


def test_the_configuration_is_laid_out_as_the_driver_s():
    ours = launcher.LaunchConfig(1, 2, 3, 4, 5, 6, 7, 8)
    theirs = driver.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 1, 2, 3
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 4, 5, 6
    theirs.sharedMemBytes, theirs.hStream = 7, 8
    assert bytes(ours) == ctypes.string_at(int(theirs.getPtr()), ctypes.sizeof(ours))


def test_a_launch_for_another_device_is_made_there(launches, device):
    key = route_key()
    for index in (0, 1, 0):
        launcher.launch(key, 1, arguments(key, 1), index)
    assert [seen.stream for seen in launches] == [STREAM, STREAM + 1, STREAM]
    assert device.index == 0


def test_threads_do_not_write_over_each_other_s_parameters(launches, monkeypatch):
    key = grouped_gemm_few_rows_key()
    launcher.launch(key, 1, arguments(key, 1), 0)
    mine = launcher._thread.prepared[id(key), 0, False, 1]
    packed = mine.call  # of this thread, whose parameters another thread must leave alone
    thread = threading.Thread(target=launcher.launch, args=(key, 1, arguments(key, 90), 0))
    thread.start()
    thread.join()
    packed()
    assert [seen.args for seen in launches] == [arguments(key, first) for first in (1, 90, 1)]


def test_what_does_not_fit_a_parameter_is_not_launched(launches):
    key = route_key()
    with pytest.raises(struct.error, match="'i' format requires"):
        launcher.launch(key, 1, (*arguments(key, 1)[:-1], 2**31), 0)
    with pytest.raises(struct.error, match="16 items"):
        launcher.launch(key, 1, arguments(key, 1)[:-1], 0)
    assert launches == []


def signatures() -> dict[str, list[tuple[Kind, str]]]:
    """The kind and the name of each parameter of the kernels in csrc."""
    kinds = {"TensorMap": Kind.MAP, "int": Kind.INT}
    found = {}
    for path in (Path(fp8moe_plugin.__file__).parent / "csrc").glob("*.cu"):
        for kernel, text in re.findall(r'extern "C" __global__ [^;{]*?(\w+)\(([^()]*)\) \{', path.read_text()):
            parameters = [parameter.split() for parameter in text.split(",")]
            found[kernel] = [(Kind.POINTER if "*" in "".join(p) else kinds[p[-2]], p[-1]) for p in parameters]
    return found


def test_the_parameters_are_those_of_the_sources():
    """Their names, too, so that two pointers that are swapped in a launch are seen there."""
    assert {kernel: list(map(tuple, parameters)) for kernel, parameters in PARAMETERS.items()} == signatures()


def test_every_kernel_has_named_arguments():
    assert {key.source for key in all_kernels()} == PARAMETERS.keys() == ARGUMENTS.keys()
    for key in all_kernels():
        names = [parameter.name for parameter in PARAMETERS[key.source]]
        assert key.arguments(**{name: i for i, name in enumerate(names)}) == tuple(range(len(names)))


def test_a_refused_launch_names_the_kernel_and_the_grid(launches, monkeypatch):
    refuse = CALL(lambda *_: int(driver.CUresult.CUDA_ERROR_INVALID_VALUE))
    monkeypatch.setattr(launcher, "_libcuda", lambda: SimpleNamespace(cuLaunchKernelEx=refuse))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (None, b"the reason"))
    key = route_key()
    with pytest.raises(
        LaunchError, match=r"refused the launch of route with grid \(0, 3\): the reason .*INVALID_VALUE"
    ):
        launcher.launch(key, (0, 3), arguments(key, 1), 0)


def test_a_refusal_of_the_driver_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (None, b"the reason"))
    with pytest.raises(LaunchError, match=r"refused the load of tiny: the reason .*nvidia-smi.*report this"):
        launcher._check(driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None, "load of tiny")
