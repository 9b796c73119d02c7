"""A layer that the kernels do not support runs on vLLM's own method, and the log and the metrics say so."""

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import fp8, get_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Dense, Experts, Model, Split
from fp8moe_plugin.checkpoint.splits import engine_layers, split_refusal
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.layers import metrics
from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig
from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.vllm.online import OnlineLinearMethod
from fp8moe_plugin.logs import log_once
from tests import helpers as h
from tests.compressed import QUANTIZATION
from tests.layers.experts import make_checkpoint, make_unquantized
from tests.layers.vllm.one_rank import Quantized, default_config
from tests.layers.vllm.test_config import CHECKPOINT, moe_layer

NAME, INPUTS, WIDTH = "model.layers.{}.self_attn.in_proj", 192, 512  # each of two ranks has half of the width
KIND = NAME.format("N")


CAN_BUILD = torch.cpu._is_amx_tile_supported() and getattr(_custom_ops, "_supports_cpu_fp8_w8a16", False)
on_its_kernels = pytest.mark.skipif(not CAN_BUILD, reason="vLLM has no FP8 kernels for this machine")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, on_rank) -> Iterator[None]:
    """The first of two ranks of an engine."""
    on_rank(2, 0)
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: 2)
    log_once.cache_clear()
    monkeypatch.setattr(metrics, "_layers", defaultdict(set))
    monkeypatch.delenv(metrics.BY_PROMETHEUS, raising=False)
    config = copy.copy(default_config())
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16, model="model", hf_config=SimpleNamespace(expert_dtype="fp8")
    )
    with set_current_vllm_config(config):
        yield


def projections(quant: Fp8Config, layer: int = 0, width: int = WIDTH, inputs: int = INPUTS) -> torch.nn.Module:
    """Two fused projections."""
    prefix = NAME.format(layer)
    return linear.MergedColumnParallelLinear(inputs, [width, width], bias=False, quant_config=quant, prefix=prefix)


def load(layer: torch.nn.Module, scale: str | None) -> torch.nn.Module:
    """Load a tensor of each kind for each projection, and prepare the layer as vLLM's loader does."""
    checkpoint = make_checkpoint(WIDTH) if scale else make_unquantized(WIDTH)
    for shard, name in enumerate(("w1", "w3")):
        weight = checkpoint[f"{name}_weight"][0][:, :INPUTS]
        layer.weight.weight_loader(layer.weight, weight, shard)
        if scale:
            parameter = getattr(layer, scale)
            parameter.weight_loader(parameter, checkpoint[f"{name}_weight_scale_inv"][0], shard)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


CASES = {
    "fp8": (CHECKPOINT, Fp8LinearMethod, "weight_scale_inv"),
    "deepseek_v4": (CHECKPOINT | {"quant_method": "deepseek_v4_fp8"}, Fp8LinearMethod, "weight_scale_inv"),
    "compressed": (QUANTIZATION, CompressedTensorsLinearMethod, "weight_scale"),
}


@on_its_kernels
@pytest.mark.parametrize("case", CASES)
def test_the_layer_equals_that_of_the_engine(case):
    checkpoint, method, scale = CASES[case]
    config = get_quantization_config(checkpoint["quant_method"])
    ours = load(projections(Quantized.from_config(copy.deepcopy(checkpoint))), scale)
    stock = load(projections(config.from_config(copy.deepcopy(checkpoint))), scale)
    assert type(ours.quant_method) is type(stock.quant_method) is method
    for (name, mine), (wanted, its) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        assert name == wanted
        assert h.same_bits(mine.data, its.data)
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert h.same_bits(ours(x)[0], stock(x)[0])


