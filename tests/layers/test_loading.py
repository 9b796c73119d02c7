import pytest
import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers import loading
from fp8moe_plugin.layers.parameters import marked
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


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_e8m0_scales_are_decoded_exactly(dtype):
    scales = marked(torch.empty(5, 51), FP8_BLOCK, Role.SCALES)
    stored = torch.arange(255, dtype=torch.uint8).view(5, 51)
    kept = loading.as_kept(scales, stored.view(dtype))
    assert kept.dtype == torch.float32
    assert torch.equal(kept.double(), torch.exp2(stored.double() - 127))
    loading.check_tensor("L", scales, stored[:4].view(dtype))


def test_bf16_in_fp8_names_each_place_of_the_list():
    """The list comes from config.json, or from the trainer that started the engine (docs/rl.md)."""
    weight = marked(torch.empty(4, 128, dtype=torch.float8_e4m3fn), FP8_BLOCK, Role.WEIGHT)
    where = "in config.json or in what overrides it, such as hf_overrides"
    with pytest.raises(CheckpointError, match=f"^L has dtype torch.bfloat16, .* {where}. Else download"):
        loading.check_tensor("L", weight, torch.ones(4, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize(("byte", "message"), [(255, "hold NaN"), (250, "range from .* damaged")])
def test_e8m0_scales_that_cannot_be_are_refused(dtype, byte, message):
    scales = marked(torch.empty(1, 2), FP8_BLOCK, Role.SCALES)
    with pytest.raises(CheckpointError, match=f"scales L {message}"):
        loading.check_tensor("L", scales, torch.tensor([[127, byte]], dtype=torch.uint8).view(dtype))


def test_a_lack_of_memory_is_no_fault_of_the_checkpoint():
    with pytest.raises(torch.OutOfMemoryError, match="of memory"), loading.shape_errors("layer", torch.empty(2, 3)):
        raise torch.OutOfMemoryError("out of memory")
    with (
        pytest.raises(CheckpointError, match=r"shape \[2, 3\] does not fit the layer: sizes"),
        loading.shape_errors("layer", torch.empty(2, 3)),
    ):
        raise RuntimeError("sizes")
