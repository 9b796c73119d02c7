"""The public helpers for tests and benchmarks; their times need a GPU."""

import math

import pytest
import torch

from fp8moe_plugin.testing import bench_kineto, calc_diff, durations


def test_equal_tensors_do_not_differ():
    x = torch.tensor([[1.0, -2.0], [3.0, 448.0]])
    assert calc_diff(x, x) == calc_diff(torch.zeros(3), torch.zeros(3)) == 0
    assert calc_diff(x, -x) == 2


def test_the_difference_is_half_the_square_of_the_relative_distance():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double()
    y = x + 1e-3 * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    relative = ((x - y).norm() / x.norm()).item()
    assert calc_diff(y, x) == pytest.approx(relative**2 / 2, rel=0.01)
    assert calc_diff(x.bfloat16(), x) < 1e-5


def test_nan_is_not_taken_for_equal():
    x = torch.tensor([1.0, math.nan])
    assert not calc_diff(x, x) < 1


EVENTS = [
    ("warm", 9.0),
    ("bitwise_not_kernel", 9.0),
    *[("quantize", 1.0), ("gemm_a", 2.0), ("gemm_b", 4.0)],
    ("bitwise_not_kernel", 9.0),
    ("gemm_a", 8.0),
]


@pytest.mark.parametrize(("name", "expected"), [(None, [7, 8]), ("gemm_", [6, 8]), ("gemm_b", [4, 0]), ("x", [0, 0])])
def test_each_call_gets_the_kernels_between_two_flushes(name, expected):
    assert durations(EVENTS, name) == expected


@pytest.mark.gpu
def test_a_call_of_twice_the_work_takes_about_twice_as_long():
    x = torch.zeros(2**26, device="cuda")
    once, twice = lambda: x.add_(1), lambda: x.add_(1).mul_(2)
    whole, both = bench_kineto(once, rounds=9), bench_kineto(twice, rounds=9)
    assert isinstance(whole, float)
    assert isinstance(both, float)
    assert 1.5 < both / whole < 3
    named = bench_kineto(twice, ("elementwise", "no such kernel"), 9)
    assert isinstance(named, tuple)
    assert named[0] > whole
    assert named[1] == 0
