"""A shared expert in the last slot of the experts' tensors, loaded by vLLM's loaders; without an engine."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import layerwise

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import ONLINE
from fp8moe_plugin.layers.parameters import expert_tensors
from fp8moe_plugin.layers.vllm import shared_expert
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.vllm.shared_expert import DenseLayers, Mlp
from tests import helpers as h
from tests.layers.experts import EXPERTS, HIDDEN, make_checkpoint, make_unquantized
from tests.layers.vllm.one_rank import PACKED, Layer, default_config, load_mlp, make_mlp

PREFIX = "model.layers.3.mlp"
PARAMETERS = tuple(expert_tensors(FP8_BLOCK, 1, 128, 128))


@pytest.fixture(autouse=True)
def vllm_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    config = default_config()
    monkeypatch.setattr(config, "additional_config", {})
    with set_current_vllm_config(config):
        yield


def make_shared(intermediate: int, online: bool = False) -> Mlp:
    return make_mlp(intermediate, online, reduce_results=False)


def addresses(tensors: object) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]  # type: ignore[attr-defined]


@pytest.mark.seam
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize(("intermediate", "ranks", "rank"), [(256, 1, 0), (512, 2, 1), (1536, 8, 5), (1536, 8, 6)])
def test_the_shared_expert_is_loaded_into_the_slot_after_the_experts(on_rank, intermediate, ranks, rank, online):
    """Also on ranks that hold some padding, and padding only."""
    on_rank(ranks, rank)
    checkpoint = (make_unquantized if online else make_checkpoint)(intermediate)
    alone, apart = Layer(intermediate, ranks, rank, ONLINE if online else None), make_shared(intermediate, online)
    mlp = make_shared(intermediate, online)
    layer = Layer(intermediate, ranks, rank, ONLINE if online else None, mlp)
    for experts, shared in ((alone, apart), (layer, mlp)):
        load_mlp(shared, checkpoint, 1)
        experts.load(checkpoint)
        for part in (*shared, experts):
            part.quant_method.loading.finish(part)
    merged = layer.quant_method.shared_expert
    for name, own, tensor in zip(PARAMETERS, mlp.tensors(), merged.tensors, strict=True):
        assert tensor.is_contiguous()
        assert len(tensor) == EXPERTS + 1
        assert addresses([getattr(layer, name), own]) == addresses([tensor, tensor[-1]])
    wanted = zip(PARAMETERS, apart.tensors(), strict=True)
    for (name, shared), tensor in zip(wanted, merged.tensors, strict=True):
        assert h.same_bits(tensor, torch.cat([getattr(alone, name).data, shared.data[None]]))


@pytest.mark.parametrize("lacks", ["experts", "gate_up", "down"])
def test_a_missing_tensor_is_noticed_where_it_is_missing(on_rank, lacks):
    on_rank(1, 0)
    checkpoint, mlp = make_checkpoint(256), make_shared(256)
    layer = Layer(256, 1, 0, shared=mlp)
    without = {"experts": "w2_weight", "gate_up": "w3_weight", "down": "w2_weight"}[lacks]
    broken = checkpoint | {without: [None] * EXPERTS}
    layer.load(broken if lacks == "experts" else checkpoint)
    load_mlp(mlp, checkpoint if lacks == "experts" else broken)
    for name, part in {"experts": layer, "gate_up": mlp.gate_up, "down": mlp.down}.items():
        if name != lacks:
            part.quant_method.loading.finish(part)
            continue
        with pytest.raises(CheckpointError, match="a tensor is missing"):
            part.quant_method.loading.finish(part)


@pytest.mark.seam
@pytest.mark.parametrize("reloaded", ["experts", "mlp", "both"])
def test_vllm_reloads_the_parts_in_place(monkeypatch, on_rank, reloaded):
    on_rank(1, 0)
    monkeypatch.setattr(Fp8MoeMethod, "_set_up", lambda self, _: setattr(self, "moe_kernel", object()))
    first = make_checkpoint(256)
    second = {name: tensors[::-1] for name, tensors in first.items()}
    mlp = make_shared(256)
    layer = Layer(256, 1, 0, shared=mlp)
    for part in (layer, *mlp):
        layerwise.record_metadata_for_reloading(part)
    load_mlp(mlp, first)
    layer.load(first)
    for part in (layer, *mlp):
        part.quant_method.process_weights_after_loading(part)
    tensors = layer.quant_method.shared_expert.tensors
    expected = [tensor.clone() for tensor in tensors]
    parameters = [*layer.parameters(), *mlp.tensors()]
    if reloaded != "mlp":
        layerwise.initialize_layerwise_reload(layer)
        layer.load(second)
        for tensor in expected:
            tensor[:-1] = tensor[:-1].flip(0)
    if reloaded != "experts":
        for part in mlp:
            layerwise.initialize_layerwise_reload(part)
        load_mlp(mlp, second)
        for tensor, source in zip(expected, [t.clone() for t in expected], strict=True):
            tensor[-1] = source[0 if reloaded == "both" else -2]
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert h.same_bits(tensor, wanted)
    assert all(a is b for a, b in zip([*layer.parameters(), *mlp.tensors()], parameters, strict=True))


UNFIT = {
    "ranks of expert parallelism": {"use_ep": True},
    "expert load balancing": {"enable_eplb": True},
    "data parallelism": {"dp_size": 2},
    "sequence parallelism": {"sp_size": 2},
    "context parallelism": {"pcp_size": 2},
    "experts that more ranks share": {"tp_size": 2},
}


@pytest.mark.parametrize("changed", UNFIT.values(), ids=UNFIT)
def test_a_shared_expert_stays_apart_from_experts_that_are_distributed_otherwise(on_rank, changed):
    on_rank(1, 0)
    mlp = make_shared(256)
    before = addresses(mlp.tensors())
    layer = Layer(256, 1, 0, shared=mlp, **changed)
    assert layer.quant_method.shared_expert is None
    assert addresses(mlp.tensors()) == before


@pytest.mark.parametrize(
    ("intermediate", "options"), [(512, {"reduce_results": False}), (256, {"reduce_results": True})]
)
def test_a_shared_expert_of_another_kind_stays_apart(on_rank, intermediate, options):
    """Two shared experts are one MLP of twice the width."""
    on_rank(1, 0)
    layer = Layer(256, 1, 0, shared=make_mlp(intermediate, **options))
    assert layer.quant_method.shared_expert is None
    assert all(len(parameter) == EXPERTS for parameter in layer.parameters())


def noted(layers: DenseLayers, block: str = PREFIX, name: str = "shared_experts") -> tuple[object, object]:
    parts = object(), object()
    for part, end in zip(parts, ("gate_up_proj", "down_proj"), strict=True):
        layers.note(f"{block}.{name}.{end}", part)
    return parts


def test_a_shared_expert_of_another_activation_stays_apart(on_rank, monkeypatch):
    on_rank(1, 0)
    lines: list[str] = []
    monkeypatch.setattr(shared_expert, "log_once", lambda level, text: lines.append(text))
    method = Layer(256, 1, 0).quant_method
    sizes = EXPERTS, HIDDEN, 256
    assert make_shared(256).fits(method.moe, method.spec, *sizes)
    assert not lines
    clamped = method.spec._replace(activation=Activation(limit=10.0))
    assert make_shared(256).fits(method.moe, clamped, *sizes)
    assert not lines
    stepped = method.spec._replace(activation=Activation("swiglustep", 7.0))
    assert not make_shared(256).fits(method.moe, stepped, *sizes)
    assert lines == ["shared experts are not merged: their activation may differ from that of the others"]


def test_a_shared_expert_of_another_format_stays_apart(on_rank, monkeypatch):
    """In DeepSeek-V4's checkpoints it is in block FP8."""
    on_rank(1, 0)
    lines: list[str] = []
    monkeypatch.setattr(shared_expert, "log_once", lambda level, text: lines.append(text))
    assert Layer(256, 1, 0, PACKED, make_shared(256)).quant_method.shared_expert is None
    assert lines == ["shared experts are not merged: the routed ones are packed MXFP4"]


