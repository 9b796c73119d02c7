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
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod, check_experts_not_moved
from tests.helpers import same_bits
from tests.layers.experts import Checkpoint, make_checkpoint, make_unquantized
from tests.layers.vllm.one_rank import Layer, load_mlp, make_mlp

pytestmark = pytest.mark.seam

INTERMEDIATE = 256
RESTART = "The failed reload left a mixture .* Restart the engine in a new process"
KINDS = ("fp8", "online")
TENSORS = [("fp8", name) for name in make_checkpoint(INTERMEDIATE)]
TENSORS += [("online", name) for name in make_unquantized(INTERMEDIATE)]


class Model(torch.nn.Module):
    """Experts and an MLP, filled and prepared as by vLLM's loader."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.experts = Layer(INTERMEDIATE, 1, 0, kind == "online")
        self.gate_up, self.down = make_mlp(INTERMEDIATE, kind == "online")
        for layer in (self.gate_up, self.down):  # layers of one model share its state
            layer.quant_method.loading.model = self.experts.quant_method.loading.model
        self.lacking: tuple[str, ...] = ()  # layers for which the next checkpoints have no tensors
        layerwise.record_metadata_for_reloading(self)

    def start(self, checkpoint: Checkpoint) -> "Model":
        self.load(checkpoint)
        for layer in self.children():
            layer.quant_method.process_weights_after_loading(layer)
        return self

    def load(self, checkpoint: Checkpoint) -> None:
        parts = {"w1": "gate_up", "w3": "gate_up", "w2": "down"}
        if "experts" not in self.lacking:
            self.experts.load(checkpoint)
        there = {name: tensors for name, tensors in checkpoint.items() if parts[name[:2]] not in self.lacking}
        load_mlp((self.gate_up, self.down), there)

    def reload(self, checkpoint: Checkpoint) -> None:
        layerwise.initialize_layerwise_reload(self)
        self.load(checkpoint)
        layerwise.finalize_layerwise_reload(self, None)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch, on_rank: Callable[[int, int], None]) -> None:
    """One rank, without the modular kernel, which needs an engine; its configuration shows which scales it reads."""
    monkeypatch.setattr(Fp8MoeMethod, "_make_kernel", lambda *_: SimpleNamespace())
    on_rank(1, 0)


def first(kind: str) -> Checkpoint:
    return (make_unquantized if kind == "online" else make_checkpoint)(INTERMEDIATE)


def second(kind: str) -> Checkpoint:
    """Other weights with other scales, because blocks differ in magnitude."""
    return {name: [tensor.roll(1, 0) for tensor in tensors[::-1]] for name, tensors in first(kind).items()}


def equal(model: Model, other: Model) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(same_bits(mine.data, its.data) for mine, its in pairs)


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
        scales = model.experts.quant_method.moe_quant_config
        assert scales.w1_scale is model.experts.w13_weight_scale_inv
        assert scales.w2_scale is model.experts.w2_weight_scale_inv


def assert_refused(kind: str, load: Callable[[Checkpoint], None], checkpoint: Checkpoint, why: str) -> None:
    """Check that this load and every later use of the model raises."""
    model: Model = load.__self__
    with pytest.raises(CheckpointError, match=f"{why}.*{RESTART}"):
        load(checkpoint)
    for again in (model.reload, model.load):
        with pytest.raises(CheckpointError, match=f"{why}.*{RESTART}"):
            again(first(kind))
    with pytest.raises(CheckpointError, match=f"{why}.*{RESTART}"):
        model.experts.quant_method.apply(model.experts, *[None] * 5)


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


@pytest.mark.parametrize(("kind", "name"), TENSORS)
@pytest.mark.parametrize("way", ["reload", "load"])
def test_a_tensor_with_nan_is_refused(kind, name, way):
    checkpoint = second(kind)
    checkpoint[name][1] = checkpoint[name][1].clone()
    checkpoint[name][1].view(torch.uint8).view(-1)[-4:] = 0xFF
    assert_refused(kind, getattr(Model(kind).start(first(kind)), way), checkpoint, "hold.* NaN")


def test_a_worker_process_ends(monkeypatch, plugin_log):
    """vLLM would report an exception to the caller of the reload, and keep serving."""
    model, checkpoint, ended = Model("fp8").start(first("fp8")), second("fp8"), []
    model.experts.quant_method.loading.model.in_worker = True
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
        model.experts.quant_method.loading.model.check_usable()
        assert equal(model, wanted)
    model.reload(second(kind))
    assert equal(model, Model(kind).start(second(kind)))


def test_a_parameter_that_is_exchanged_without_a_reload_keeps_its_values():
    model = Model("fp8").start(first("fp8"))
    weight = torch.nn.Parameter(model.down.weight.data.clone(), requires_grad=False)
    model.down.register_parameter("weight", weight)
    assert same_bits(weight.data, Model("fp8").start(first("fp8")).down.weight.data)


class Attention(torch.nn.Module):
    """Like vLLM's MLA: derived tensors are allocated anew, as plain attributes or as parameters."""

    def __init__(self, kv_b_proj: torch.nn.Module, parameters: bool) -> None:
        super().__init__()
        self.kv_b_proj = kv_b_proj
        self.make = torch.nn.Parameter if parameters else lambda tensor, requires_grad: tensor

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        weight = self.kv_b_proj.weight.to(dtype)
        if hasattr(self, "W_UV"):
            del self.W_UV
        self.W_UV = self.make(weight[:128], requires_grad=False)
        self.W_UK_T = self.make(weight[128:].T, requires_grad=False)


