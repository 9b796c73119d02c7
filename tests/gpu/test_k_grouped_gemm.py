"""Gradients of weights on the GPU: sizes that the emulator cannot run, CUDA graphs, equal bits."""

import pytest
import torch

from fp8moe_plugin.plan.parameters import K_GROUPS
from tests import helpers as h
from tests.k_grouped import gradients

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("m", "n", "ks"),
    [
        (2048, 1408, [1024, 0, 128, 2048]),
        (1000, 784, [0, 384, 0, 1152]),
        (1, 16, [128]),
        (4096, 16, [2**19 - 128, 256, 256]),  # A of more than 2^31 elements
        (300, 272, [128 * (i % 5) for i in range(2 * K_GROUPS + 8)]),
    ],
)
def test_each_group_gets_its_product(m, n, ks):
    call = gradients(h.seeded(0, DEVICE), m, n, ks)
    apart, in_place, again = (
        h.poisoned(*call.c.shape, dtype=torch.float32, device=DEVICE),
        call.c.clone(),
        call.c.clone(),
    )
    call.assert_right(call.run(apart, call.c))
    call.run(in_place, in_place)
    call.run(again, again)
    assert h.same_bits(in_place, apart)
    assert h.same_bits(in_place, again)


def test_a_call_captures_in_a_cuda_graph():
    call = gradients(h.seeded(0, DEVICE), 512, 512, [512, 0, 1024])
    d = torch.empty_like(call.c)
    layout = torch.tensor(call.ks, dtype=torch.int32, device=DEVICE)
    eager = call.run(d, call.c).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(d, call.c, layout)
    d.fill_(float("nan"))
    graph.replay()
    assert h.same_bits(d, eager)
