"""The format per-channel FP8 in files and in memory."""

import json
import struct
from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.headers import check_shards
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.spec import QuantSpec
from tests.checkpoint.published import described
from tests.checkpoint.test_model import describe
from warmup.memory import weight_shapes

EXPERTS = Experts(layers=1, experts=2, topk=1, hidden=256, intermediate=96)
SPEC = QuantSpec(FP8_CHANNEL, scale="weight_scale", dense=FP8_CHANNEL)


def test_each_row_has_one_scale():
    assert FP8_CHANNEL.scales.shape(96, 4096) == FP8_CHANNEL.scales.file_shape("BF16", 96, 4096) == [96, 1]
    assert FP8_CHANNEL.nbytes(96, 4096) == 96 * 4096 + 96 * 4


def test_scales_of_rows_do_not_imply_channels():
    with pytest.raises(ValueError, match=r"no number of channels follows from \[8, 96, 1\]"):
        FP8_CHANNEL.scales.channels([8, 96, 1])


def check_header(folder: Path, weight: list[int], dtype: str, scales: list[int]) -> None:
    name, nbytes = "model.layers.0.mlp.experts.1.down_proj", {"BF16": 2, "F32": 4, "F8_E8M0": 1}[dtype]
    header, end = {}, 0
    for kind, tensor, shape, size in (
        ("weight", "F8_E4M3", weight, 1),
        ("weight_scale", dtype, scales, nbytes),
        ("input_scale", "F32", [], 4),
    ):
        begin, end = end, end + size * (shape[0] * shape[-1] if shape else 1)
        header[f"{name}.{kind}"] = {"dtype": tensor, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    check_shards(folder, SPEC, (SPEC.scale,), EXPERTS, 0, [0])


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("scales", [[256, 1], [1], []])
def test_headers_have_a_scale_for_each_row_or_one(tmp_path: Path, dtype: str, scales: list[int]):
    check_header(tmp_path, [256, 96], dtype, scales)


@pytest.mark.parametrize(
    ("weight", "dtype", "scales"),
    [([256, 96], "F32", [96, 1]), ([256, 96], "F32", [2, 1]), ([256, 96], "F8_E8M0", [256, 1]), ([1, 1], "F32", [])],
)
def test_other_shapes_and_dtypes_are_refused(tmp_path: Path, weight: list[int], dtype: str, scales: list[int]):
    wanted = r"requires F8_E4M3 \[256, 96\]" if weight == [1, 1] else r"requires F32 or BF16 or F16 \[256, 1\]"
    with pytest.raises(CheckpointError, match=wanted):
        check_header(tmp_path, weight, dtype, scales)


def test_memory_counts_a_scale_for_each_row(tmp_path: Path):
    model = read_model(describe(tmp_path, described("GLM-4.7-FP8")))
    assert (model.weights, model.dense_weights) == (FP8_CHANNEL, FP8_CHANNEL)
    shapes = {shape.name: shape for shape in weight_shapes(model, Parallel(tp=4))}
    (w13,) = (shape for name, shape in shapes.items() if name.startswith("experts") and "w13" in name)
    assert w13.bytes == 90 * 160 * 768 * (5120 + 4)
