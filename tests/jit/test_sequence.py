"""A sequence hands the driver what its template and its addresses say, in C and by way of cuda-bindings."""

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver

from fp8moe_plugin.jit import sequence
from fp8moe_plugin.jit.sequence import BindingsSequence, Patch, PreparedLaunch, Sequence, make_sequence
from tests.jit.fake_driver import Config, Driver

STREAM, FUNCTION = 0x7F00_0000_1000, 0x5500_0000_2000
MAP, POINTER = 128, 8
TEMPLATE = bytes(range(128)) + bytes(8) + (7).to_bytes(4, "little") + bytes(52) + (9).to_bytes(4, "little")
PARAMETERS = (0, 128, 136), (192,)


@pytest.fixture(params=["c", "bindings"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Sequence, Driver]]:
    """Makes a sequence of two launches and its driver."""
    if request.param == "c":
        pytest.importorskip("fp8moe_plugin.jit._sequence", reason="built without a C compiler")

    def made(pdl: bool = False, cluster: int = 1) -> tuple[Sequence, Driver]:
        fake = Driver(lambda function: [MAP, POINTER, 4] if function == FUNCTION else [4])
        monkeypatch.setattr(sequence, "libcuda", lambda: fake)
        launches = [
            PreparedLaunch(FUNCTION, 3, 5, 384, 1000, pdl, cluster, PARAMETERS[0]),
            PreparedLaunch(FUNCTION + 1, 132, 1, 128, 0, False, 1, PARAMETERS[1]),
        ]
        patches = [Patch(0, 1, 256, True), Patch(128, 0, 16, False)]
        if request.param == "c":
            return make_sequence(TEMPLATE, launches, patches), fake
        # cuda-bindings load a driver of their own, so its launch goes to the fake one with the same structures.
        monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *args: (launch_by_bindings(fake, *args),))
        return BindingsSequence(TEMPLATE, launches, patches), fake

    return made


def launch_by_bindings(fake: Driver, config: Any, function: Any, parameters: int, extra: int) -> int:
    pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
    theirs = ctypes.cast(int(config.getPtr()), ctypes.POINTER(Config))
    return fake.launch(theirs, int(function), pointers, extra)


def test_a_call_fills_in_its_addresses_and_launches_every_kernel(make):
    run, fake = make()
    for a, b in ((2**47, 2**40), (2**47 + 512, 2**33)):
        assert run.run((a, b), STREAM) is None
        first, second = fake.seen
        fake.seen.clear()
        assert (first.function, first.grid, first.block, first.smem) == (FUNCTION, (3, 5, 1), (384, 1, 1), 1000)
        assert first.stream == second.stream == STREAM
        tensor_map, pointer, integer = first.parameters
        assert tensor_map == (b + 256).to_bytes(8, "little") + TEMPLATE[8:128]
        assert (int.from_bytes(pointer, "little"), integer) == (a + 16, TEMPLATE[136:140])
        assert (second.function, second.grid, second.block) == (FUNCTION + 1, (132, 1, 1), (128, 1, 1))
        assert second.parameters == [TEMPLATE[192:196]]
        assert first.attributes == second.attributes == []


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("cluster", [1, 6])
def test_attributes_are_the_driver_s(make, pdl, cluster):
    run, fake = make(pdl, cluster)
    run.run((1, 2**40), STREAM)
    kinds, expected = driver.CUlaunchAttributeID, []
    if pdl:
        expected.append((int(kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION), 1))
    if cluster > 1:
        expected.append((int(kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION), cluster))
    assert [(kind, value[0]) for kind, value in fake.seen[0].attributes] == expected
    if cluster > 1:
        assert fake.seen[0].attributes[-1][1] == [cluster, 1, 1]
    assert fake.seen[1].attributes == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_refusal_stops_and_says_which_launch_it_was(make, number):
    run, fake = make()
    fake.status, fake.refuses = 700, number
    assert run.run((1, 2**40), STREAM) == (700, number)
    assert len(fake.seen) == number


