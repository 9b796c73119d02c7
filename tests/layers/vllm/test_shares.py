"""Ranks share experts and MLPs of any size in whole scale blocks, loaded by vLLM's loader; without an engine."""

import itertools
import re
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.model_executor.model_loader.reload import layerwise

from fp8moe_plugin.errors import CheckpointError, InvalidInputError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.spec import ONLINE
from fp8moe_plugin.layers import blocks
from fp8moe_plugin.layers.loading import check_loaded
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.ops.reference import dequantize_blocks
from tests.checkpoint.test_shapes import SHARES
from tests.helpers import same_bits
from tests.layers.experts import (
    EXPERTS,
    HIDDEN,
    TOPK,
    Checkpoint,
    make_checkpoint,
    make_mxfp4,
    make_unquantized,
    recoded,
)
from tests.layers.vllm.one_rank import RECODED, Layer, load_mlp, make_mlp

TOKENS = 9


def loaded(intermediate: int, ranks: int, checkpoint: Checkpoint) -> Iterator[Layer]:
    return (Layer(intermediate, ranks, rank).load(checkpoint) for rank in range(ranks))


@pytest.mark.seam
@pytest.mark.parametrize(("intermediate", "ranks"), [(2048, 8), (1536, 4), (256, 1)])
def test_shares_that_are_whole_blocks_are_loaded_by_vllm_alone(intermediate, ranks):
    layer = Layer(intermediate, ranks, 0)
    assert layer.w13_weight.shape == (EXPERTS, 2 * intermediate // ranks, HIDDEN)
    assert layer.w13_weight.weight_loader.__wrapped__ is layer.weight_loader.__func__


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_rank_parts_hold_the_checkpoint_then_zeros(intermediate, ranks, channels):
    checkpoint = make_checkpoint(intermediate)
    parts = [layer.parts() for layer in loaded(intermediate, ranks, checkpoint)]
    for name, tensors in checkpoint.items():
        dim = 2 if name.startswith("w2") else 1
        whole, assembled = torch.stack(tensors), torch.cat([part[name] for part in parts], dim)
        size = whole.shape[dim]
        assert assembled.shape[dim] == ranks * channels // (GROUP if "scale" in name else 1)
        assert torch.equal(assembled.narrow(dim, 0, size).float(), whole.float())
        assert not assembled.narrow(dim, size, assembled.shape[dim] - size).float().any()


def experts_in_float64(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[E, T, H]`: the result of every expert for every token, on dequantized weights."""
    w1, w3, w2 = (dequantize_blocks(w[f"{n}_weight"], w[f"{n}_weight_scale_inv"]).double() for n in ("w1", "w3", "w2"))
    gate, up = x @ w1.mT, x @ w3.mT
    return (torch.nn.functional.silu(gate) * up) @ w2.mT


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_the_ranks_together_compute_what_one_does(intermediate, ranks, channels):
    checkpoint = make_checkpoint(intermediate)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = experts_in_float64(x, {name: torch.stack(tensors) for name, tensors in checkpoint.items()})
    shared = sum(experts_in_float64(x, layer.parts()) for layer in loaded(intermediate, ranks, checkpoint))
    torch.testing.assert_close(shared, whole, rtol=1e-12, atol=1e-12)


def run(layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    w13 = layer.w13_weight.data, layer.w13_weight_scale_inv.data
    return fused_moe(x, *w13, layer.w2_weight.data, layer.w2_weight_scale_inv.data, weights, ids).double()


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_ranks_quantize_activations_as_one_does(intermediate, ranks, channels):
    """Groups are equal, so sums differ only by rounding each rank's to bfloat16. Other groups would differ by 0.03."""
    checkpoint = make_checkpoint(intermediate)
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=gen).bfloat16()
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=gen).topk(TOPK)
    (alone,) = loaded(intermediate, 1, checkpoint)
    whole = run(alone, x, weights, ids)
    parts = [run(layer, x, weights, ids) for layer in loaded(intermediate, ranks, checkpoint)]
    assert (sum(parts) - whole).norm() < 0.005 * whole.norm()


@pytest.mark.seam
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("rank", [1, 6])
def test_vllm_reloads_a_layer_in_place(monkeypatch, rank, online):
    """As in reinforcement learning; rank 6 holds only padding."""
    first = (make_unquantized if online else make_checkpoint)(1536)
    second = {name: tensors[::-1] for name, tensors in first.items()}
    monkeypatch.setattr(Fp8MoeMethod, "_make_kernel", lambda *_: None)
    layer, fresh = (Layer(1536, 8, rank, ONLINE if online else None) for _ in range(2))
    fresh.load(second)
    layerwise.record_metadata_for_reloading(layer)
    layer.load(first)
    served = dict(layer.named_parameters())
    layerwise.initialize_layerwise_reload(layer)
    assert (
        layer.load(second).w2_weight is served["w2_weight"]
    )  # it was complete, and is at the address that graphs read
    for name, wanted in fresh.named_parameters():
        assert torch.equal(served[name].float(), wanted.float())
        assert getattr(layer, name).weight_loader.supports_moe_loading


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_online_experts_equal_quantized_checkpoint(intermediate, ranks, channels):
    unquantized, checkpoint = make_unquantized(intermediate), make_checkpoint(intermediate)
    for rank in range(ranks):
        online = Layer(intermediate, ranks, rank, ONLINE).load(unquantized).parts()
        for name, wanted in Layer(intermediate, ranks, rank).load(checkpoint).parts().items():
            assert same_bits(online[name], wanted)


@pytest.mark.parametrize("name", ["w1_weight", "w3_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"])
@pytest.mark.parametrize("rank", [0, 7])
def test_a_missing_tensor_is_noticed_on_ranks_of_padding_too(name, rank):
    checkpoint = make_checkpoint(1536)
    checkpoint[name].pop()
    layer = Layer(1536, 8, rank).load(checkpoint)
    shard, _, kind = name.partition("_")
    param = f"{'w2' if shard == 'w2' else 'w13'}_{kind}"
    with pytest.raises(CheckpointError, match=f"L.{param} of local expert 2: a tensor is missing"):
        check_loaded("L", param, getattr(layer, param))


@pytest.mark.parametrize("shard", ["w1", "w3", "w2"])
@pytest.mark.parametrize("rank", [0, 7])
def test_a_missing_tensor_of_an_unquantized_checkpoint_is_noticed(shard, rank):
    checkpoint = make_unquantized(1536)
    checkpoint[f"{shard}_weight"].pop()
    layer = Layer(1536, 8, rank, ONLINE).load(checkpoint)
    param = f"{'w2' if shard == 'w2' else 'w13'}_weight"
    with pytest.raises(CheckpointError, match=f"L.{param} of local expert 2: a tensor is missing"):
        check_loaded("L", param, getattr(layer, param))


@pytest.mark.parametrize("name", ["w1_weight", "w3_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"])
def test_a_tensor_of_another_size_is_refused(name):
    other = {name: make_checkpoint(768)[name]}
    with pytest.raises(
        CheckpointError,
        match=r"\(w. of expert 0\) has shape .* must have .* for 1536 intermediate channels.*Check that config",
    ):
        Layer(1536, 8, 0).load(other)


@pytest.mark.parametrize(
    ("intermediate", "ranks", "line"),
    [
        (
            1536,
            8,
            r"\(8-way split\): a rank .* 192, .* 33\.3% more memory and compute\. With --en.* would be 0\.0%\.$",
        ),
        (
            320,
            2,
            r"\(2-way split\): a rank .* 160, .* 60\.0% more memory and compute\. With --en.* would be 20\.0%\.$",
        ),
        (320, 1, r"\(1-way split\): a rank holds 384 channels instead of 320, .* 20\.0% more memory and compute\.$"),
    ],
)
def test_one_line_says_what_padding_costs(plugin_log, intermediate, ranks, line):
    blocks.announce_padding.cache_clear()
    for rank in range(ranks):
        Layer(intermediate, ranks, rank)
    (record,) = plugin_log.records
    assert record.levelname == "WARNING"
    assert re.search(line, record.getMessage())


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_mlp_ranks_hold_the_checkpoint_then_zeros(on_rank, intermediate, ranks, channels):
    checkpoint, parts = make_checkpoint(intermediate), {name: [] for name in make_checkpoint(128)}
    for rank in range(ranks):
        on_rank(ranks, rank)
        mlp = make_mlp(intermediate)
        for _ in range(2):  # the second time is a reload
            load_mlp(mlp, checkpoint)
        for half, kind in itertools.product(mlp, ("weight", "weight_scale_inv")):
            check_loaded("mlp", kind, getattr(half, kind))
        assert mlp[0].output_size_per_partition == 2 * channels
        assert mlp[1].input_size_per_partition == channels
        for kind in ("weight", "weight_scale_inv"):
            gate, up = getattr(mlp[0], kind).data.chunk(2)
            for name, part in (("w1", gate), ("w3", up), ("w2", getattr(mlp[1], kind).data)):
                parts[f"{name}_{kind}"].append(part)
    for name, found in parts.items():
        dim = 1 if name.startswith("w2") else 0
        whole, assembled = checkpoint[name][0], torch.cat(found, dim)
        size = whole.shape[dim]
        assert torch.equal(assembled.narrow(dim, 0, size).float(), whole.float())
        assert not assembled.narrow(dim, size, assembled.shape[dim] - size).float().any()


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), [*SHARES, (2048, 8, 256)])
def test_online_mlp_equals_quantized_checkpoint(on_rank, intermediate, ranks, channels):
    unquantized, checkpoint = make_unquantized(intermediate), make_checkpoint(intermediate)
    for rank in range(ranks):
        on_rank(ranks, rank)
        online = load_mlp(make_mlp(intermediate, ONLINE), unquantized)
        wanted = load_mlp(make_mlp(intermediate), checkpoint)
        for (half, other), kind in itertools.product(zip(online, wanted, strict=True), ("weight", "weight_scale_inv")):
            assert same_bits(getattr(half, kind).data, getattr(other, kind).data)


@pytest.mark.seam
def test_an_mlp_of_whole_blocks_is_loaded_by_vllm_alone(on_rank):
    on_rank(4, 1)
    for half in make_mlp(1536):
        assert half.weight.weight_loader.__wrapped__ is half.weight_loader_v2.__func__


@pytest.mark.seam
def test_the_ranks_of_an_mlp_together_compute_what_one_does(on_rank):
    checkpoint, outputs = make_checkpoint(576), []
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    for ranks in (1, 2):
        for rank in range(ranks):
            on_rank(ranks, rank)
            gate_up, down = load_mlp(make_mlp(576), checkpoint)
            gate, up = gate_up.quant_method.apply(gate_up, x).chunk(2, -1)
            outputs.append(down.quant_method.apply(down, torch.nn.functional.silu(gate) * up).double())
    whole, *parts = outputs
    assert (sum(parts) - whole).norm() < 0.005 * whole.norm()


@pytest.mark.parametrize("shard", [0, None])
def test_an_mlp_of_another_size_or_stored_as_one_tensor_is_refused(on_rank, shard):
    on_rank(8, 0)
    gate_up, _ = make_mlp(1536)
    other = torch.zeros(2 * 1536, HIDDEN, dtype=torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_up_proj.* has shape \[3072, 256\], .*1536.* for 1536"):
        gate_up.weight.weight_loader(gate_up.weight, other, shard)


def test_half_quantized_mlp_fails_at_first_step(on_rank):
    on_rank(8, 0)
    _, down = make_mlp(1536)
    with pytest.raises(InvalidInputError, match="192"):
        down.quant_method.apply(down, torch.zeros(1, 192, dtype=torch.bfloat16))


@pytest.mark.seam
@pytest.mark.parametrize(("intermediate", "ranks"), [(256, 1), (512, 2), (320, 2)])
def test_experts_in_mxfp4_equal_the_same_in_block_fp8(intermediate, ranks):
    checkpoint = make_mxfp4(intermediate)
    in_fp8 = recoded(checkpoint)
    backwards = dict(reversed(checkpoint.items()))  # scales before the weights
    for rank, given in itertools.product(range(ranks), (checkpoint, backwards)):
        parts = Layer(intermediate, ranks, rank, RECODED).load(given).parts()
        for name, wanted in Layer(intermediate, ranks, rank).load(in_fp8).parts().items():
            assert same_bits(parts[name], wanted)


@pytest.mark.seam
def test_bits_of_e8m0_scales_are_decoded():
    exponents = {name: tensor for name, tensor in make_checkpoint(384).items() if name.endswith("scale_inv")}
    exponents = {name: [scale.log2().round() for scale in scales] for name, scales in exponents.items()}
    floats = {name: [exponent.exp2() for exponent in scales] for name, scales in exponents.items()}
    stored = {name: [(exponent + 127).to(torch.uint8) for exponent in scales] for name, scales in exponents.items()}
    pairs = zip(*(loaded(384, 2, make_checkpoint(384) | scales) for scales in (stored, floats)), strict=True)
    for layer, expected in pairs:
        for name, parameter in layer.named_parameters():
            assert same_bits(parameter.data, getattr(expected, name).data)
