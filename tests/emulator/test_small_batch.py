"""Layers of a few tokens on the emulator: two kernels of clusters, the second one beside the first."""

import ctypes

import pytest
import torch

from fp8moe_plugin import plan
from fp8moe_plugin.ops import fused_moe
from tests import helpers as h
from tests.emulator.build import Kernels
from tests.emulator.device import SHARED_BYTES, Device
from tests.emulator.layers import MOST_ERROR, layer_ops, run_layers

MULTIPROCESSORS = 24  # two or three clusters of the first GEMM
TOPK = 3
CPU = torch.device("cpu")
seeds = pytest.mark.parametrize("seed", [1, 2])


@pytest.fixture
def emulator(emulator_runtime: ctypes.CDLL, kernels: Kernels) -> Device:
    return Device(emulator_runtime, kernels, MULTIPROCESSORS, SHARED_BYTES)


@seeds
@pytest.mark.parametrize("kind", ["distinct", "some_missing", "one_expert", "nowhere"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"),
    [(1, 256, 128), (3, 1152, 256), (8, 512, 384), (9, 256, 256), (16, 1152, 128)],
)
def test_the_layer(
    emulator: Device,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    hidden: int,
    intermediate: int,
    kind: str,
    seed: int,
) -> None:
    for module in (plan, layer_ops):  # whatever is fastest for this shape
        monkeypatch.setattr(module, "small_batch", lambda *_: 8 if tokens <= 8 else 16)
    gen, experts = h.seeded(seed, CPU), 5
    x, layer = h.random_tokens(gen, tokens, hidden), h.random_layer(gen, experts, hidden, intermediate)
    weights, ids = h.random_routing(gen, kind, tokens, TOPK, experts)
    out = emulator.execute(seed, lambda: fused_moe(x, *layer, weights, ids))
    expected = h.layer_reference(x, layer, weights, ids, quantized=True)
    if kind == "nowhere":
        assert (out == 0).all()
    else:
        assert h.relative_l2(out, expected) <= MOST_ERROR


@seeds
@pytest.mark.parametrize("shared_bytes", [SHARED_BYTES, 2 * SHARED_BYTES])  # the latter: room for more than one layer
@pytest.mark.parametrize(("tokens", "width"), [(2, 8), (11, 16)])
def test_layers_that_share_their_scratch(
    emulator_runtime: ctypes.CDLL, kernels: Kernels, tokens: int, width: int, shared_bytes: int, seed: int
) -> None:
    emulator = Device(emulator_runtime, kernels, MULTIPROCESSORS, shared_bytes)
    errors = run_layers(emulator, seed, tokens, 384, 128, small_batch=width)
    assert max(errors) <= MOST_ERROR, f"relative L2 of each layer: {errors}"


@seeds
def test_where_no_multiprocessor_has_room_for_both_kernels(
    emulator_runtime: ctypes.CDLL, kernels: Kernels, seed: int
) -> None:
    emulator = Device(emulator_runtime, kernels, MULTIPROCESSORS, 130 * 1024)
    assert max(run_layers(emulator, seed, 3, 256, 128, small_batch=8)) <= MOST_ERROR
