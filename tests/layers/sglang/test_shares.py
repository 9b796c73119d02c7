"""How ranks share experts of any size: in whole scale blocks, loaded by SGLang's loader; without an engine."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.layers.moe.token_dispatcher import (
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    DeepEPNormalCombineInput,
    DeepEPNormalDispatchOutput,
)
from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers import kernels
from fp8moe_plugin.layers.sglang import compat, moe
from fp8moe_plugin.ops import fused_moe, per_token_group_quant_fp8
from tests import helpers as h
from tests.checkpoint.test_shapes import SHARES
from tests.layers.experts import EXPERTS, HIDDEN, TOPK, make_checkpoint
from tests.layers.sglang.layers import PARAMETERS, Layer, assert_assembled, called

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures("slicing")]


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), [*SHARES, (512, 2, 256)])
def test_rank_parts_hold_the_checkpoint_then_zeros(intermediate, ranks, channels):
    checkpoint, layers = make_checkpoint(intermediate), []
    for rank in range(ranks):
        layers.append(Layer(intermediate, ranks, rank))
        for _ in range(2):  # the second time it is updated
            layers[-1].load(checkpoint).finish()
    assert all(layer.w2_weight.shape == (EXPERTS, HIDDEN, channels) for layer in layers)
    whole = {name: torch.stack(tensors) for name, tensors in checkpoint.items()}
    assert_assembled([layer.parts() for layer in layers], whole, 3)


@pytest.mark.parametrize("name", list(make_checkpoint(256)))
@pytest.mark.parametrize("rank", [0, 7])
def test_a_missing_tensor_is_noticed_on_ranks_of_padding_too(name, rank):
    checkpoint = make_checkpoint(1536)
    checkpoint[name].pop()
    kind = name.partition("_")[2]
    layer = Layer(1536, 8, rank).load(checkpoint)
    with pytest.raises(CheckpointError, match=rf"L\.w.*_{kind} of local expert 2: a tensor is missing"):
        layer.finish()


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", list(make_checkpoint(256)))
def test_a_tensor_of_another_size_or_dtype_is_refused(name, ranks):
    """SGLang's loaders would cut it, pad it or cast it."""
    layer = Layer(1536, ranks, 0)
    for intermediate in (768, 3072):
        with pytest.raises(CheckpointError, match=r"\(w. of expert 0\) has shape .* for 1536 intermediate channels"):
            layer.load({name: make_checkpoint(intermediate)[name]})
    doubles = [tensor.double() for tensor in make_checkpoint(1536)[name]]
    with pytest.raises(CheckpointError, match=r"has dtype torch\.float64"):
        layer.load({name: doubles})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("ranks", [1, 8])
def test_scales_of_other_dtypes_are_those_in_float32(dtype, ranks):
    checkpoint = make_checkpoint(1536)
    for name, tensors in checkpoint.items():
        if "scale" in name:
            checkpoint[name] = [tensor.to(dtype) for tensor in tensors]
    same = {name: [t.float() if "scale" in name else t for t in tensors] for name, tensors in checkpoint.items()}
    found, expected = (Layer(1536, ranks, 0).load(tensors) for tensors in (checkpoint, same))
    for name, parameter in expected.named_parameters():
        assert found.get_parameter(name).equal(parameter)


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_the_experts_compute_what_the_checkpoint_says(tokens, ids):
    layer = Layer(384, 2, 1).load(make_checkpoint(384))
    gen = h.seeded(0, torch.device("cpu"))
    x = h.random_tokens(gen, tokens, HIDDEN)
    before = x.clone()
    weights, experts = h.random_routing(gen, "distinct", tokens, TOPK, EXPERTS)
    experts[1:, 0] = -1  # on another rank
    wanted = fused_moe(x, *(getattr(layer, name) for name in PARAMETERS), weights, experts)
    assert h.same_bits(called(layer, x, weights, experts.to(ids)), wanted)
    assert torch.equal(x, before)


def test_padding_rows_are_zeros_and_affect_no_others():
    """With DP attention the experts get the rows of all ranks; the ids of those that pad a rank's are -1."""
    layer = Layer(256, 1, 0).load(make_checkpoint(256))
    gen = h.seeded(5, torch.device("cpu"))
    x, (weights, ids) = h.random_tokens(gen, 8, HIDDEN), h.random_routing(gen, "distinct", 8, TOPK, EXPERTS)
    alone = called(layer, x[:3], weights[:3], ids[:3])
    x[3:], ids[3:] = torch.nan, -1  # what is in such rows is undefined
    padded = called(layer, x, weights, ids)
    assert h.same_bits(padded[:3], alone)
    assert not padded[3:].any()


