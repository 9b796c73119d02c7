"""Whether a checkpoint's experts are in block FP8 or in MXFP4."""

import json

import pytest
import torch
from safetensors.torch import save_file

from fp8moe_plugin.checkpoint.expert_format import expert_format, stored_dtype
from fp8moe_plugin.checkpoint.headers import INDEX_NAME
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import MXFP4

V4 = {"model_type": "deepseek_v4"}


@pytest.mark.parametrize(
    ("fields", "dtype", "expected"),
    [
        ({}, None, FP8_BLOCK),
        ({"model_type": "deepseek_v3"}, "U8", FP8_BLOCK),  # a loader refuses the weight
        ({"expert_dtype": "fp4"}, None, MXFP4),
        ({"expert_dtype": "MXFP4"}, None, MXFP4),
        ({"expert_dtype": "fp8"}, None, FP8_BLOCK),
        ({"quantization_config": {"expert_dtype": "fp4"}}, None, MXFP4),
        (V4, None, MXFP4),
        ({"model_type": "deepseek_v41"}, None, MXFP4),
        (V4 | {"expert_dtype": 3}, None, MXFP4),
        (V4 | {"expert_dtype": "fp8"}, None, FP8_BLOCK),
        (V4, "F8_E4M3", FP8_BLOCK),
        (V4 | {"expert_dtype": "fp4"}, "F8_E4M3", FP8_BLOCK),
        *((V4 | {"expert_dtype": "fp8"}, dtype, MXFP4) for dtype in ("U8", "I8", "F4")),
        (V4, "BF16", MXFP4),  # a loader refuses the weight
    ],
)
def test_weights_then_config_decide_the_format(fields, dtype, expected):
    assert expert_format(fields, dtype) is expected


@pytest.mark.parametrize("name", ["nvfp4", "float4_e2m1fn_x2", "int4", "w4a16", "bf16"])
def test_other_formats_are_refused(name):
    with pytest.raises(UnsupportedError, match=rf"experts are '{name}' \(expert_dtype\)"):
        expert_format({"expert_dtype": name})


def test_the_header_of_the_first_expert_is_read(tmp_path):
    assert stored_dtype(tmp_path) is None
    zeros = torch.zeros(2, 2, dtype=torch.int8)
    save_file(
        {"layers.0.attn.wo_a.weight": zeros, "layers.0.ffn.experts.0.w1.scale": zeros.clone()},
        tmp_path / "a.safetensors",
    )
    assert stored_dtype(tmp_path) is None
    save_file({"layers.0.ffn.experts.0.w1.weight": zeros.float()}, tmp_path / "b.safetensors")
    save_file({"layers.1.ffn.experts.0.w1.weight": zeros}, tmp_path / "c.safetensors")
    assert stored_dtype(tmp_path) == "F32"
    index = {"layers.1.ffn.experts.0.w1.weight": "c.safetensors", "layers.2.ffn.experts.0.w1.weight": "d.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    assert stored_dtype(tmp_path) == "I8"
    (tmp_path / "c.safetensors").unlink()
    assert stored_dtype(tmp_path) is None
