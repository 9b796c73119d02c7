"""Inputs and errors of benchmarks.layer.batched_experts, without times and without the peer."""

import pytest
import torch

from benchmarks.layer.batched_experts import (
    MAX_M,
    ROOM,
    SHAPES,
    WRONG,
    Shape,
    engine_estimate,
    ours,
    random_counts,
    random_layers,
    random_slab,
    relative_l2,
)

SMALL = Shape(local_experts=3, experts=8, hidden=256, intermediate=128, topk=2)


@pytest.fixture(scope="module")
def gen():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("expected_m", [1, 64, 256])
def test_counts_are_of_the_local_experts_and_fit_their_slab(gen, shape, expected_m):
    drawn = torch.stack([random_counts(gen, shape, expected_m) for _ in range(4)])
    assert (drawn.shape, drawn.dtype) == ((4, shape.local_experts), torch.int32)
    assert drawn.float().mean() == pytest.approx(expected_m, rel=0.4)
    assert drawn.max() <= min(max_m for max_m in MAX_M if expected_m * ROOM <= max_m)


def test_a_slab_has_the_strides_of_deepep(gen):
    values, scales = random_slab(gen, SMALL, 64)
    assert (values.shape, values.dtype, values.is_contiguous()) == ((3, 64, 256), torch.float8_e4m3fn, True)
    assert (scales.shape, scales.dtype, scales.stride()) == ((3, 64, 2), torch.float32, (64 * 2, 1, 64))


def test_the_peer_gets_a_multiple_of_16_that_fits_the_slab():
    assert [engine_estimate(m, 256) for m in (1, 16, 17, 256)] == [16, 16, 32, 256]
    assert engine_estimate(40, 40) == 40


def test_errors_are_those_of_quantization_alone(gen, monkeypatch):
    monkeypatch.setattr("benchmarks.layer.batched_experts.COLD_BYTES", 400_000)
    layers, slab = random_layers(gen, SMALL), random_slab(gen, SMALL, 64)
    assert len(layers) == 2
    assert not torch.equal(layers[0].w13_scale, layers[1].w13_scale)
    counts = [64, 0, 13]
    out = ours(SMALL, slab, layers, 16)(1, torch.tensor(counts, dtype=torch.int32))
    assert 0.005 < relative_l2(out, slab, layers[1], counts) < WRONG
    assert relative_l2(out, slab, layers[0], counts) > 1
