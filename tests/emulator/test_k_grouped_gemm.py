"""Gradients of weights on the emulator: groups that differ in K, empty ones, results that fill no tile."""

import pytest
import torch

from fp8moe_plugin.ops import k_grouped_fp8_gemm_nt_contiguous
from fp8moe_plugin.plan.parameters import K_GROUPS
from tests import helpers as h
from tests.emulator.device import Device
from tests.k_grouped import Gradients, gradients

CPU = torch.device("cpu")
seeds = pytest.mark.parametrize("seed", [1, 2])


def run(emulator: Device, seed: int, call: Gradients, in_place: bool) -> torch.Tensor:
    d = call.c.clone() if in_place else h.poisoned(*call.c.shape, dtype=torch.float32, device=CPU)
    emulator.execute(seed, lambda: call.run(d, d if in_place else call.c))
    return d


@seeds
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("m", "n", "ks"),
    [
        (128, 256, [256]),
        (200, 400, [384, 0, 128, 640]),
        (1, 16, [128, 256]),
        (70, 272, [0, 0, 1152]),
        (130, 1552, [128]),
    ],
)
def test_each_group_gets_its_product(
    emulator: Device, m: int, n: int, ks: list[int], in_place: bool, seed: int
) -> None:
    call = gradients(h.seeded(seed, CPU), m, n, ks)
    call.assert_right(run(emulator, seed, call, in_place))


@pytest.mark.parametrize("in_place", [True, False])
def test_more_groups_than_fit_a_launch(emulator: Device, in_place: bool) -> None:
    ks = [128 * (i % 3) for i in range(2 * K_GROUPS + 5)]
    call = gradients(h.seeded(0, CPU), 16, 32, ks)
    call.assert_right(run(emulator, 0, call, in_place))


def test_the_bits_do_not_depend_on_who_computes_what(emulator: Device) -> None:
    call = gradients(h.seeded(0, CPU), 300, 512, [256, 512])
    first, *others = (run(emulator, seed, call, True) for seed in range(3))
    assert all(h.same_bits(first, other) for other in others)
    assert h.same_bits(first, run(emulator, 0, call, False))


def test_scales_of_any_strides(emulator: Device) -> None:
    call = gradients(h.seeded(0, CPU), 20, 48, [256, 128])
    row_major = call._replace(a=(call.a[0], call.a[1].contiguous()), b=(call.b[0], call.b[1].contiguous()))
    call.assert_right(run(emulator, 0, row_major, True))


def test_a_group_without_channels_keeps_what_it_has(emulator: Device) -> None:
    d = h.poisoned(3, 8, 16, dtype=torch.float32, device=CPU)
    bits, no_scales = d.view(torch.int32).clone(), torch.empty(8, 0)
    none = torch.empty(0, dtype=h.FP8)
    layout = torch.zeros(3, dtype=torch.int32)
    k_grouped_fp8_gemm_nt_contiguous((none, no_scales), (none, no_scales.new_empty(16, 0)), d, [0] * 3, layout, d)
    assert torch.equal(d.view(torch.int32), bits)
