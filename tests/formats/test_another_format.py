"""Checkpoints, loaders and the warm-up work with any format that `formats/` describes: here with one of 4 bits."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8moe_plugin.checkpoint.headers import check_shards
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Dense, Experts, Model, Split, dense_refusal
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.spec import ONLINE, QuantSpec
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.launches.kernel_sets import model_kernels
from fp8moe_plugin.layers import experts, loading
from fp8moe_plugin.layers.blocks import padded_to_blocks
from fp8moe_plugin.layers.parameters import empty_tensor, expert_tensors
from fp8moe_plugin.ops.checks import poison
from fp8moe_plugin.plan.spec import Arrival, LayerSpec, MoeShape
from tests.formats.fp4 import FP4, codes
from warmup.memory import weight_shapes

EXPERTS = Experts(layers=1, experts=2, topk=1, hidden=256, intermediate=384)
MODEL = Model("M", EXPERTS, dense=(), heads=8, kv_heads=8, vocab=512, ue8m0=False, quantized=True, weights=FP4)
WEIGHT, SCALES = Role


def test_tensors_of_experts_have_the_shapes_of_the_format():
    found = {
        name: (tensor.dtype, list(tensor.shape)) for name, tensor in expert_tensors(FP4, 2, 256, 384, "scale").items()
    }
    assert found == {
        "w13_weight": (torch.uint8, [2, 768, 128]),
        "w13_scale": (torch.float8_e8m0fnu, [2, 768, 8]),
        "w2_weight": (torch.uint8, [2, 256, 192]),
        "w2_scale": (torch.float8_e8m0fnu, [2, 256, 12]),
    }


def test_a_tensor_is_checked_by_its_role_and_not_by_its_dtype():
    weight, scales = (empty_tensor(FP4, role, 384, 256) for role in Role)
    loading.check_tensor("w", weight, codes(384, 128))
    loading.check_tensor("s", scales, codes(384, 8))
    with pytest.raises(CheckpointError, match=r"a FP4 checkpoint has torch.uint8 or torch.int8"):
        loading.check_tensor("w", weight, torch.zeros(384, 8).to(torch.float8_e8m0fnu))
    with pytest.raises(CheckpointError, match="one scale for each of its 1x32 blocks"):
        loading.check_tensor("s", scales, codes(384))
    damaged = codes(384, 8)
    damaged[5, 3] = 0xFF
    with pytest.raises(CheckpointError, match="the scales s hold NaN"):
        loading.check_tensor("s", scales, damaged)
    for parameter, columns in ((weight, 128), (scales, 8)):
        loading.check_size("x", parameter, codes(384, columns), 384, 256)
        loading.check_expert_shape("x", parameter, codes(384, columns), "w1", 256, 384)
        loading.check_expert_shape("x", parameter, codes(256, columns * 384 // 256), "w2", 256, 384)
        with pytest.raises(CheckpointError, match=rf"must have \[384, {columns}\]"):
            loading.check_size("x", parameter, codes(384, columns - 1), 384, 256)


def test_the_bits_of_a_checkpoint_are_kept():
    weight, scales = (empty_tensor(FP4, role, 384, 256) for role in Role)
    kept = loading.as_kept(weight, codes(384, 128).view(torch.int8))
    assert kept.dtype == torch.uint8
    assert kept.equal(codes(384, 128))
    kept = loading.as_kept(scales, codes(384, 8))
    assert kept.dtype == torch.float8_e8m0fnu
    assert kept.view(torch.uint8).equal(codes(384, 8))


def test_a_missing_scale_is_found():
    scales = poison(empty_tensor(FP4, SCALES, 384, 256, 2))
    scales[0] = 1.0
    with pytest.raises(CheckpointError, match="local expert 1: a tensor is missing"):
        loading.check_loaded("layer", "w13_scale", scales)
    scales[1] = 1.0
    loading.check_loaded("layer", "w13_scale", scales)


@pytest.mark.parametrize(("role", "columns"), [(WEIGHT, 2), (SCALES, 32)])
def test_ranks_get_whole_blocks(role, columns):
    """384 channels on 2 ranks: 256 for each, of which the second has 128."""
    down = padded_to_blocks("w2", empty_tensor(FP4, role, 256, 256), codes(256, 384 // columns), -1, 384, 2, 1)
    assert list(down.shape) == [256, 512 // columns]
    assert down[:, 256 // columns : 384 // columns].equal(codes(256, 384 // columns)[:, 256 // columns :])
    gate = padded_to_blocks("w1", empty_tensor(FP4, role, 256, 256), codes(384, 256 // columns), -2, 384, 2, 0)
    assert list(gate.shape) == [512, 256 // columns]
    assert gate[:256].equal(codes(384, 256 // columns)[:256])
    assert dense_refusal(256, (264, 264), True, FP4) is None


def test_headers_are_checked_by_the_format(tmp_path: Path):
    spec = QuantSpec(FP4, scale="weight_scale")

    def write(weight: list[int], scales: list[int]) -> None:
        name, size = "model.layers.0.mlp.experts.1.down_proj", [torch.Size(s).numel() for s in (weight, scales)]
        header = {
            f"{name}.weight": {"dtype": "I8", "shape": weight, "data_offsets": [0, size[0]]},
            f"{name}.weight_scale": {"dtype": "F8_E8M0", "shape": scales, "data_offsets": [size[0], sum(size)]},
        }
        text = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(sum(size)))

    write([256, 192], [256, 12])
    check_shards(tmp_path, spec, (spec.scale,), EXPERTS, 0, [0])
    with pytest.raises(CheckpointError, match=r"requires any dtype \[256, 384\]"):
        check_shards(tmp_path, replace(spec, online=True), (spec.scale,), EXPERTS, 0, [0])
    write([256, 192], [2, 3])
    with pytest.raises(CheckpointError, match=r"requires F8_E8M0 or U8 \[256, 12\]"):
        check_shards(tmp_path, spec, (spec.scale,), EXPERTS, 0, [0])


def test_memory_is_that_of_the_format():
    w13, w2 = (found for found in weight_shapes(MODEL, Parallel()) if found.name.startswith("experts"))
    assert (w13.bytes, w2.bytes) == (2 * 768 * 256 * 17 // 32, 2 * 256 * 384 * 17 // 32)
    mixed = replace(MODEL, dense=(Dense("mlp.down_proj", 1, 256, (384,), Split.NONE),))
    assert [found.bytes for found in weight_shapes(mixed, Parallel())][2] == 384 * 256 + 4 * 6
    other = replace(MODEL, weights=ONLINE.weights)
    assert weight_shapes(other, Parallel())[0].bytes == 2 * (768 * 256 + 4 * 6 * 2)


def test_no_backend_takes_a_format_without_kernels():
    for target, backend in BACKENDS.items():
        with pytest.raises(UnsupportedError, match=f"experts have weights in the format FP4, which the {backend.name}"):
            model_kernels(MODEL, target)
    tensors = expert_tensors(FP4, 2, 256, 384)
    layer = experts.Experts(LayerSpec(MoeShape.of(EXPERTS, 2), FP4), tensors, tensors)
    with pytest.raises(UnsupportedError, match="L: the model's experts have weights in the format FP4"):
        layer.prepare("L", Arrival, "warmup")