@pytest.mark.parametrize("name", ["shared_experts", "shared_expert"])
def test_experts_take_the_shared_expert_of_their_block(name):
    layers = DenseLayers()
    parts = noted(layers, name=name)
    assert layers.take(f"{PREFIX}.experts") == parts
    assert layers.take(f"{PREFIX}.experts") is None


@pytest.mark.parametrize(("block", "name"), [("model.layers.2.mlp", "shared_experts"), (PREFIX, "shared_mlp")])
def test_experts_take_no_other_layers(block, name):
    layers = DenseLayers()
    noted(layers, block, name)
    assert layers.take(f"{PREFIX}.experts") is None


def test_layers_whose_experts_are_not_quantized_are_forgotten():
    layers = DenseLayers()
    noted(layers, "model.layers.2.mlp")
    noted(layers)
    assert len(layers.layers) == 2
    assert layers.take("model.layers.2.mlp.experts") is None
    assert layers.take(f"{PREFIX}.experts")
    assert not layers.layers


def test_a_setting_leaves_it_apart():
    layers = DenseLayers()
    with h.environment("FP8MOE_MERGE_SHARED_EXPERT", "0"):
        noted(layers)
    assert layers.take(f"{PREFIX}.experts") is None


@pytest.mark.parametrize(("backend", "option"), [("uva", "cpu_offload_gb"), ("prefetch", "offload_group_size")])
def test_offloading_which_moves_parameters_leaves_it_apart(monkeypatch, backend, option):
    monkeypatch.setattr(getattr(default_config().offload_config, backend), option, 1)
    layers = DenseLayers()
    noted(layers)
    assert layers.take(f"{PREFIX}.experts") is None
