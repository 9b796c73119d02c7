import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.layers.weights import per_block_cast_to_fp8
from tests import helpers as h

sizes = st.sampled_from((1, 64, 127, 128, 129, 300))
magnitudes = st.sampled_from((0.0, 1e-20, 1e-3, 1.0, 1e4))


@given(groups=st.sampled_from(((), (3,))), n=sizes, k=sizes, magnitude=magnitudes, seed=h.seeds)
def test_each_block_is_rounded_at_the_smallest_scale_that_holds_it(device, groups, n, k, magnitude, seed):
    w = torch.randn(*groups, n, k, generator=h.seeded(seed, device), device=device) * magnitude
    q, scales = per_block_cast_to_fp8(w)
    assert q.dtype == h.FP8
    assert q.shape == w.shape
    assert q.is_contiguous()
    assert scales.shape == (*groups, -(-n // 128), -(-k // 128))
    wide = scales.double().repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)[..., :k]
    half_step = torch.maximum(w.double().abs() / 16, wide / 1024)
    assert ((q.double() * wide - w.double()).abs() <= half_step * (1 + 1e-3)).all()
    for row in range(0, n, 128):
        for column in range(0, k, 128):
            largest = w[..., row : row + 128, column : column + 128].abs().amax((-2, -1)).clamp(min=1e-10)
            torch.testing.assert_close(scales[..., row // 128, column // 128], largest / 448)


@given(seed=h.seeds)
def test_a_block_depends_on_no_other(device, seed):
    w = torch.randn(256, 256, generator=h.seeded(seed, device), device=device)
    q, scales = per_block_cast_to_fp8(w)
    w[:128, :128] *= 1e4
    louder, louder_scales = per_block_cast_to_fp8(w)
    assert h.same_bits(louder[128:], q[128:])
    assert h.same_bits(louder[:128, 128:], q[:128, 128:])
    assert (louder_scales != scales).nonzero().tolist() == [[0, 0]]


@given(n=sizes, k=st.sampled_from((128, 384)), seed=h.seeds)
def test_weights_already_quantized_are_kept(device, n, k, seed):
    q, scales = per_block_cast_to_fp8(torch.randn(n, k, generator=h.seeded(seed, device), device=device))
    values = h.dequantize_weights(q, scales)
    again = h.dequantize_weights(*per_block_cast_to_fp8(values.float()))
    torch.testing.assert_close(again, values, rtol=1e-6, atol=0)