@pytest.mark.seam
def test_a_layer_of_an_unquantized_checkpoint_stays_unquantized():
    layer = projections(Quantized.for_unquantized())
    weight = make_unquantized(WIDTH)["w1_weight"][0][:, :INPUTS]
    layer.weight.weight_loader(layer.weight, weight, 0)
    assert type(layer.quant_method) is UnquantizedLinearMethod
    assert torch.equal(layer.weight.data[: WIDTH // 2], weight[: WIDTH // 2])


@pytest.mark.seam
def test_log_and_metrics_name_the_layers(plugin_log, monkeypatch: pytest.MonkeyPatch):
    exported = []
    monkeypatch.setattr(metrics, "export", lambda: exported.append(metrics.LAYERS.labels("engine", "dense")))
    quant = Quantized.for_unquantized()
    left = [projections(quant, number) for number in range(2)]
    assert not exported  # a node's metrics answer to Prometheus from the first export on, and have no weights yet
    served = projections(quant, 2, inputs=256)
    for parameter in served.quant_method.loading.parameters.values():
        parameter.data.zero_()
    for layer in (*left, served):
        layer.quant_method.process_weights_after_loading(layer)
    assert type(served.quant_method) is OnlineLinearMethod
    kind, summary = (record for record in plugin_log.records if KIND in record.getMessage())
    assert kind.levelname == summary.levelname == "WARNING"
    assert kind.getMessage() == (
        f"fp8moe: {KIND} runs on vLLM's own UnquantizedLinearMethod: it has 192 input channels on this rank, not a "
        "multiple of the scale block of 128 (FP8MOE_FALLBACK=forbid: refuse such a model)"
    )
    assert summary.getMessage() == f"fp8moe: 1 layers run on the plugin's kernels, 2 on vLLM's own: {KIND} (2)"
    assert exported[-1]._value.get() == 2


@pytest.mark.seam
def test_the_summary_is_logged_once_without_layers_of_ours(plugin_log):
    quant = Quantized.for_unquantized()
    layers = [projections(quant, number) for number in range(2)]
    for layer in layers * 2:  # again after a reload
        layer.quant_method.process_weights_after_loading(layer)
    _, summary = (record.getMessage() for record in plugin_log.records)
    assert summary == f"fp8moe: 0 layers run on the plugin's kernels, 2 on vLLM's own: {KIND} (2)"


@pytest.mark.seam
def test_forbidden_fallback_refuses_the_model():
    quant = Quantized.from_config(CHECKPOINT)
    refused = pytest.raises(UnsupportedError, match=f"{NAME.format(0)} has 192 input channels on this rank.*smaller -")
    with h.environment("FP8MOE_FALLBACK", "forbid"), refused:
        projections(quant)


def test_a_layer_that_the_engine_refuses_too_is_refused(monkeypatch, plugin_log):
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("192 is not divisible")

    monkeypatch.setattr(UnquantizedLinearMethod, "create_weights", refuse)
    refused = pytest.raises(UnsupportedError, match=r"in_proj has 192 input .*vLLM's own .*divisible.*\. Use a smaller")
    with refused:
        projections(Quantized.for_unquantized())
    assert not plugin_log.records


def test_half_of_a_padded_mlp_is_refused():
    quant, prefix = Quantized.from_config(CHECKPOINT), "model.layers.0.mlp.gate_up_proj"
    with pytest.raises(UnsupportedError, match="gate_up_proj has 192 input channels"):
        linear.MergedColumnParallelLinear(INPUTS, [384, 384], bias=False, quant_config=quant, prefix=prefix)


def experts(**changes: object) -> RoutedExperts:
    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.moe_config = moe_layer(**changes)
    return layer


def create_weights(method: FusedMoEMethodBase, layer: RoutedExperts) -> None:
    moe, sizes = layer.moe_config, ("num_local_experts", "hidden_dim", "intermediate_size_per_partition")
    method.create_weights(layer, *(getattr(moe, size) for size in sizes), torch.bfloat16)


EXPERTS = "model.layers.3.mlp.experts"


@on_its_kernels
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_dim": 320}, "hidden size 320 is not a multiple of 128"),
        ({"num_local_experts": 1025}, "a rank has 1025 experts"),
        ({"activation": MoEActivation.GELU}, "the model's experts have another activation than silu"),
    ],
)
def test_unsupported_experts_run_on_the_engine(plugin_log, changes, why):
    config = Fp8MoeConfig.from_config(CHECKPOINT)
    layer = experts(**changes)
    method = config.get_quant_method(layer, EXPERTS)
    assert type(method) is Fp8MoEMethod
    create_weights(method, layer)
    (line,) = [record.getMessage() for record in plugin_log.records]
    assert line.startswith(f"fp8moe: model.layers.N.mlp.experts runs on vLLM's own Fp8MoEMethod: {why}")
    assert metrics.LAYERS.labels("engine", "experts")._value.get() == 1
    assert type(config.get_quant_method(experts(), EXPERTS)) is Fp8MoeMethod


