"""What a launch leaves behind, and where from it may be made."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fp8moe_plugin.errors import KernelNotPrecompiled
from fp8moe_plugin.jit import driver, wheel
from fp8moe_plugin.jit.launch import TensorMap
from fp8moe_plugin.jit.launcher import UNKNOWN_ADDRESS
from fp8moe_plugin.jit.sequence import aligned_buffer, libcuda
from fp8moe_plugin.ops import per_token_group_quant_fp8
from fp8moe_plugin.ops.operands import empty_quantized
from fp8moe_plugin.ops.quantize import prepared_quantize
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, RowTile
from tests import helpers as h
from tests.jit.conftest import forget, set_variables
from tests.steps import device_of, gate_up, grouped_gemm, split_k, tiles_of_counts

pytestmark = pytest.mark.gpu
K = 1024  # deep enough that tiles are handed out from counters
N = 640  # three columns of tiles; the last is half as wide


@pytest.mark.parametrize("tile", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 0], [64, 65, 128], [700, 3, 900]])
def test_a_gemm_leaves_the_counters_of_its_tiles_at_zero(counts: list[int], tile: RowTile) -> None:
    gen = h.seeded(0, torch.device("cuda", 0))
    max_m = max(*counts, 1)
    a, b = h.random_quantized(gen, len(counts), max_m, K), h.random_weights(gen, len(counts), 512, K)
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
    tiles = tiles_of_counts(masked_m, max_m, tile)
    first, second = (h.poisoned(len(counts), max_m, 512, dtype=torch.bfloat16, device=gen.device) for _ in range(2))
    for out in (first, second):
        grouped_gemm(a, b, out, tiles)
        assert tiles.num_tiles[1:].tolist() == [0, 0, 0, 0]
    assert h.same_bits(first, second)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(
    ("counts", "hidden", "intermediate"),
    [
        ([0, 0], K, 768),
        ([150, 20] * 60, 2 * K, 256),  # short tiles, handed out from the counter
        ([1, 128, 0], K, 128),
        ([700, 3, 900, 144, 16], K, 128),  # short tiles that keep weights
        ([530, 270] * 60, 2 * K, 256),
        ([1, 0, 64], K, 768),
        ([700, 3, 900, 144, 16], 2 * K, 768),
        ([700, 3, 900, 144, 16], 128, 1024),
        ([270, 130] * 60, 2 * K, 1152),
        ([5760] * 4, 128, 4096),  # more tiles a block than it lists
    ],
)
def test_the_second_gemm_of_experts_may_start_while_the_first_one_ends(
    counts: list[int], hidden: int, intermediate: int, gathered: bool
) -> None:
    gen = h.seeded(0, torch.device("cuda", 0))
    groups, max_m = len(counts), max(*counts, 1)
    a, a_rows = h.random_quantized(gen, groups, max_m, hidden), None
    if gathered:
        a_rows = torch.arange(groups * max_m, dtype=torch.int32, device=gen.device)
        a = a[0].flatten(0, 1), a[1].flatten(0, 1).contiguous()
    w13 = h.random_weights(gen, groups, 2 * intermediate, hidden)
    w2 = h.random_weights(gen, groups, N, intermediate)
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
    tiles = tiles_of_counts(masked_m, max_m, MANY_ROWS)
    pdl = tiles.for_experts(sum(counts) / groups, intermediate)
    assert pdl.done_counters is not None
    q, scales = empty_quantized(groups * max_m, intermediate, gen.device)
    inner = q.view(groups, max_m, -1), scales.unflatten(0, (groups, max_m))
    expected, actual = (h.poisoned(groups, max_m, N, dtype=torch.bfloat16, device=gen.device) for _ in range(2))
    gate_up(a, w13, tiles, tokens=a_rows, out=(q, scales))
    grouped_gemm(inner, w2, expected, tiles)
    for _ in range(20):
        for stale in (q.view(torch.uint8), scales, actual):
            stale.fill_(0x7F if stale.dtype == torch.uint8 else float("nan"))
        pdl.done_counters.zero_()
        gate_up(a, w13, pdl, tokens=a_rows, out=(q, scales))
        grouped_gemm(inner, w2, actual, pdl, after_gate_up=True)
        for group, count in enumerate(counts):
            assert h.same_bits(actual[group, :count], expected[group, :count])
        done, *stored = pdl.done_counters[: 1 + int(tiles.num_tiles[0])].tolist()
        assert done == 2 * device_of(q).multiprocessors
        assert set(stored) <= {2 * intermediate // 128}
    assert tiles.num_tiles[1:].tolist() == [0, 0, 0, 0]


def unload(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels, as in a new process."""
    monkeypatch.setattr(driver, "_functions", {})
    prepared_quantize.cache_clear()


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel is loaded or in a wheel; the settings that the test makes are forgotten after it, also if it fails."""
    monkeypatch.setattr(wheel, "FOLDER", Path("absent"))
    unload(monkeypatch)
    yield
    monkeypatch.undo()
    forget()
    prepared_quantize.cache_clear()


widths = pytest.mark.parametrize("intermediate", [128, 256, 768, 896, 2048])  # 896: asks the counter in its first step
few_rows = pytest.mark.parametrize("counts", [[0, 0], [1], [3, 0, 64, 130], [5] * 200], ids=str)


@widths
@few_rows
def test_weights_that_the_second_gemm_of_few_rows_loads_ahead_change_nothing(
    counts: list[int], intermediate: int
) -> None:
    gen = h.seeded(0, torch.device("cuda", 0))
    groups, max_m = len(counts), max(*counts, 1)
    a = h.random_quantized(gen, groups * max_m, K)
    a = a[0], a[1].contiguous()
    a_rows = torch.arange(groups * max_m, dtype=torch.int32, device=gen.device)
    w13, w2 = h.random_weights(gen, groups, 2 * intermediate, K), h.random_weights(gen, groups, 512, intermediate)
    tiles = tiles_of_counts(torch.tensor(counts, dtype=torch.int32, device="cuda"), max_m, FEW_ROWS)
    q, scales = empty_quantized(groups * max_m, intermediate, gen.device)
    inner = q.view(groups, max_m, -1), scales.unflatten(0, (groups, max_m))
    expected, actual = (h.poisoned(groups, max_m, 512, dtype=torch.bfloat16, device=gen.device) for _ in range(2))
    gate_up(a, w13, tiles, tokens=a_rows, out=(q, scales))
    grouped_gemm(inner, w2, expected, tiles)
    for _ in range(20):
        for stale in (q.view(torch.uint8), scales, actual):
            stale.fill_(0x7F if stale.dtype == torch.uint8 else float("nan"))
        gate_up(a, w13, tiles, tokens=a_rows, out=(q, scales))
        grouped_gemm(inner, w2, actual, tiles, after_gate_up=True)
        for group, count in enumerate(counts):
            assert h.same_bits(actual[group, :count], expected[group, :count])
        assert tiles.num_tiles[1:].tolist() == [0, 0, 0, 0]


@widths
@few_rows
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_the_second_gemm_of_few_rows_may_run_beside_the_first_one(
    counts: list[int], intermediate: int, splits: int
) -> None:
    gen, n = h.seeded(0, torch.device("cuda", 0)), 512
    groups, max_m = len(counts), max(*counts, 1)
    rows, device = groups * max_m, gen.device
    x = h.random_quantized(gen, rows, K)
    x = x[0], x[1].contiguous()
    tokens = torch.arange(rows, dtype=torch.int32, device=device).view(groups, max_m)
    w13, w2 = h.random_weights(gen, groups, 2 * intermediate, K), h.random_weights(gen, groups, n, intermediate)
    tiles = tiles_of_counts(torch.tensor(counts, dtype=torch.int32, device=device), max_m, FEW_ROWS)
    q, scales = empty_quantized(rows, intermediate, device)
    split, counted = split_k(splits, tiles, rows, intermediate)
    assert counted.done_counters is not None
    expected, actual = (h.poisoned(groups, max_m, n, dtype=torch.bfloat16, device=device) for _ in range(2))

    def both_gemms(out: torch.Tensor, beside: bool) -> None:
        for stale in (q.view(torch.uint8), scales, split.partial, out):
            stale.fill_(0x7F if stale.dtype == torch.uint8 else float("nan"))
        counted.done_counters.zero_()
        inner = gate_up(x, w13, counted, tokens=tokens, split=split, out=(q, scales))
        second = {"after_gate_up": beside, "row_counters": split.counters if beside else 0}
        grouped_gemm(inner, w2, out, counted, **second)

    both_gemms(expected, beside=False)
    for _ in range(20):
        both_gemms(actual, beside=True)
        for group, count in enumerate(counts):
            assert h.same_bits(actual[group, :count], expected[group, :count])
            assert actual[group, count:].isnan().all()
        assert counted.done_counters[0].item() == device_of(q).multiprocessors
        done = counted.done_counters[1:].view(len(tiles.table), split.counters)[: int(tiles.num_tiles[0]), 0]
        assert set(done.tolist()) <= {intermediate // 128}
        assert tiles.num_tiles[1:].tolist() == [0, 0, 0, 0]


@pytest.mark.usefixtures("unloaded")
def test_a_kernel_that_is_not_precompiled_is_not_compiled_where_that_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, FP8MOE_BUNDLE="", FP8MOE_CACHE_DIR=tmp_path / "cache", FP8MOE_JIT="forbid")
    x = h.random_tokens(h.seeded(0, torch.device("cuda", 0)), 3, 256)
    with pytest.raises(KernelNotPrecompiled, match=r"The kernel (triton_)?quantize .*UE8M0=0.* is not precompiled"):
        per_token_group_quant_fp8(x)
    set_variables(monkeypatch, FP8MOE_JIT="allow")
    per_token_group_quant_fp8(x)
    set_variables(monkeypatch, FP8MOE_JIT="forbid")
    unload(monkeypatch)
    per_token_group_quant_fp8(x)  # from the cache


LOAD_ALL_OF_A_MODEL = """
import time, torch
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.jit import driver
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.launches.kernel_sets import EXAMPLE
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.spec import Arrival, LayerSpec

