"""The variants of the small trained model: a limit of SwiGLU, and one scale per row."""

import torch
from torch.nn import functional as F

from benchmarks.checkpoints.per_row import by_row, convert
from benchmarks.checkpoints.small_moe import MLP
from benchmarks.checkpoints.synthetic import PRESETS, config, write_checkpoint
from benchmarks.checkpoints.train_small_moe import RECIPES
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.formats.activation import Activation


def test_limit_cuts_gates_and_ups():
    shape = RECIPES["clamped"].shape
    mlp, x = MLP(64, 128, shape.swiglu_limit), 20 * torch.randn(32, 64)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    assert gate.max() > 1
    assert gate.min() < -1
    assert up.abs().max() > 1
    expected = mlp.down_proj(F.silu(gate.clamp(max=1)) * up.clamp(-1, 1))
    assert torch.equal(mlp(x), expected)
    assert config(shape, fp8=False)["swiglu_limit"] == 1


def test_rows_have_scales_of_their_own():
    weight = torch.randn(64, 256) * torch.logspace(-3, 3, 64)[:, None]
    q, scales = by_row(weight.bfloat16())
    error = (q.float() * scales.float() - weight).norm(dim=1) / weight.norm(dim=1)
    assert scales.shape == (64, 1)
    assert error.max() < 0.04


def test_per_row_checkpoint_is_read(tmp_path):
    write_checkpoint(tmp_path / "bf16", PRESETS["deepseek_v3", "tiny"], fp8=False)
    convert(tmp_path / "bf16", tmp_path / "row")
    model = read_model(tmp_path / "row")
    assert model.experts.layers == 3
    assert {*model.activations} == {Activation()}