def test_experts_whose_weights_the_engine_does_not_create_are_refused(monkeypatch, plugin_log):
    def refuse(*_: object) -> None:
        raise ValueError("192 is not divisible")

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "create_weights", refuse)
    config, layer = Fp8MoeConfig.for_unquantized(), experts(hidden_dim=320)
    method = config.get_quant_method(layer, EXPERTS)
    with pytest.raises(UnsupportedError, match=rf"{EXPERTS}: hidden size 320.*\(ValueError: 192 .*\)\. Serve the"):
        create_weights(method, layer)
    assert not plugin_log.records
    assert not metrics._layers


@pytest.mark.seam
def test_experts_of_an_unquantized_checkpoint_stay_unquantized(plugin_log):
    config, layer = Fp8MoeConfig.for_unquantized(), experts(hidden_dim=320)
    method = config.get_quant_method(layer, EXPERTS)
    assert type(method) is UnquantizedFusedMoEMethod
    create_weights(method, layer)
    assert layer.w13_weight.dtype == torch.bfloat16
    assert len(plugin_log.records) == 1


@pytest.mark.parametrize("option", [{"is_lora_enabled": True}, {"moe_backend": "triton"}])
def test_options_of_the_command_line_stay_errors(option):
    config = Fp8MoeConfig.from_config(CHECKPOINT)
    with pytest.raises(UnsupportedError, match="Remove"):
        config.get_quant_method(experts(hidden_dim=320, **option), EXPERTS)


@pytest.mark.parametrize("width", [256, 320])
def test_they_leave_experts_to_the_engine_if_the_user_did_not_ask_for_ours(width):
    config = Fp8MoeConfig.from_config(CHECKPOINT)
    with h.environment("FP8MOE_TAKE_FP8", "1"):
        assert type(config.get_quant_method(experts(), EXPERTS)) is Fp8MoeMethod
        layer = experts(hidden_dim=width, is_lora_enabled=True)
        assert type(config.get_quant_method(layer, EXPERTS)) is Fp8MoEMethod
        assert metrics.LAYERS.labels("engine", "experts")._value.get() == 1
        with pytest.raises(ValueError, match=r"^FP8 MoE backend TRITON does not support"):  # what vLLM says without us
            config.get_quant_method(experts(moe_backend="triton"), EXPERTS)


def test_experts_that_the_engine_refuses_too_are_refused(monkeypatch):
    def refuse(*_: object) -> None:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(fp8, "Fp8MoEMethod", refuse)
    config, why = Fp8MoeConfig.from_config(CHECKPOINT), "hidden size 320 is not a multiple of 128"
    with pytest.raises(UnsupportedError, match=rf"{EXPERTS}: {why}.*Error: no kernel\)\. Serve the"):
        config.get_quant_method(experts(hidden_dim=320), EXPERTS)
    with h.environment("FP8MOE_FALLBACK", "forbid"), pytest.raises(UnsupportedError, match=f"{why}, .*block. Serve"):
        config.get_quant_method(experts(hidden_dim=320), EXPERTS)


