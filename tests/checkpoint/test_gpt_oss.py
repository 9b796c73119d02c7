"""gpt-oss: what the warm-up reads, and how ranks share its experts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8moe_plugin.checkpoint.gpt_oss import ACTIVATION, rank_channels
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.splits import rank_shapes
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.plan.model_specs import model_specs
from fp8moe_plugin.plan.spec import MoeShape
from tests.checkpoint.published import described
from tests.checkpoint.test_model import describe
from tests.engine.tiny_gpt_oss import write
from tests.helpers import environment
from warmup.__main__ import main


@pytest.mark.parametrize(("form", "weights"), [("fp8", FP8_BLOCK), ("mxfp4", PACKED_MXFP4)])
def test_only_experts_are_quantized(tmp_path, form, weights):
    with environment("FP8MOE_FP4_EXPERTS", form):
        model = read_model(describe(tmp_path, described("gpt-oss-120b")))
    assert (model.weights, model.recoded_from, model.activations) == (weights, MXFP4, (ACTIVATION,))
    assert (model.dense, {layer.name for layer in model.plain}) == ((), {"self_attn.qkv_proj", "self_attn.o_proj"})
    assert all(spec.bias for spec in model_specs(model, MoeShape.of(model.experts, 128)))


@pytest.mark.parametrize(
    ("split", "experts", "channels"),
    [
        (Parallel(), 128, 2944),
        (Parallel(tp=2), 128, 1536),
        (Parallel(tp=4), 128, 768),
        (Parallel(tp=8), 128, 384),
        (Parallel(tp=16), 128, 256),
        (Parallel(tp=8, ep=8), 16, 2944),
        (Parallel(dp=4, ep=4), 32, 2944),
        (Parallel(tp=8, ep=2, sglang=True), 64, 768),
    ],
)
def test_ranks_hold_whole_blocks(tmp_path, split, experts, channels):
    part = rank_shapes(read_model(describe(tmp_path, described("gpt-oss-120b"))), split).experts
    assert (part.experts, part.hidden, part.intermediate) == (experts, 2944, channels)


@pytest.mark.parametrize(
    ("ranks", "groups"), [(1, [90]), (2, [45, 45]), (4, [23, 23, 23, 21]), (32, [3] * 30 + [0, 0])]
)
def test_ranks_share_groups_of_a_scale(ranks, groups):
    """As vLLM's model cuts the tensors."""
    assert [rank_channels(2880, ranks, rank) for rank in range(ranks)] == [32 * number for number in groups]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_every_split_is_listed_and_explained(tmp_path, capsys, name, form):
    folder = str(describe(tmp_path, described(name)))
    with environment("FP8MOE_FP4_EXPERTS", form), environment("FP8MOE_CACHE_DIR", str(tmp_path / "cache")):
        for split in ("--tp 1", "--tp 2", "--tp 4", "--tp 8", "--tp 8 --ep 8", "--tp-size 8 --ep-size 2"):
            assert main(["list", "--model", folder, *split.split()]) == 0
            assert main(["explain", "--model", folder, *split.split()]) == 0
        assert main(["explain", "--model", folder, "--gpu", "h200", "--gpus", "4"]) == 0
    assert "experts' biases (F32)" in capsys.readouterr().out


def test_ranks_with_different_numbers_of_experts_are_refused(tmp_path):
    model = read_model(describe(tmp_path, described("gpt-oss-120b")))
    with pytest.raises(UnsupportedError, match="3 ranks cannot share 128 experts equally, which vLLM requires"):
        rank_shapes(model, Parallel(tp=1, dp=3, ep=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": None}, "gate and up rows alternate .*, which is only supported in MXFP4"),
        ({"model_type": "kimi_k3"}, "quant_method is 'mxfp4', which is only supported for gpt-oss"),
        ({"swiglu_limit": 5.0}, r"swiglu_limit is 5\.0, but the engines compute gpt-oss with 7"),
    ],
)
def test_other_models_are_refused(tmp_path, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        read_model(describe(tmp_path, described("gpt-oss-20b"), **changes))


def test_a_missing_limit_is_the_engines(tmp_path):
    assert read_model(describe(tmp_path, described("gpt-oss-20b"), swiglu_limit=None)).activations == (ACTIVATION,)


def checkpoint_with(folder: Path, name: str, tensor: torch.Tensor) -> Path:
    write(folder, quantized=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"model.layers.0.mlp.experts.{name}": tensor}, folder / "model.safetensors")
    return folder


def test_headers_are_checked(tmp_path):
    folder = write(tmp_path / "whole", quantized=True)
    assert read_model(folder).experts.experts == json.loads((folder / "config.json").read_text())["num_local_experts"]
    for name, tensor, found in (
        ("down_proj_blocks", torch.zeros(8, 192, 10, 16, dtype=torch.uint8), r"U8 \[8, 192, 10, 16\]"),
        ("gate_up_proj_scales", torch.zeros(8, 704, 6), r"F32 \[8, 704, 6\]"),
        ("gate_up_proj_bias", torch.zeros(7, 704), r"F32 \[7, 704\]"),
    ):
        with pytest.raises(CheckpointError, match=rf"{name}' is {found}, but config.json requires"):
            read_model(checkpoint_with(tmp_path / name, name, tensor))
