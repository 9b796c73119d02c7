"""vLLM loads FP8 weights with a scale for each row, or one for each tensor, which is repeated; without an engine."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import linear
from vllm.model_executor.model_loader.reload import layerwise

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.loading import check_loaded
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from tests.helpers import same_bits
from tests.layers.experts import EXPERTS, HIDDEN, make_rows, with_row_scales
from tests.layers.vllm.one_rank import ROWS, Layer, Quantized, default_config, load_mlp, make_mlp

pytestmark = pytest.mark.seam

STATIC = replace(ROWS, input_scales=True)
SHARES = [
    (256, 1, 256),
    (512, 2, 256),
    (1536, 8, 256),
    (320, 2, 256),
    (96, 1, 128),
]  # channels, ranks, channels of each
per_tensor = pytest.mark.parametrize("per_tensor", [False, True], ids=["per row", "per tensor"])


def assert_parts(parts, checkpoint, dims):
    """The ranks' parts are those of a checkpoint, then zeros; all ranks have all scales of w2."""
    for name, whole in checkpoint.items():
        dim = dims - 1 if name.startswith("w2") else dims - 2
        if name == "w2_weight_scale":
            assert all(same_bits(part[name], whole) for part in parts)
            continue
        assembled, size = torch.cat([part[name] for part in parts], dim), whole.shape[dim]
        assert same_bits(assembled.narrow(dim, 0, size), whole)
        assert not assembled.narrow(dim, size, assembled.shape[dim] - size).float().any()


def of_rank(layer):
    return {name.removesuffix("_inv"): tensor for name, tensor in layer.parts().items()}


@per_tensor
@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_ranks_hold_their_part_of_experts(intermediate, ranks, channels, per_tensor):
    checkpoint, layers = make_rows(intermediate, per_tensor), []
    for rank in range(ranks):
        layers.append(Layer(intermediate, ranks, rank, ROWS).load(checkpoint))
        assert layers[-1].w13_weight_scale.shape == (EXPERTS, 2 * channels, 1)
        for name, parameter in layers[-1].named_parameters():
            check_loaded("L", name, parameter)
    whole = {name: torch.stack(tensors) for name, tensors in with_row_scales(checkpoint).items()}
    assert_parts([of_rank(layer) for layer in layers], whole, 3)


@per_tensor
@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_ranks_hold_their_part_of_an_mlp(on_rank, intermediate, ranks, channels, per_tensor):
    checkpoint, parts = make_rows(intermediate, per_tensor), []
    for rank in range(ranks):
        on_rank(ranks, rank)
        gate_up, down = load_mlp(make_mlp(intermediate, quant=ROWS), checkpoint)
        assert gate_up.weight_scale.shape == (2 * channels, 1)
        parts.append({})
        for kind in ("weight", "weight_scale"):
            parts[-1][f"w1_{kind}"], parts[-1][f"w3_{kind}"] = getattr(gate_up, kind).data.chunk(2)
            parts[-1][f"w2_{kind}"] = getattr(down, kind).data
    assert_parts(parts, {name: tensors[0] for name, tensors in with_row_scales(checkpoint).items()}, 2)


