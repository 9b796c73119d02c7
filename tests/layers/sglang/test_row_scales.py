"""SGLang loads FP8 weights with a scale for each row, or one for each tensor, which is repeated; without an engine."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.layers.linear import QKVParallelLinear

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.layers.sglang.loads import Loads
from tests.helpers import same_bits
from tests.layers.experts import EXPERTS, HIDDEN, make_rows, with_row_scales
from tests.layers.sglang import layers
from tests.layers.sglang.layers import Layer, load_mlp

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures("slicing")]

ROWS = QuantSpec(FP8_CHANNEL, scale="weight_scale", dense=FP8_CHANNEL)
SHARES = [(256, 1), (512, 2), (1536, 8), (320, 2), (96, 1)]  # channels, ranks
per_tensor = pytest.mark.parametrize("per_tensor", [False, True], ids=["per row", "per tensor"])


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setattr(layers.QUANT, "spec", ROWS)
    monkeypatch.setattr(layers.QUANT, "loads", Loads("weight_scale", "weight_scale"))


def assert_parts(parts, checkpoint, dims):
    """The ranks' parts are those of a checkpoint, then zeros; all ranks have all scales of w2."""
    scales = checkpoint.pop("w2_weight_scale")
    assert all(same_bits(part["w2_weight_scale"], scales) for part in parts)
    layers.assert_assembled(parts, checkpoint, dims)


@per_tensor
@pytest.mark.parametrize(("intermediate", "ranks"), SHARES)
def test_ranks_hold_their_part_of_experts(intermediate, ranks, per_tensor):
    checkpoint, found = make_rows(intermediate, per_tensor), []
    for rank in range(ranks):
        found.append(Layer(intermediate, ranks, rank))
        for _ in range(2):  # the second time it is updated
            found[-1].load(checkpoint)
            layers.QUANT.loads.finish()
    whole = {name: torch.stack(tensors) for name, tensors in with_row_scales(checkpoint).items()}
    assert_parts([layer.parts() for layer in found], whole, 3)


def load(layer: torch.nn.Module, name: str, tensor: torch.Tensor, *shard: object) -> None:
    parameter = getattr(layer, name)
    parameter.weight_loader(parameter, tensor, *shard)


@per_tensor
@pytest.mark.parametrize(("intermediate", "ranks"), SHARES)
def test_ranks_hold_their_part_of_an_mlp(make_mlp, intermediate, ranks, per_tensor):
    checkpoint, parts = make_rows(intermediate, per_tensor), []
    for rank in range(ranks):
        gate_up, down = mlp = make_mlp(intermediate, ranks, rank)
        load_mlp(mlp, checkpoint)
        parts.append({})
        for kind in ("weight", "weight_scale"):
            parts[-1][f"w1_{kind}"], parts[-1][f"w3_{kind}"] = getattr(gate_up, kind).data.chunk(2)
            parts[-1][f"w2_{kind}"] = getattr(down, kind).data
    layers.QUANT.loads.finish()
    assert_parts(parts, {name: tensors[0] for name, tensors in with_row_scales(checkpoint).items()}, 2)


@per_tensor
def test_ranks_hold_their_heads(on_rank, per_tensor):
    """Four ranks, eight query heads and two of keys and values, of 24 channels."""
    gen, rows = torch.Generator().manual_seed(0), {"q": 192, "k": 48, "v": 48}
    shapes = {name: () if per_tensor else (n, 1) for name, n in rows.items()}
    scales = {name: torch.rand(shape, generator=gen) for name, shape in shapes.items()}
    wide = {name: scale.expand(rows[name], 1) for name, scale in scales.items()}
    for rank in range(4):
        qkv = QKVParallelLinear(HIDDEN, 24, 8, 2, prefix="attn.qkv_proj", **on_rank(rank, 4))
        for name, scale in scales.items():
            load(qkv, "weight_scale", scale, name)
        own = [wide["q"][48 * rank :][:48], *(wide[name][24 * (rank // 2) :][:24] for name in "kv")]
        assert torch.equal(qkv.weight_scale.data, torch.cat(own))


@per_tensor
@pytest.mark.parametrize("name", ["w1_weight", "w3_weight_scale", "w2_weight_scale"])
@pytest.mark.parametrize("rank", [0, 7])
def test_a_missing_tensor_is_noticed(name, rank, per_tensor):
    checkpoint = make_rows(1536, per_tensor)
    checkpoint[name][1] = None
    kind = name.partition("_")[2]
    Layer(1536, 8, rank).load(checkpoint)
    with pytest.raises(CheckpointError, match=rf"L\.w.*_{kind} of local expert 1: a tensor is missing"):
        layers.QUANT.loads.finish()


@pytest.mark.parametrize(
    ("scale", "why"),
    [
        (torch.ones(255, 1), r"has shape \[255, 1\], but must have \[256, 1\]"),
        (torch.ones(256), "must be a matrix: either a weight, or one scale for each of its rows"),
        (torch.ones(256, 1, dtype=torch.float64), "dtype torch.float64, but a per-channel FP8 checkpoint has"),
        (torch.tensor(torch.nan), "hold NaN or infinity"),
    ],
)
def test_scales_that_cannot_be_are_refused(make_mlp, scale, why):
    with pytest.raises(CheckpointError, match=why):
        Layer(256, 1, 0).load({"w1_weight_scale": [scale]})
    with pytest.raises(CheckpointError, match=why):
        load(make_mlp(256, 1, 0)[0], "weight_scale", scale, 0)


def test_static_input_scales_are_loaded_and_not_used(monkeypatch, make_mlp):
    monkeypatch.setattr(layers.QUANT, "spec", replace(ROWS, input_scales=True))
    layer, (gate_up, down) = Layer(256, 1, 0), make_mlp(256, 1, 0)
    layer.load({f"{w}_input_scale": [torch.tensor(float(e)) for e in range(EXPERTS)] for w in ("w1", "w2", "w3")})
    assert layer.w13_input_scale.tolist() == layer.w2_input_scale.tolist() == [0, 1, 2]
    for part in (0, 1):
        load(gate_up, "input_scale", torch.tensor(3.0), part)
    load(down, "input_scale", torch.tensor([3.0]))