def test_a_tensor_map_that_is_refused_launches_nothing(make):
    run, fake = make()
    fake.replace_status = 1
    assert run.run((1, 2**40), STREAM) == (1, 0)
    assert not fake.seen


def test_too_few_addresses_are_an_error(make):
    run, fake = make()
    with pytest.raises(ValueError, match="1 addresses, 2"):
        run.run((1,), STREAM)
    assert not fake.seen


def test_threads_share_a_sequence(make):
    """Each launches with its own addresses, though they run at once."""
    run, fake = make()
    calls = 200

    def call(thread: int) -> None:
        for i in range(calls):
            run.run((thread * 2**40 + i, 2**40), STREAM + thread)

    threads = [threading.Thread(target=call, args=(thread,)) for thread in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    firsts = [seen for seen in fake.seen if seen.function == FUNCTION]
    assert len(firsts) == 3 * calls
    for seen in firsts:
        assert int.from_bytes(seen.parameters[1], "little") // 2**40 == seen.stream - STREAM


@pytest.mark.parametrize(
    ("launches", "patches"),
    [
        ([PreparedLaunch(1, 1, 1, 1, 0, False, 1, (200,))], []),
        ([PreparedLaunch(1, 1, 1, 1, 0, False, 1, (-1,))], []),
        ([PreparedLaunch(1, 1, 1, 1, 0, False, 1, (0,) * 65)], []),
        ([], [Patch(190, 0, 0, False)]),
        ([], [Patch(-8, 0, 0, False)]),
        ([], [Patch(2**31 - 1, 0, 0, False)]),
        ([], [Patch(0, 64, 0, False)]),
        ([], [Patch(8, 0, 0, True)]),
        ([], [Patch(128, 0, 0, True)]),
    ],
)
def test_what_would_write_elsewhere_is_refused(launches, patches):
    native = pytest.importorskip("fp8moe_plugin.jit._sequence", reason="built without a C compiler")
    with pytest.raises(ValueError):
        native.Sequence(TEMPLATE, launches, patches, 0, 0)


@pytest.mark.parametrize("field", ["grid_x", "grid_y", "threads", "smem_bytes"])
def test_a_number_that_does_not_fit_is_refused(field):
    native = pytest.importorskip("fp8moe_plugin.jit._sequence", reason="built without a C compiler")
    launch = PreparedLaunch(1, 1, 1, 1, 0, False, 1, ())._replace(**{field: 2**32 + 1})
    with pytest.raises(OverflowError):
        native.Sequence(TEMPLATE, [launch], [], 0, 0)


def test_a_number_that_clears_the_list_does_no_harm():
    native = pytest.importorskip("fp8moe_plugin.jit._sequence", reason="built without a C compiler")
    launches = []

    class Number:
        def __index__(self) -> int:
            launches.clear()
            return 1

    launches += [PreparedLaunch(1, 1, 1, 1, 0, False, Number(), ())] * 2
    assert native.Sequence(TEMPLATE, launches, [], 0, 0)
    assert not launches


def test_a_template_that_is_too_long_is_refused():
    native = pytest.importorskip("fp8moe_plugin.jit._sequence", reason="built without a C compiler")
    with pytest.raises(ValueError, match="8193 bytes"):
        native.Sequence(bytes(8193), [], [], 0, 0)


def test_the_extension_is_built_where_there_is_a_compiler():
    from fp8moe_plugin.jit import _sequence

    assert _sequence.Sequence


def test_without_the_extension_one_line_of_the_log_says_so(monkeypatch, plugin_log):
    monkeypatch.setitem(sys.modules, "fp8moe_plugin.jit._sequence", None)
    sequence.log_once.cache_clear()
    for _ in range(3):
        assert isinstance(make_sequence(TEMPLATE, [], []), BindingsSequence)
    (record,) = plugin_log.records
    assert "C extension" in record.message
