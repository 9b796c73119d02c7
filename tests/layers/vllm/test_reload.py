"""Weights reloaded by vLLM's reload or in place: the model then serves the new weights, or nothing at all."""

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.model_executor.model_loader.reload import layerwise

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.vllm.loading import check_experts_not_moved
from tests.helpers import same_bits
from tests.layers.experts import Checkpoint, make_mxfp4
from tests.layers.vllm.loaded_model import (
    KINDS,
    MAKE,
    RESTART,
    Model,
    assert_out_of_service,
    equal,
    first,
    no_engine,
    second,
)

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures(no_engine.__name__)]

TENSORS = [(kind, name) for kind in KINDS for name in first(kind)]
# Every code of MXFP4 is a number.
WITH_NAN = [(kind, name) for kind, name in TENSORS if MAKE[kind] is not make_mxfp4 or name.endswith("_scale")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_serves_what_was_loaded_last(kind):
    model = Model(kind).start(first(kind))
    before, after = Model(kind).start(first(kind)), Model(kind).start(second(kind))
    assert not equal(before, after)
    served = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    steps = [(model.reload, second, after), (model.load, first, before), (model.reload, second, after)]
    for load, checkpoint, wanted in [*steps, *steps[1:]]:
        load(checkpoint(kind))
        assert equal(model, wanted)
        assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == served
        method = model.experts.quant_method
        for part, scale in (("w13", method.moe_quant_config.w1_scale), ("w2", method.moe_quant_config.w2_scale)):
            assert scale is getattr(model.experts, f"{part}_{method.scale}")


def assert_refused(kind: str, load: Callable[[Checkpoint], None], checkpoint: Checkpoint, why: str) -> None:
    """Check that this load and every later use of the model raises."""
    with pytest.raises(CheckpointError, match=f"{why}.*{RESTART}"):
        load(checkpoint)
    assert_out_of_service(load.__self__, kind, why)


@pytest.mark.parametrize("expert", [0, 2])
@pytest.mark.parametrize(("kind", "name"), TENSORS)
def test_a_reload_that_lacks_a_tensor_of_an_expert_is_refused(kind, name, expert):
    checkpoint = second(kind)
    checkpoint[name][expert] = None
    why = "a tensor is missing" if expert else "a tensor is missing|no tensor of this layer has arrived"
    assert_refused(kind, Model(kind).start(first(kind)).reload, checkpoint, why)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ["experts", "gate_up", "down"])
def test_a_reload_that_lacks_a_layer_is_refused(kind, layer):
    """vLLM alone would keep the layer's old weights and only warn."""
    model = Model(kind).start(first(kind))
    model.lacking = (layer,)
    assert_refused(kind, model.reload, second(kind), "no tensor of this layer has arrived")


@pytest.mark.parametrize(("kind", "name"), WITH_NAN)
@pytest.mark.parametrize("way", ["reload", "load"])
def test_a_tensor_with_nan_is_refused(kind, name, way):
    checkpoint = second(kind)
    checkpoint[name][1] = checkpoint[name][1].clone()
    checkpoint[name][1].view(torch.uint8).view(-1)[-4:] = 0xFF
    assert_refused(kind, getattr(Model(kind).start(first(kind)), way), checkpoint, "hold.* NaN")


def test_a_worker_process_ends(monkeypatch, plugin_log):
    """vLLM would report an exception to the caller of the reload, and keep serving."""
    model, checkpoint, ended = Model("fp8").start(first("fp8")), second("fp8"), []
    model.state.in_worker = True
    monkeypatch.setattr(os, "_exit", ended.append)
    checkpoint["w2_weight"][1] = None
    with pytest.raises(CheckpointError):  # where the process would have exited
        model.reload(checkpoint)
    assert ended == [1]
    (record,) = (record for record in plugin_log.records if record.levelname == "CRITICAL")
    assert "L.w2_weight of local expert 1: a tensor is missing" in record.getMessage()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["reload", "load"])
def test_experts_that_were_moved_are_not_loaded_where_they_were(kind, way):
    """vLLM's load balancing moves experts; its router follows, its loader does not."""
    state, model = SimpleNamespace(logical_to_physical_map=None), Model(kind)
    model.experts.quant_method.loading.check_reloadable = functools.partial(check_experts_not_moved, "L", state, 5)
    load = getattr(model.start(first(kind)), way)
    load(second(kind))
    state.logical_to_physical_map = torch.tensor([[0, 3], [1, 4], [2, -1]])  # as at the start: expert 0 twice, 1 twice
    load(first(kind))
    state.logical_to_physical_map = torch.tensor([[0, 3], [2, 4], [1, -1]])
    assert_refused(kind, load, second(kind), "load balancing has moved experts")


def test_an_engine_core_reports_the_failure_and_shuts_down(monkeypatch):
    """If it exited at once, vLLM's client would wait for the report forever."""
    model, checkpoint, sent = Model("fp8").start(first("fp8")), second("fp8"), []
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore_DP0")
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    checkpoint["w2_weight"][1] = None
    assert_refused("fp8", model.reload, checkpoint, "a tensor is missing")
    assert sent == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reload_that_brings_nothing_leaves_what_served(kind):
    """vLLM restores the old weights, for example after a dry run of its weight transfer."""
    model, wanted = Model(kind).start(first(kind)), Model(kind).start(first(kind))
    for _ in range(2):
        model.reload({})
        model.step()
        assert equal(model, wanted)
    model.reload(second(kind))
    assert equal(model, Model(kind).start(second(kind)))


