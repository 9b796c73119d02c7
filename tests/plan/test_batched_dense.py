"""The kernels of a batch of dense GEMMs, `fp8_einsum`."""

import itertools

import torch

from fp8moe_plugin import ops
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.plan.sm90.kernel_sets import batched_dense_kernels, dense_kernels
from tests import helpers as h


def test_several_groups_launch_their_kernels_and_nothing_else(monkeypatch):
    device = launched(monkeypatch, (2, 8), (1, 8, 30, 300))
    assert device.keys == set(batched_dense_kernels())


def test_one_group_is_a_dense_layer(monkeypatch):
    device = launched(monkeypatch, (1,), (1, 30, 300, 5000))
    assert device.keys <= set(dense_kernels(True, FP8_BLOCK, biased=False))


def launched(monkeypatch, groups, tokens):
    gen = h.seeded(0, torch.device("cpu"))
    shapes = list(itertools.product(groups, tokens))
    calls = [(h.random_quantized(gen, t, g, 256), h.random_weights(gen, g, 128, 256)) for g, t in shapes]
    device = h.Recorder()
    h.serve(monkeypatch, device)
    for (a, b), (g, t) in zip(calls, shapes, strict=True):
        ops.fp8_einsum("bhr,hdr->bhd", a, b, torch.empty(t, g, 128).bfloat16())
    return device