torch.cuda.init()
begin, backend = time.perf_counter(), BACKENDS[SM90]
layers, dense = backend.layer_kernels(LayerSpec(EXAMPLE), Arrival.STANDARD), backend.dense_kernels(False, FP8_BLOCK)
for key in layers | dense:
    driver.load(key, 0)
print(driver.counts.origins, time.perf_counter() - begin)
"""


def test_kernels_of_a_model_load_in_less_than_300_ms(tmp_path: Path) -> None:
    environment = os.environ | {"FP8MOE_CACHE_DIR": str(tmp_path / "cache"), "FP8MOE_JIT": "allow"}
    subprocess.run([sys.executable, "-m", "warmup", "compile"], env=environment, check=True)
    environment["FP8MOE_JIT"] = "forbid"
    done = subprocess.run([sys.executable, "-c", LOAD_ALL_OF_A_MODEL], env=environment, capture_output=True, text=True)
    assert f"'{'wheel' if wheel.kernels_file().exists() else 'cache'}'" in done.stdout, done.stderr
    assert float(done.stdout.split()[-1]) < 0.3


@pytest.mark.parametrize("element_size", [1, 2])
@pytest.mark.parametrize(
    ("sizes", "strides", "box"), [((256, 300), (256,), (64, 8)), ((256, 8, 4, 9), (1024, 256, 8192), (64, 8, 2, 4))]
)
def test_a_tensor_map_with_another_address_is_as_encoded_with_it(
    sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], element_size: int
) -> None:
    tensor = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    box = (128 // element_size, *box[1:])
    for address in (tensor.data_ptr(), tensor.data_ptr() + 16):
        tensor_map = TensorMap(address, sizes, tuple(s * element_size for s in strides), box, element_size, 128)
        encoded = driver.encode(tensor_map._replace(address=UNKNOWN_ADDRESS))
        buffer, begin = aligned_buffer(len(encoded))
        ctypes.memmove(begin, encoded, len(encoded))
        assert libcuda().cuTensorMapReplaceAddress(ctypes.c_void_p(begin), ctypes.c_void_p(address)) == 0
        assert ctypes.string_at(begin, len(encoded)) == driver.encode(tensor_map)
        del buffer


def test_an_op_runs_in_a_thread_that_has_made_no_cuda_call() -> None:
    x = h.random_tokens(h.seeded(0, torch.device("cuda", 0)), 3, 256)
    here, there = per_token_group_quant_fp8(x), []
    thread = threading.Thread(target=lambda: there.extend(per_token_group_quant_fp8(x)))
    thread.start()
    thread.join()
    assert all(h.same_bits(a, b) for a, b in zip(here, there, strict=True))


def test_an_op_runs_on_the_current_stream() -> None:
    x = h.random_tokens(h.seeded(0, torch.device("cuda", 0)), 4096, 7168)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        q, _ = per_token_group_quant_fp8(x)
        done = torch.cuda.Event()
        done.record()
    assert not done.query()  # it waits behind the sleep, so it is on that stream
    stream.synchronize()
    assert h.same_bits(q, per_token_group_quant_fp8(x)[0])