@pytest.mark.parametrize(("on_gpu", "in_topk", "factor"), [(True, False, 2.5), (True, True, 1), (False, False, 1)])
def test_the_experts_scale_their_result_on_a_gpu_unless_the_router_has(monkeypatch, on_gpu, in_topk, factor):
    """On a CPU SGLang's models do. That they do nowhere else is for a GPU to show."""
    monkeypatch.setattr(moe, "is_cuda", lambda: on_gpu)
    layer = Layer(256, 1, 0).load(make_checkpoint(256))
    layer.should_fuse_routed_scaling_factor_in_topk = in_topk
    gen = h.seeded(1, torch.device("cpu"))
    x, (weights, ids) = h.random_tokens(gen, 5, HIDDEN), h.random_routing(gen, "distinct", 5, TOPK, EXPERTS)
    wanted = fused_moe(x, *(getattr(layer, name) for name in PARAMETERS), weights * factor, ids)
    assert h.same_bits(called(layer, x, weights, ids), wanted)


def test_rows_of_deepep_in_normal_mode_are_summed(monkeypatch):
    """Rows that this rank has received, with local ids and -1; the model applies the factor."""
    monkeypatch.setattr(moe, "is_cuda", lambda: True)
    layer = Layer(256, 1, 0).load(make_checkpoint(256))
    gen = h.seeded(2, torch.device("cpu"))
    x, (weights, ids) = h.random_tokens(gen, 7, HIDDEN), h.random_routing(gen, "some_missing", 7, TOPK, EXPERTS)
    received = DeepEPNormalDispatchOutput(x, None, ids.long(), weights, [])
    layer.finish()
    found = layer.quant_method.apply(layer, received)
    assert type(found) is DeepEPNormalCombineInput
    wanted = fused_moe(x, *(getattr(layer, name) for name in PARAMETERS), weights, ids)
    assert h.same_bits(found.hidden_states, wanted)
    assert (found.topk_ids is received.topk_ids, found.topk_weights is weights) == (True, True)


def test_slabs_of_deepep_in_low_latency_mode_are_computed_per_expert():
    """What is past the counts is uninitialized, and scales are column-major."""
    layer = Layer(256, 1, 0).load(make_checkpoint(256))
    slab, counts = 6, torch.tensor([6, 0, 3], dtype=torch.int32)
    x = h.random_tokens(h.seeded(3, torch.device("cpu")), EXPERTS * slab, HIDDEN)
    q, scales = per_token_group_quant_fp8(x)
    rows = q.view(EXPERTS, slab, HIDDEN)
    columns = scales.view(EXPERTS, slab, -1).mT.contiguous().mT
    for expert, count in enumerate(counts.tolist()):
        h.bits(rows)[expert, count:], columns[expert, count:] = 0x7F, torch.nan
    ids, weights = torch.zeros(4, TOPK, dtype=torch.int64), torch.ones(4, TOPK)
    layer.finish()
    found = layer.quant_method.apply(layer, DeepEPLLDispatchOutput(rows, columns, ids, weights, counts, 3))
    assert type(found) is DeepEPLLCombineInput
    assert found.hidden_states.shape == (EXPERTS, slab, HIDDEN)
    one = torch.ones(1, 1)
    for expert, count in enumerate(counts.tolist()):
        tensors = [getattr(layer, name)[expert : expert + 1] for name in PARAMETERS]
        for row in range(count):
            token = x[expert * slab + row][None]
            wanted = fused_moe(token, *tensors, one, torch.zeros(1, 1, dtype=torch.int32))
            assert (found.hidden_states[expert, row] - wanted).norm() < 0.005 * wanted.norm()


@pytest.mark.parametrize(
    ("mode", "differ", "wanted"),
    [
        ("auto", True, {"normal_dispatcher_output_dtype": "bf16", "low_latency_dispatcher_output_dtype": "fp8"}),
        ("normal", False, {"dispatcher_output_dtype": "bf16"}),
        ("low_latency", False, {"dispatcher_output_dtype": "fp8"}),
    ],
)
def test_deepep_is_asked_for_the_rows_of_each_mode(monkeypatch, plugin_log, mode, differ, wanted):
    for module in (moe, compat):
        monkeypatch.setattr(module, "get_deepep_mode", lambda: DeepEPMode(mode))
    monkeypatch.setattr(moe, "get_moe_a2a_backend", lambda: MoeA2ABackend("deepep"))
    monkeypatch.setattr(compat, "rows_differ_by_mode", lambda: differ)
    monkeypatch.setattr(kernels, "_announced", set())
    layer, asked = Layer(256, 1, 0).load(make_checkpoint(256)), []
    layer.dispatcher = SimpleNamespace(set_quant_config=asked.append)
    with plugin_log.at_level("INFO"):
        layer.finish()
    assert asked == [wanted]
    layouts = {"normal": ["contiguous"], "low_latency": ["masked"], "auto": ["contiguous", "masked"]}[mode]
    assert [line for line in plugin_log.messages if "serves the experts" in line and "layout" in line] == [
        f"fp8moe serves the experts: backend reference, layout {layout}, 0 kernels loaded in 0.00 s (none needed)"
        for layout in layouts
    ]
