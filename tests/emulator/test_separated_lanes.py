"""Schedules in which lanes of a warp are far apart, many of each kernel: none hangs, and all give the same bits.

`make faults` runs 20,000 of each call, and 300,000 of each loop in which a warp fills stages from a queue of tiles.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.jit.launch import Launch
from fp8moe_plugin.launches.kernel_sets import all_kernels
from fp8moe_plugin.ops.transpose_scales import transpose_scales
from fp8moe_plugin.plan.sm90 import dense
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, PACKED_WIDE, SHARED
from tests import faults
from tests import helpers as h
from tests.emulator.build import Kernels
from tests.emulator.device import Device
from tests.emulator.layers import packed_moe
from tests.indexer import decode, prefill
from tests.k_grouped import gradients
from tests.mxfp4 import garbage, pack_close, random_experts, random_projections
from tests.steps import route

MULTIPROCESSORS = {"small batch": 8}  # room for a cluster; others have 2
OF_RANKS = {"push_tokens", "push_sums", "add_sums", "add_rows"}  # in tests/emulator/test_ranks.py
FEW = 6  # schedules, unless FULL_COUNTS=1
K, N, ROWS, GROUPS = 256, 128, 3, 2
Run = Callable[[torch.Generator, pytest.MonkeyPatch], Callable[[], torch.Tensor]]


def out(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return h.poisoned(*shape, dtype=dtype, device=torch.device("cpu"))


def layer(**step: Any) -> Run:
    """Experts of a few tokens behind their gate, in the step that `force_step` makes."""

    def run(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
        h.force_step(patch, **step)
        x, gate = h.random_tokens(gen, ROWS, K), h.random_tokens(gen, GROUPS, K)
        experts = h.random_layer(gen, GROUPS, K, N)
        return lambda: ops.routed_moe(x, *experts, ops.router_gemm(x, gate), 1)

    return run


def packed_layer(counts: list[int] | None = None, n: int = N, **step: Any) -> Run:
    """Experts of a few tokens, or of such counts, in the step that `force_step` makes."""

    def run(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
        h.force_step(patch, **step)
        tokens = sum(counts) if counts else ROWS
        x, experts = h.random_tokens(gen, tokens, K), random_experts(gen, GROUPS, K, n, 0).packed()
        routing = h.routing_of_counts(gen, counts) if counts else h.random_routing(gen, "distinct", ROWS, 1, GROUPS)
        return lambda: packed_moe(x, experts, *routing)

    return run


def dense_layer(plan: Callable[[int, int, int], dense.DensePlan]) -> Run:
    def run(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
        h.force_dense(patch, plan)
        x, weight = h.random_tokens(gen, ROWS, K), h.random_weights(gen, N, K)
        return lambda: ops.fp8_linear(x, *weight)

    return run


def batched_experts(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    x, experts = h.random_quantized(gen, GROUPS, ROWS, K), h.random_layer(gen, GROUPS, K, N)
    counts = torch.full((GROUPS,), ROWS, dtype=torch.int32)
    return lambda: ops.batched_experts(*x, *experts, counts, expected_m=MANY_ROWS.rows)


def groups_by_end(expected_m: int) -> Run:
    def run(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
        a, b = h.random_quantized(gen, ROWS, h.GROUP), h.random_weights(gen, GROUPS, 16, h.GROUP)
        d, ends = out(ROWS, 16), torch.tensor([1, ROWS], dtype=torch.int32)

        def op() -> torch.Tensor:
            ops.m_grouped_fp8_gemm_nt_psum(a, b, d, ends, expected_m, 1)
            return d

        return op

    return run


def dense_gemm(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    a, scales = h.random_quantized(gen, ROWS, h.GROUP)
    b, d, c = (
        h.random_weights(gen, 16, h.GROUP),
        out(ROWS, 16, dtype=torch.float32),
        torch.randn(ROWS, 16, generator=gen),
    )

    def op() -> torch.Tensor:
        ops.fp8_gemm_nt((a, h.column_major(scales)), b, d, c)
        return d

    return op


def groups_by_index(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    a, b = h.random_quantized(gen, ROWS, K), h.random_weights(gen, GROUPS, 16, K)
    d, indices = out(ROWS, 16), torch.tensor([0, -1, 1], dtype=torch.int32)

    def op() -> torch.Tensor:
        ops.m_grouped_fp8_gemm_nt_contiguous(a, b, d, indices)
        return d

    return op


def gradients_of_weights(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    call = gradients(gen, ROWS, 16, [h.GROUP, 2 * h.GROUP])
    d = out(*call.c.shape, dtype=torch.float32)
    return lambda: call.run(d, call.c)


def contiguous_logits(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    call = prefill(gen, ROWS, 100)
    return lambda: call.run(clean_logits=True)


def paged_logits(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    call = decode(gen, [128, 128])
    return lambda: call.run(1)


def silu_mul_quant(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    x, counts = h.random_tokens(gen, GROUPS, ROWS, 2 * N), torch.full((GROUPS,), ROWS, dtype=torch.int32)
    return lambda: ops.silu_mul_quant_fp8(x, counts)[0]


def scales(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    given, counts = torch.rand(GROUPS, ROWS, 9, generator=gen), torch.full((GROUPS,), ROWS, dtype=torch.int32)
    d = out(GROUPS, 9, 4, dtype=torch.float32).mT[:, :ROWS]

    def op() -> torch.Tensor:
        transpose_scales(given, d, counts)
        return d

    return op


def packing(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    given, (weight, of_weight) = random_projections(gen, 1, 100, 192, "random"), garbage(1, "w3", (1, 2), further=0)

    def op() -> torch.Tensor:
        pack_close(weight, of_weight, "w3", *given)
        return weight

    return op


def rows_of_many_pairs(gen: torch.Generator, patch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    _, ids = h.random_routing(gen, "some_missing", 600, 2, GROUPS)
    return lambda: route(ids, GROUPS, MANY_ROWS).slots


LOOPS: dict[str, Run] = {
    "row tiles": dense_gemm,
    "tiles of few rows": groups_by_end(1),
}
CALLS: dict[str, Run] = {
    "sorted layer of few rows": layer(tile=FEW_ROWS),
    "sorted layer of many rows": layer(tile=MANY_ROWS),
    "sorted layer of few rows of packed weights": packed_layer(tile=FEW_ROWS, copies=False),
    "the same with copies of tokens": packed_layer(tile=FEW_ROWS, copies=True),
    "sorted layer of wide tiles of packed weights": packed_layer([66, 3], tile=PACKED_WIDE),
    "sorted layer of many rows of packed weights": packed_layer(tile=SHARED),
    "sorted layer of shared tiles of packed weights": packed_layer([130, 3], n=256, tile=SHARED),
    "small batch": layer(width=8),
    "batched experts": batched_experts,
    "dense layer of few rows": dense_layer(lambda m, n, sms: dense.few_rows(m, n, 2)),
    "dense layer in tiles": dense_layer(lambda m, n, sms: dense.tiled(m, n, 64, 96, sms)),
    "dense layer of clusters": dense_layer(lambda m, n, sms: dense.many_rows(m, n, 192, sms)),
    "groups by end": groups_by_end(MANY_ROWS.rows),
    "groups by index": groups_by_index,
    "gradients of weights": gradients_of_weights,
    "logits of contiguous KV": contiguous_logits,
    "logits of paged KV": paged_logits,
    "SiLU and quantization": silu_mul_quant,
    "transposed scales": scales,
    "packing of experts": packing,
    "rows of many pairs": rows_of_many_pairs,
}


def check(emulator: Device, run: Run, full: int) -> None:
    """Runs schedules with separated lanes, those of odd seeds."""
    with pytest.MonkeyPatch.context() as patch:
        op = run(h.seeded(0, torch.device("cpu")), patch)
        first = emulator.execute(0, op).clone()
        for i in range(full if faults.FULL else FEW):
            assert h.same_bits(emulator.execute(2 * i + 1, op), first)


@pytest.mark.parametrize("name", CALLS)
def test_results_with_separated_lanes(emulator_runtime: ctypes.CDLL, kernels: Kernels, name: str) -> None:
    check(Device(emulator_runtime, kernels, MULTIPROCESSORS.get(name, 2)), CALLS[name], 20_000)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_tiles_with_separated_lanes(emulator_runtime: ctypes.CDLL, kernels: Kernels, name: str) -> None:
    check(Device(emulator_runtime, kernels, 1), LOOPS[name], 300_000)


def test_each_kernel_runs_with_separated_lanes(emulator_runtime: ctypes.CDLL, kernels: Kernels) -> None:
    launched: set[str] = set()

    class Recorder(Device):
        def prepare(self, launches: Iterable[Launch]) -> Callable[[tuple[int, ...]], None]:
            launches = tuple(launches)
            launched.update(launch.key.source for launch in launches)
            return super().prepare(launches)

    for name, run in CALLS.items():
        with pytest.MonkeyPatch.context() as patch:
            Recorder(emulator_runtime, kernels, MULTIPROCESSORS.get(name, 2)).execute(
                1, run(h.seeded(0, torch.device("cpu")), patch)
            )
    assert launched | OF_RANKS == {key.source for key in all_kernels()}