@per_tensor
def test_ranks_hold_their_heads(on_rank, per_tensor):
    """Four ranks, eight query heads and two of keys and values, of 24 channels."""
    gen = torch.Generator().manual_seed(0)
    rows = {"q": 192, "k": 48, "v": 48}
    scales = {
        name: torch.rand((), generator=gen) if per_tensor else torch.rand(n, 1, generator=gen)
        for name, n in rows.items()
    }
    wide = {name: scale.expand(rows[name], 1) for name, scale in scales.items()}
    for rank in range(4):
        on_rank(4, rank)
        with set_current_vllm_config(default_config()):
            qkv = linear.QKVParallelLinear(
                HIDDEN, 24, 8, 2, bias=False, quant_config=Quantized(ROWS), prefix="attn.qkv_proj"
            )
        for name, scale in scales.items():
            qkv.weight_scale.weight_loader(qkv.weight_scale, scale, name)
        own = [wide["q"][48 * rank :][:48], *(wide[name][24 * (rank // 2) :][:24] for name in "kv")]
        assert torch.equal(qkv.weight_scale.data, torch.cat(own))


def test_a_scale_of_fused_rows_stands_for_all(on_rank):
    on_rank(1, 0)
    gate_up, _ = make_mlp(256, quant=ROWS)
    gate_up.weight_scale.weight_loader(gate_up.weight_scale, torch.tensor([0.5]))
    assert torch.equal(gate_up.weight_scale.data, torch.full((512, 1), 0.5))


@per_tensor
@pytest.mark.parametrize("name", ["w1_weight", "w3_weight_scale", "w2_weight_scale"])
@pytest.mark.parametrize("rank", [0, 7])
def test_a_missing_tensor_is_noticed(name, rank, per_tensor):
    checkpoint = make_rows(1536, per_tensor)
    checkpoint[name][1] = None
    layer = Layer(1536, 8, rank, ROWS).load(checkpoint)
    shard, _, kind = name.partition("_")
    parameter = f"{'w2' if shard == 'w2' else 'w13'}_{kind}"
    with pytest.raises(CheckpointError, match=f"{parameter} of local expert 1: a tensor is missing"):
        check_loaded("L", parameter, getattr(layer, parameter))


@pytest.mark.parametrize(
    ("scale", "why"),
    [
        (torch.ones(255, 1), r"shape \[255, 1\]"),
        (torch.ones(256), r"must be a matrix: either a weight, or one scale for each of its rows"),
        (torch.ones(2, 2), r"has shape \[2, 2\]"),
        (torch.ones(256, 1, dtype=torch.float64), "dtype torch.float64, but a per-channel FP8 checkpoint has"),
        (torch.tensor(torch.nan), "hold NaN or infinity"),
        (torch.tensor([-1.0]), "range from -1 to -1"),
    ],
)
def test_scales_that_cannot_be_are_refused(on_rank, scale, why):
    on_rank(1, 0)
    layer, (gate_up, _) = Layer(256, 1, 0, ROWS), make_mlp(256, quant=ROWS)
    with pytest.raises(CheckpointError, match=why):
        layer.load({"w1_weight_scale": [scale]})
    with pytest.raises(CheckpointError, match=why):
        gate_up.weight_scale.weight_loader(gate_up.weight_scale, scale, 0)


@per_tensor
def test_vllm_reloads_a_layer_in_place(monkeypatch, per_tensor):
    """Its last tensors are scales, of which vLLM must not count too many."""
    first = make_rows(256, per_tensor) | {f"{w}_input_scale": [torch.tensor(1.0)] * EXPERTS for w in ("w1", "w3", "w2")}
    second = {name: tensors[::-1] for name, tensors in sorted(first.items(), reverse=True)}
    monkeypatch.setattr(Fp8MoeMethod, "_make_kernel", lambda *_: None)
    monkeypatch.setattr(Fp8MoeMethod, "_set_up", lambda *_: None)
    layer, fresh = (Layer(256, 1, 0, STATIC) for _ in range(2))
    fresh.load(second)
    layerwise.record_metadata_for_reloading(layer)
    layer.load(first)
    layer.quant_method.process_weights_after_loading(layer)
    served = dict(layer.named_parameters())
    layerwise.initialize_layerwise_reload(layer)
    assert layer.load(second).w2_weight is served["w2_weight"]
    for name, wanted in fresh.named_parameters():
        assert same_bits(served[name].data, wanted.data)


def test_static_input_scales_are_loaded_and_not_used(on_rank):
    on_rank(1, 0)
    layer, (gate_up, down) = Layer(256, 1, 0, STATIC), make_mlp(256, quant=STATIC)
    layer.load({f"{w}_input_scale": [torch.tensor(float(e)) for e in range(EXPERTS)] for w in ("w1", "w2", "w3")})
    assert layer.w13_input_scale.tolist() == layer.w2_input_scale.tolist() == [0, 1, 2]
    for part in (0, 1):
        gate_up.input_scale.weight_loader(gate_up.input_scale, torch.tensor(3.0), part)
    down.input_scale.weight_loader(down.input_scale, torch.tensor([3.0]))
    assert (
        layer.w13_weight.weight_loader.supports_moe_loading == layer.w13_input_scale.weight_loader.supports_moe_loading
    )
