"""Who computes each layer of a split model: our kernels or the engine's."""

from dataclasses import replace

import pytest

from fp8moe_plugin.checkpoint import placement
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Dense, Split
from fp8moe_plugin.checkpoint.splits import computes_experts, engine_layers, engine_text, split_refusal
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import MXFP4
from tests.checkpoint.test_shapes import EXPERTS, MODEL
from tests.helpers import environment

ODD_INPUTS = Dense("self_attn.in_proj", 3, 1000, (512, 512), Split.OUTPUTS)
# MiMo-V2's projections, of 64 heads of 192 channels and 4 key/value heads, whose values have 128.
QKV = Dense("self_attn.qkv_proj", 48, 4096, (12288, 768, 512), Split.OUTPUTS, smallest=192)


def test_the_engine_takes_an_odd_dense_layer() -> None:
    model = replace(MODEL, dense=(*MODEL.dense, ODD_INPUTS))
    why = "has 1000 input channels on this rank, not a multiple of the scale block of 128"
    assert engine_layers(model, Parallel(2)) == [("self_attn.in_proj", 3, why)]
    assert engine_text(model, Parallel(2), Parallel(4)) == (
        f"with --tp 2 or --tp 4, vLLM's own kernels compute self_attn.in_proj (3 layers): {why}"
    )
    assert engine_text(MODEL, Parallel(2)) is None
    with environment("FP8MOE_FALLBACK", "forbid"):
        assert split_refusal(model, Parallel(2)) == f"self_attn.in_proj {why}"


@pytest.mark.parametrize("ranks", [4, 8])
def test_shared_scale_blocks_need_a_loader_of_the_model(ranks: int) -> None:
    """That of MiMo-V2.5 in vLLM, but not of MiMo-V2-Flash, nor in SGLang, nor of layers that are not fused."""
    model = replace(MODEL, heads=64, kv_heads=4, dense=(QKV,))
    own = replace(model, architecture="MiMoV2ForCausalLM")
    why = "has 192 output channels on this rank, not a multiple of the scale block of 128"
    assert engine_layers(own, Parallel(ranks)) == [(QKV.name, 48, why)]
    assert split_refusal(model, Parallel(ranks)) == (
        f"{QKV.name} {why}, and vLLM's own loader would copy the scales of other blocks"
    )
    assert "SGLang's own loader" in str(split_refusal(own, Parallel(ranks, sglang=True)))
    assert split_refusal(replace(own, dense=(replace(QKV, outputs=(768,)),)), Parallel(ranks))
    unquantized = replace(model, quantized=False)
    assert engine_layers(unquantized, Parallel(ranks, sglang=True)) == [(QKV.name, 48, why)]
    assert engine_layers(model, Parallel(2)) == []


def test_sglang_takes_fused_layers_of_whole_blocks_only() -> None:
    layer = Dense("self_attn.in_proj", 1, 1000, (512, 64), Split.NONE)
    model = replace(MODEL, dense=(layer,))
    assert [name for name, *_ in engine_layers(model, Parallel())] == [layer.name]
    assert "SGLang's own method cannot take it" in str(split_refusal(model, Parallel(sglang=True)))


def test_a_format_without_kernels_is_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "NOT_DENSE", (FP8_CHANNEL,))
    model = replace(MODEL, dense_weights=FP8_CHANNEL)
    assert [name for name, *_ in engine_layers(model, Parallel(8))] == [layer.name for layer in MODEL.dense]


def test_a_padded_mlp_is_never_the_engines() -> None:
    halves = tuple(replace(half, inputs=1000) if half.inputs == 1024 else half for half in MODEL.dense)
    model = replace(MODEL, dense=halves)
    assert [name for name, *_ in engine_layers(model, Parallel(4))] == ["mlp.shared_experts.gate_up_proj"]
    assert "has 1000 input channels" in str(split_refusal(model, Parallel(8)))


def test_a_whole_layer_may_end_within_a_block() -> None:
    model = replace(MODEL, dense=(Dense("self_attn.g_proj", 1, 1024, (24,), Split.OUTPUTS),))
    assert engine_layers(model, Parallel()) == []
    assert "own loader would copy" in str(split_refusal(model, Parallel(2)))


def test_the_engine_takes_odd_experts() -> None:
    hidden = replace(MODEL, experts=replace(EXPERTS, hidden=1000))
    many = replace(MODEL, experts=replace(EXPERTS, experts=1025))
    other = replace(MODEL, activations=(Activation(), Activation("gelu")))
    for model, why in (
        (hidden, "hidden size 1000"),
        (many, "a rank has 1025"),
        (other, "the model's experts have ano"),
    ):
        ((name, layers, found),) = engine_layers(model, Parallel(4))
        assert (name, layers) == ("experts", 1)
        assert found.startswith(why)
        assert not computes_experts(model, Parallel(4))
        with environment("FP8MOE_FALLBACK", "forbid"):
            assert str(split_refusal(model, Parallel(4))).startswith(f"experts: {why}")
    assert computes_experts(many, Parallel(2, ep=2))
    # vLLM's method for FP8 does not pad either; those of MXFP4 and of unquantized experts do not need whole blocks.
    assert "vLLM's own method needs whole scale blocks" in str(split_refusal(hidden, Parallel(8)))
    for changed in (replace(hidden, recoded_from=MXFP4), replace(hidden, quantized=False)):
        assert engine_layers(changed, Parallel(8))
    assert engine_layers(hidden, Parallel(4, sglang=True))
    for changed in (replace(hidden, recoded_from=MXFP4), replace(hidden, weights=FP8_CHANNEL)):
        assert "fp8moe does not set up SGLang's own method" in str(split_refusal(changed, Parallel(4, sglang=True)))