@pytest.mark.parametrize("parameters", [False, True])
def test_what_mla_derives_stays_where_graphs_read_it(monkeypatch, parameters):
    down = make_mlp(INTERMEDIATE)[1]
    attention, other = Attention(down, parameters), Attention(make_mlp(INTERMEDIATE)[1], parameters)
    context = {"attention": attention, "other": other, "experts": torch.nn.Module()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    monkeypatch.setattr(compat, "get_current_vllm_config", lambda: config)
    compat.keep_mla_weights(down)
    assert "process_weights_after_loading" not in vars(other)
    served = []
    for value in (1.0, 2.0, 3.0):
        down.weight.data.fill_(value)
        attention.process_weights_after_loading(torch.bfloat16)
        for tensor in (attention.W_UV, attention.W_UK_T):
            assert (tensor == value).all()
            assert isinstance(tensor, torch.nn.Parameter) == parameters
        served.append((attention.W_UV.data_ptr(), attention.W_UK_T.data_ptr()))
    assert len(set(served)) == 1


@pytest.mark.parametrize(("kind", "name"), TENSORS)
def test_a_start_that_fails_says_nothing_of_reloading(kind, name):
    checkpoint = first(kind)
    checkpoint[name][1] = None
    with pytest.raises(CheckpointError, match="a tensor is missing") as error:
        Model(kind).start(checkpoint)
    assert "reload" not in str(error.value)


WRONG = {
    "a weight as bytes": ("w1_weight", lambda w: w.view(torch.uint8), r"has dtype torch\.uint8"),
    "a weight as numbers": ("w2_weight", lambda w: w.bfloat16(), r"has dtype torch\.bfloat16"),
    "scales as bytes": ("w2_weight_scale_inv", lambda s: s.to(torch.uint8), r"has dtype torch\.uint8"),
    "scales in half precision": ("w2_weight_scale_inv", lambda s: s.half(), r"has dtype torch\.float16"),
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


def test_scales_in_bfloat16_are_those_in_float32():
    checkpoint = first("fp8")
    rounded = {name: [t.bfloat16() if "scale" in name else t for t in ts] for name, ts in checkpoint.items()}
    wanted = {name: [t.bfloat16().float() if "scale" in name else t for t in ts] for name, ts in checkpoint.items()}
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
