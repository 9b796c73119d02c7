import pytest
import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers import unquantized
from fp8moe_plugin.layers.unquantized import is_quantized, quantize_weight
from fp8moe_plugin.layers.weights import per_block_cast_to_fp8
from tests import helpers as h


@pytest.mark.parametrize(("n", "k"), [(128, 128), (300, 384), (576, 256), (1, 129), (640, 100)])
@pytest.mark.parametrize("dtype", unquantized.DTYPES)
@pytest.mark.parametrize("at_once", [1, 300 * 128, 1 << 24])
def test_quantized_bytes_do_not_depend_on_chunk_rows(device, monkeypatch, n, k, dtype, at_once):
    monkeypatch.setitem(unquantized.WEIGHTS_AT_ONCE, device.type, at_once)
    w = torch.randn(n, k, generator=h.seeded(0, torch.device("cpu"))).to(dtype)
    q, scales = quantize_weight("w", w, device)
    wanted, wanted_scales = per_block_cast_to_fp8(w)  # on the CPU
    assert h.same_bits(q.cpu(), wanted)
    assert h.same_bits(scales.cpu(), wanted_scales)
    assert q.is_contiguous()
    assert scales.dtype == torch.float32


def test_a_scale_is_the_largest_magnitude_by_448(device):
    w = torch.zeros(256, 256, dtype=torch.bfloat16)
    w[3, 5], w[200, 7], w[130, 200] = -896, 1.5, 448
    q, scales = quantize_weight("w", w, device)
    wanted = torch.tensor([[2.0, 1e-10 / 448], [torch.tensor(1.5) / torch.tensor(448.0), 1.0]])
    torch.testing.assert_close(scales.cpu(), wanted, rtol=1e-6, atol=0)
    assert q[3, 5] == -448
    assert q[200, 7] == q[130, 200] == 448
    assert q.float().count_nonzero() == 3  # zeros stay zeros


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_by_name(device, value):
    w = torch.ones(300, 256, dtype=torch.bfloat16)
    w[299, 255] = value
    with pytest.raises(CheckpointError, match=r"layers\.0\.q_proj\.weight: .* holds NaN or infinity"):
        quantize_weight("layers.0.q_proj.weight", w, device)


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(2, 128, 128),
        torch.ones(128),
        torch.ones(0, 128),
        torch.ones(128, 128, dtype=torch.int8),
        torch.ones(128, 128).to(torch.float8_e4m3fn),
    ],
)
def test_other_tensors_are_refused(weight):
    with pytest.raises(CheckpointError, match=r"some\.name is torch\..*only bfloat16, float16 or float32 matrices"):
        quantize_weight("some.name", weight, torch.device("cpu"))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.61.self_attn.kv_a_proj_with_mqa",
        "model.layers.3.self_attn.indexer.wq_b",
        "model.layers.3.mlp.experts",
        "model.layers.3.mlp.experts.255.down_proj",
        "model.layers.31.block_sparse_moe.experts.7.w2",
        "model.language_model.layers.1.mlp.shared_experts.gate_up_proj",
    ],
)
def test_projections_are_quantized(name):
    assert is_quantized(name)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head",
        "model.embed_tokens",
        "model.norm",
        "model.layers.0.mlp.gate",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.0.mlp.gate.wg",
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.0.self_attn.indexer.weights_proj",
        "model.layers.0.self_attn.q_norm",
        "model.layers.61.eh_proj",
        "model.layers.61.shared_head.head",
        "model.visual.blocks.0.attn.q_proj",
        "mtp.layers.0.mlp.experts",
    ],
)
def test_all_else_stays(name):
    assert not is_quantized(name)