def test_a_parameter_that_is_exchanged_without_a_reload_keeps_its_values():
    model = Model("fp8").start(first("fp8"))
    weight = torch.nn.Parameter(model.down.weight.data.clone(), requires_grad=False)
    model.down.register_parameter("weight", weight)
    assert same_bits(weight.data, Model("fp8").start(first("fp8")).down.weight.data)


@pytest.mark.parametrize(("kind", "name"), TENSORS)
def test_a_start_that_fails_says_nothing_of_reloading(kind, name):
    checkpoint = first(kind)
    checkpoint[name][1] = None
    with pytest.raises(CheckpointError, match="a tensor is missing") as error:
        Model(kind).start(checkpoint)
    assert "reload" not in str(error.value)


E8M0 = torch.float8_e8m0fnu
WRONG = {
    "a weight as bytes": ("w1_weight", lambda w: w.view(torch.uint8), r"has dtype torch\.uint8"),
    "a weight as numbers": ("w2_weight", lambda w: w.bfloat16(), r"has dtype torch\.bfloat16"),
    "scales as integers": ("w2_weight_scale_inv", lambda s: s.to(torch.int8), r"has dtype torch\.int8"),
    "scales in double precision": ("w2_weight_scale_inv", lambda s: s.double(), r"has dtype torch\.float64"),
    "a scale of E8M0 without a value": ("w2_weight_scale_inv", lambda s: (s / 0).to(E8M0), "hold NaN or infinity"),
    "a scale without dimensions": ("w1_weight_scale_inv", lambda s: s[0, 0], r"has shape \[\]"),
    "a scale for each row": ("w3_weight_scale_inv", lambda s: s[:, 0], r"has shape \[2\]"),
    "a negative scale": ("w2_weight_scale_inv", lambda s: -s, "range from -"),
    "a scale that overflows": ("w2_weight_scale_inv", lambda s: s * 0 + 3e38, r"range from 3e\+38 to 3e\+38"),
    "an infinite scale": ("w1_weight_scale_inv", lambda s: s * float("inf"), "hold NaN or infinity"),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("layer", ["experts", "mlp"])
@pytest.mark.parametrize("way", ["start", "reload", "load"])
def test_a_tensor_that_cannot_serve_is_refused(fault, layer, way):
    name, damage, why = WRONG[fault]
    checkpoint = first("fp8")
    tensors = checkpoint[name] = checkpoint[name][:]
    tensors[0] = damage(tensors[0])
    model = Model("fp8")
    if way != "start":
        model.start(first("fp8"))
    model.lacking = ("gate_up", "down") if layer == "experts" else ("experts",)
    if way != "start":
        assert_refused("fp8", getattr(model, way), checkpoint, why)
        return
    with pytest.raises(CheckpointError, match=why):
        model.start(checkpoint)


@pytest.mark.parametrize("part", ["w1_weight_scale_inv", "w2_weight_scale_inv", "w2_weight"])
def test_a_tensor_that_would_be_repeated_is_refused(part):
    """For example one row of scales, which copying would broadcast to all rows."""
    checkpoint = first("fp8")
    checkpoint[part] = [tensor[:, :1] for tensor in checkpoint[part]]
    with pytest.raises(CheckpointError, match=r"has shape .* for 256 intermediate channels"):
        Model("fp8").start(checkpoint)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E8M0], ids=str)
def test_scales_of_other_dtypes_are_those_in_float32(dtype):
    checkpoint = first("fp8")
    rounded = {name: [t.to(dtype) if "scale" in name else t for t in ts] for name, ts in checkpoint.items()}
    wanted = {name: [t.to(dtype).float() if "scale" in name else t for t in ts] for name, ts in checkpoint.items()}
    assert equal(Model("fp8").start(rounded), Model("fp8").start(wanted))


def test_a_reload_that_vllm_breaks_off_leaves_no_layer_that_serves():
    """For example for an unreadable file: vLLM raises, and the layer's parameters have no memory."""
    model = Model("fp8").start(first("fp8"))
    layerwise.initialize_layerwise_reload(model)
    with pytest.raises(CheckpointError, match="the reload of its weights is unfinished"):
        model.experts.quant_method.apply(model.experts, *[None] * 5)


@pytest.mark.parametrize("name", ["w1_weight", "w2_weight_scale_inv"])
def test_a_dense_tensor_of_another_shape_is_named(name):
    checkpoint = first("fp8")
    checkpoint[name] = [tensor[:1, :1] for tensor in checkpoint[name]]
    model = Model("fp8")
    model.lacking = ("experts",)
    with pytest.raises(
        CheckpointError, match=r"mlp\.\w+: a tensor of shape \[1, 1\] does not fit the layer: .*Check that"
    ):
        model.start(checkpoint)
