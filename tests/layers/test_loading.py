import pytest
import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers import loading
from fp8moe_plugin.ops.checks import poison


def loaded_weight() -> torch.Tensor:
    weight = torch.empty(3, 256, 384, dtype=torch.float8_e4m3fn)
    poison(weight)
    weight.copy_(torch.randn(weight.shape))
    return weight


def test_a_loaded_weight_passes():
    loading.check_loaded("layer", "w13", loaded_weight())


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("at", [(0, 0, 0), (1, 5, 7), (2, 255, 383)])
@pytest.mark.parametrize("bytes_at_once", [1 << 26, 100])
def test_one_nan_anywhere_is_found_and_its_expert_named(monkeypatch, code, at, bytes_at_once):
    monkeypatch.setattr(loading, "CHUNK_BYTES", bytes_at_once)
    weight = loaded_weight()
    weight.view(torch.uint8)[at] = code
    with pytest.raises(CheckpointError, match=f"layer.w13 of local expert {at[0]}: a tensor is missing"):
        loading.check_loaded("layer", "w13", weight)


def test_a_scale_that_was_not_loaded_is_found():
    scale = torch.empty(4, 2, 2)
    poison(scale)
    scale[:3] = 1.0
    with pytest.raises(CheckpointError, match=r"layer\.w2_scale of local expert 3: a tensor is missing"):
        loading.check_loaded("layer", "w2_scale", scale)