@on_its_kernels
def test_scales_of_shared_blocks_are_loaded_by_the_model_alone():
    """vLLM's loader would copy those of other blocks. MiMo-V2.5 has a loader of its own."""
    quant = Quantized.from_config(CHECKPOINT)
    with pytest.raises(UnsupportedError, match=r"in_proj has 192 output channels.* scales of other blocks\. Use"):
        projections(quant, width=384, inputs=256)
    architectures = SimpleNamespace(architectures=["MiMoV2ForCausalLM"])
    quant.model.engine = SimpleNamespace(model_config=SimpleNamespace(hf_config=architectures))
    layer = projections(quant, width=384, inputs=256)
    assert type(layer.quant_method) is Fp8LinearMethod
    scale = layer.weight_scale_inv
    with pytest.raises(UnsupportedError, match=r"in_proj has 192 output channels.* scales of other blocks\. Use"):
        scale.weight_loader(scale, torch.ones(3, 2), 0)
    default_weight_loader(scale, torch.ones(3, 2))
    assert (scale == 1).all()


PARTS = [  # of two ranks: inputs, outputs of each projection, and how they are split
    (256, (512, 512), Split.OUTPUTS),
    (192, (512, 512), Split.OUTPUTS),
    (256, (384, 512), Split.OUTPUTS),
    (256, (48,), Split.OUTPUTS),
    (384, (256,), Split.INPUTS),
    (256, (24,), Split.NONE),
    (256, (20,), Split.NONE),
    (256, (128, 192), Split.NONE),
    (256, (192, 128), Split.NONE),
]


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "split"), PARTS)
def test_the_warmup_predicts_who_computes_a_layer(inputs, outputs, split, online):
    model = Model("Some", Experts(0, 8, 2, 256, 128), (), heads=2, kv_heads=2, vocab=1, ue8m0=False, quantized=True)
    model = replace(model, dense=(Dense("in_proj", 1, inputs, outputs, split),), quantized=not online)
    refusal, two = split_refusal(model, Parallel(2)), Parallel(2)
    quant = Quantized.for_unquantized() if online else Quantized.from_config(CHECKPOINT)
    given = {"bias": False, "quant_config": quant, "prefix": NAME.format(0)}
    if refusal:
        with pytest.raises(UnsupportedError) as caught:
            make_layer(inputs, outputs, split, given)
        assert str(caught.value).startswith(refusal.replace("in_proj", NAME.format(0)))
        return
    if engine_layers(model, two) and not (online or CAN_BUILD):
        pytest.skip("vLLM has no FP8 kernels for this machine")
    ours = isinstance(make_layer(inputs, outputs, split, given).quant_method, Fp8MoeLinearMethod)
    assert ours == (not engine_layers(model, two))


def make_layer(inputs: int, outputs: tuple[int, ...], split: Split, given: dict) -> torch.nn.Module:
    if split is Split.INPUTS:
        return linear.RowParallelLinear(inputs, *outputs, **given)
    if len(outputs) > 1:
        return linear.MergedColumnParallelLinear(inputs, list(outputs), **given, disable_tp=split is Split.NONE)
    kind = linear.ReplicatedLinear if split is Split.NONE else linear.ColumnParallelLinear
    return kind(inputs, *outputs, **given)


@on_its_kernels
def test_vllm_reloads_the_layer_beside_ours():
    quant = Quantized.from_config(CHECKPOINT)
    model = torch.nn.ModuleDict({"theirs": projections(quant), "ours": projections(quant, 1, inputs=256)})
    layerwise.record_metadata_for_reloading(model)

    def load_all(checkpoint):
        for layer, inputs in (("theirs", INPUTS), ("ours", 256)):
            for shard, name in enumerate(("w1", "w3")):
                for kind in ("weight", "weight_scale_inv"):
                    tensor = checkpoint[f"{name}_{kind}"][0]
                    parameter = getattr(model[layer], kind)
                    tensor = tensor[:, :inputs] if kind == "weight" else tensor
                    parameter.weight_loader(parameter, tensor, shard)

    load_all(make_checkpoint(WIDTH))
    for layer in model.values():
        layer.quant_method.process_weights_after_loading(layer)
    layerwise.initialize_layerwise_reload(model)
    assert quant.model.reloading == {NAME.format(1)}
    load_all(make_checkpoint(WIDTH))
    layerwise.finalize_layerwise_reload(model, None)
    quant.model.prepare_step()
    assert not quant.model.failure
