"""The choice of experts on the emulator, and small batches that start before it has ended."""

import ctypes
import functools

import pytest
import torch

from fp8moe_plugin.ops import choose_experts, router_gemm
from tests import helpers as h
from tests.emulator.build import Kernels
from tests.emulator.device import SHARED_BYTES, Device
from tests.emulator.layers import MOST_ERROR, run_routed_layers
from tests.ops.test_routed_moe import NEAR_TIES

CPU = torch.device("cpu")
MULTIPROCESSORS = 24  # two or three clusters of the first GEMM
seeds = pytest.mark.parametrize("seed", [1, 2])


@seeds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("topk", "experts"), [(8, 128), (1, 9), (32, 32), (6, 160), (10, 512)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_it_chooses_as_the_reference(
    emulator: Device, topk: int, experts: int, dtype: torch.dtype, renormalize: bool, seed: int
) -> None:
    logits = torch.randn(7, experts, generator=h.seeded(seed, CPU)).mul(2).to(dtype)
    logits[1] = 1.5  # ties: the lowest ids
    logits[2, ::3] = logits[2, 0]
    logits[3, 1:] = float("-inf")
    logits[4] *= 100  # most scores are 0
    logits[5, 3] = float("nan")  # all scores are NaN
    weights, ids = emulator.execute(seed, lambda: choose_experts(logits, topk, renormalize=renormalize))
    expected_weights, expected_ids = choose_experts(logits, topk, renormalize=renormalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("renormalize", [True, False])
def test_it_ranks_near_ties_as_the_reference(emulator: Device, renormalize: bool) -> None:
    """Whatever the exponential of a library makes of them."""
    logits = torch.tensor([*NEAR_TIES.values()])
    wide = torch.randn(40, 128, generator=h.seeded(0, CPU)).mul(1e-7)
    for given, topk in ((logits, 4), (wide, 8), (wide.bfloat16(), 8)):
        choose = functools.partial(choose_experts, given, topk, renormalize=renormalize)
        (weights, ids), (expected_weights, expected_ids) = emulator.execute(1, choose), choose()
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7, equal_nan=True)


@seeds
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (9, 1152), (3, 8)])
def test_it_weighs_shared_experts_as_the_reference(emulator: Device, tokens: int, hidden: int, seed: int) -> None:
    gen = h.seeded(seed, CPU)
    logits, x = torch.randn(tokens, 40, generator=gen), h.random_tokens(gen, tokens, hidden)
    gate = (h.random_tokens(gen, 1, hidden) * 2 / hidden**0.5).bfloat16()
    router = {"hidden_states": x, "shared_gate": gate, "padding": torch.arange(tokens) % 3 == 1}
    choose = functools.partial(choose_experts, logits, 4, **router)
    (weights, ids), (expected_weights, expected_ids) = emulator.execute(seed, choose), choose()
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_padding_gets_no_expert(emulator: Device) -> None:
    logits, padding = torch.randn(9, 40, generator=h.seeded(0, CPU)), torch.arange(9) % 3 == 1
    weights, ids = emulator.execute(1, lambda: choose_experts(logits, 4, padding=padding))
    expected_weights, expected_ids = choose_experts(logits, 4, padding=padding)
    assert torch.equal(ids, expected_ids)
    assert (ids[padding] == -1).all()
    assert not weights[padding].any()
    torch.testing.assert_close(weights, expected_weights)


@seeds
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 8, 32), (9, 3, 1056), (16, 20, 512), (18, 9, 4160)])
def test_the_logits_of_a_router(emulator: Device, tokens: int, experts: int, k: int, seed: int) -> None:
    gen = h.seeded(seed, CPU)
    x, weight = h.random_tokens(gen, tokens, k), h.random_tokens(gen, experts, k)
    logits = emulator.execute(seed, lambda: router_gemm(x, weight))
    torch.testing.assert_close(logits, router_gemm(x, weight), rtol=2**-7, atol=1e-3)


@seeds
@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [(1, 1024, 128), (8, 384, 256), (13, 1152, 128)])
@pytest.mark.parametrize(("gates", "shared"), [(False, False), (True, False), (False, True)])
def test_layers_that_choose_their_experts(
    emulator_runtime: ctypes.CDLL,
    kernels: Kernels,
    tokens: int,
    hidden: int,
    intermediate: int,
    gates: bool,
    shared: bool,
    seed: int,
) -> None:
    """One behind the other, in the same scratch."""
    emulator = Device(emulator_runtime, kernels, MULTIPROCESSORS, SHARED_BYTES)
    errors = run_routed_layers(emulator, seed, tokens, hidden, intermediate, gates, shared)
    assert max(errors) <= MOST_ERROR, f"relative L2 of each layer: {errors}"
