"""gpt-oss's experts, passed as vLLM's model passes them: of all experts at once, cut in groups of a scale."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import layerwise

from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.layers.vllm.entry import Entry
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from tests import helpers as h
from tests.helpers import environment
from tests.layers.experts import EXPERTS, TOPK
from tests.layers.gpt_oss import (
    CHECKPOINT,
    HIDDEN,
    INTERMEDIATE,
    OTHER,
    PADDED,
    Tensors,
    assert_holds,
    experts_in_float64,
    part_of,
)
from tests.layers.vllm.one_rank import PACKED, RECODED, Layer, default_config

MOE = {"hidden_dim": HIDDEN, "has_bias": True, "activation": MoEActivation.SWIGLUOAI}
FORMS = {"mxfp4": replace(PACKED, gpt_oss=True), "fp8": replace(RECODED, gpt_oss=True)}
QUANTIZATION = {"quant_method": "gpt_oss_mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
pytestmark = pytest.mark.seam


class Rank(Layer):
    """One rank's part of the experts; `first`: the rank's first expert."""

    def __init__(self, form: str, ranks: int = 1, rank: int = 0, first: int = 0, **parallel: object) -> None:
        self.__dict__["first"] = first
        number = EXPERTS * int(parallel.get("ep_size", 1))
        moe = MOE | {"num_experts": number, "num_logical_experts": number}
        super().__init__(INTERMEDIATE, ranks, rank, FORMS[form], moe=moe, **parallel)

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert - self.first if 0 <= expert - self.first < EXPERTS else -1

    def pass_all(self, tensors: Tensors) -> "Rank":
        for name, tensor in tensors.items():
            parameter = getattr(self, name)
            parameter.weight_loader(parameter, tensor, weight_name=f"L.{name}", shard_id=None, expert_id=None)
        return self


def loaded(form: str, ranks: int, tensors: Tensors) -> list[Rank]:
    return [Rank(form, ranks, rank).pass_all(part_of(tensors, ranks, rank)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_hold_their_part(form, ranks):
    for rank, layer in enumerate(loaded(form, ranks, CHECKPOINT)):
        assert_holds(layer, part_of(CHECKPOINT, ranks, rank))


@pytest.mark.parametrize("form", FORMS)
def test_exponents_may_arrive_first(form):
    assert_holds(Rank(form).pass_all(dict(reversed(CHECKPOINT.items()))), CHECKPOINT)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_hold_whole_experts(form):
    layer = Rank(form, first=EXPERTS, ep_size=2, ep_rank=1, use_ep=True).pass_all(CHECKPOINT)
    assert_holds(layer, CHECKPOINT)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_the_ranks_add_up_to_the_layer(workspaces, form, ranks):
    gen = h.seeded(0, torch.device("cpu"))
    x = 4 * h.random_tokens(gen, 9, HIDDEN)  # so that gates and up projections exceed the limit
    weights, ids = h.random_routing(gen, "distinct", 9, TOPK, EXPERTS)
    padded, found = torch.nn.functional.pad(x, (0, PADDED - HIDDEN)), torch.zeros(9, PADDED, dtype=torch.float64)
    for layer in loaded(form, ranks, CHECKPOINT):
        with set_current_vllm_config(default_config()):
            layer.quant_method.process_weights_after_loading(layer)
        found += layer.quant_method.apply(layer, padded, weights, ids, None, None).double()
    assert not found[:, HIDDEN:].any()
    assert h.relative_l2(found[:, :HIDDEN].bfloat16(), experts_in_float64(x, weights, ids)) < 0.06


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_loaded_again_into_the_same_memory(monkeypatch, form):
    monkeypatch.setattr(Fp8MoeMethod, "_make_kernel", lambda *_: SimpleNamespace())
    layer = Rank(form)
    layerwise.record_metadata_for_reloading(layer)
    layer.pass_all(CHECKPOINT).quant_method.process_weights_after_loading(layer)
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    layerwise.initialize_layerwise_reload(layer)
    layer.pass_all(OTHER)
    layerwise.finalize_layerwise_reload(layer, None)
    assert_holds(layer, OTHER)
    assert_holds(layer.pass_all(CHECKPOINT), CHECKPOINT)  # in place
    layer.quant_method.loading.model.prepare_step()
    assert [parameter.data_ptr() for parameter in layer.parameters()] == addresses


@pytest.mark.parametrize("missing", CHECKPOINT)
def test_a_missing_tensor_is_noticed(missing):
    layer = Rank("fp8").pass_all({name: tensor for name, tensor in CHECKPOINT.items() if name != missing})
    with pytest.raises(CheckpointError, match=r"is missing from the checkpoint|arrived without the"):
        layer.quant_method.process_weights_after_loading(layer)


def damaged_exponent(exponents: torch.Tensor) -> torch.Tensor:
    exponents = exponents.clone()
    exponents[1, 5, 1] = 0xFF
    return exponents


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("w13_weight", lambda t: t[:2], r"has shape \[2, 320, 48\], but must have \[3, 320, 48\] for 3 experts"),
        ("w13_bias", lambda t: t[:, :-1], r"has shape \[3, 319\], but must have \[3, 320\]"),
        ("w2_weight", lambda t: t[0, 0], r"has shape \[80\], but must have \[3, 96, 80\]"),
        ("w2_weight", lambda t: t[..., :-16], r"has shape \[3, 96, 64\], but must have \[3, 96, 80\]"),
        ("w13_weight_scale", lambda t: t[:, :-2], r"has shape \[3, 318, 3\], .* with 160 inter"),
        ("w2_bias", lambda t: t[:, :-1], r"has shape \[3, 95\], but must have \[3, 96\]"),
        ("w2_bias", lambda t: t * math.nan, "w2_bias holds NaN or infinity"),
        ("w13_bias", torch.Tensor.int, "and dtype torch.int32, but must be a float"),
        ("w13_weight", torch.Tensor.float, "has dtype torch.float32, but a MXFP4 checkpoint has"),
        ("w2_weight_scale", damaged_exponent, r"the scales of L \(w2 of local experts 0 to 2\) hold NaN"),
    ],
)
def test_damaged_tensors_are_refused(name, damage, message):
    with pytest.raises(CheckpointError, match=message):
        Rank("mxfp4").pass_all(CHECKPOINT | {name: damage(CHECKPOINT[name])})


@pytest.mark.parametrize("form", FORMS)
def test_the_engine_may_overwrite_its_tensors(form):
    layer = Rank(form)
    for name, tensor in CHECKPOINT.items():
        buffer = tensor.clone()
        layer.pass_all({name: buffer})
        buffer.zero_()
    assert_holds(layer, CHECKPOINT)


@pytest.mark.parametrize("form", FORMS)
def test_codes_without_exponents_end_a_serving_model(monkeypatch, form):
    """They wait where the kernels read."""
    monkeypatch.setattr(Fp8MoeMethod, "_make_kernel", lambda *_: SimpleNamespace())
    layer = Rank(form).pass_all(CHECKPOINT)
    layer.quant_method.process_weights_after_loading(layer)
    layer.pass_all({"w2_weight": OTHER["w2_weight"]})
    with pytest.raises(CheckpointError, match="weight in MXFP4 arrived without the scales"):
        layer.quant_method.loading.model.prepare_step()
    with pytest.raises(CheckpointError, match="Restart the engine"):
        layer.quant_method.loading.model.check_usable()


def test_experts_in_another_order_are_refused(monkeypatch):
    layer = Rank("fp8")
    monkeypatch.setattr(Rank, "_map_global_expert_id_to_local_expert_id", lambda _, expert: EXPERTS - 1 - expert)
    with pytest.raises(CheckpointError, match="does not hold 3 experts in their order"):
        layer.pass_all(CHECKPOINT)


def test_a_reload_is_done_with_the_last_tensor(monkeypatch):
    """vLLM counts the elements of a layer that have arrived; otherwise the tensors of all layers would wait."""
    monkeypatch.setattr(Fp8MoeMethod, "_make_kernel", lambda *_: SimpleNamespace())
    layer = Rank("mxfp4")
    layerwise.record_metadata_for_reloading(layer)
    layer.pass_all(CHECKPOINT).quant_method.process_weights_after_loading(layer)
    layerwise.initialize_layerwise_reload(layer)
    layer.pass_all(OTHER)
    assert_holds(layer, OTHER)


def test_experts_that_arrive_one_by_one_are_refused():
    layer = Rank("fp8")
    named = {"weight_name": "L.w2_weight", "shard_id": "gpt_oss_w2", "expert_id": 0, "return_success": True}
    with pytest.raises(CheckpointError, match="arrive one by one, but only those of all experts"):
        layer.w2_weight.weight_loader(layer.w2_weight, CHECKPOINT["w2_weight"][0], **named)


@pytest.mark.parametrize("method", ["mxfp4", "gpt_oss_mxfp4"])
def test_dense_layers_stay_unquantized(on_rank, method):
    on_rank(1, 0)
    config = Entry.from_config(QUANTIZATION | {"quant_method": method})
    with set_current_vllm_config(default_config()):
        layer = ReplicatedLinear(HIDDEN, HIDDEN, quant_config=config, prefix="model.layers.0.attn.qkv_proj")
    assert type(layer.quant_method) is UnquantizedLinearMethod


def described(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(to_dict=lambda: {"model_type": "gpt_oss", "num_local_experts": 8} | fields)


def test_other_models_and_limits_are_refused():
    config = Entry.from_config(QUANTIZATION)
    config.maybe_update_config("model", hf_config=described(swiglu_limit=7.0))
    with pytest.raises(UnsupportedError, match=r"only supported for gpt-oss, but the model_type is 'kimi_k3'"):
        config.maybe_update_config("model", hf_config=described(model_type="kimi_k3"))
    with pytest.raises(UnsupportedError, match=r"swiglu_limit is 5\.0, but the engines compute gpt-oss with 7"):
        config.maybe_update_config("model", hf_config=described(swiglu_limit=5.0))


def test_only_the_user_chooses_the_method():
    """vLLM's own method could not take over a layer later."""
    with environment("FP8MOE_TAKE_FP8", "1"):
        assert Entry.override_quantization_method(QUANTIZATION, None, described()) is None
    assert Entry.override_quantization_method(QUANTIZATION, "fp8moe", described()) == "fp8moe"
