"""A dense layer that the kernels do not support runs on SGLang's own method, and the log and the metrics say so."""

import contextlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.distributed import utils
from sglang.srt.layers import linear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.quantization import fp8
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.spec import ONLINE, parse_quantization
from fp8moe_plugin.layers import metrics
from fp8moe_plugin.layers.sglang import config as seam
from fp8moe_plugin.layers.sglang.config import Fp8MoeConfig
from fp8moe_plugin.layers.sglang.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.sglang.loads import Loads
from fp8moe_plugin.layers.sglang.moe import Fp8MoeMethod
from fp8moe_plugin.layers.sglang.refusals import check_layers
from fp8moe_plugin.logs import log_once
from tests import helpers as h
from tests.compressed import BY_ROW

pytestmark = pytest.mark.seam

CHECKPOINT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NAME, INPUTS, WIDTH = "model.layers.0.self_attn.in_proj", 192, 256
EXPERTS = "model.layers.3.mlp.experts"
KIND = "model.layers.N.self_attn.in_proj"


class Quantized(Fp8MoeConfig):
    """A checkpoint's configuration, for layers outside of a model."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Fp8MoeLinearMethod:
        return Fp8MoeLinearMethod(self, prefix, "warmup")


@pytest.fixture
def make(monkeypatch):
    """Makes two fused projections."""
    options = {"tp_rank": 0, "tp_size": 1}
    if hasattr(utils, "get_group_rank_size"):  # SGLang 0.5.22
        options = {}
        for module in (utils, linear):
            monkeypatch.setattr(module, "get_group_rank_size", lambda group: (0, 1))
        monkeypatch.setattr(linear, "_resolve_linear_group", lambda group: SimpleNamespace(world_size=1))
    else:
        monkeypatch.setattr(fp8, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    monkeypatch.setattr(metrics, "_layers", defaultdict(set))
    log_once.cache_clear()

    def layer(quant, width: int = WIDTH, inputs: int = INPUTS):
        given = {"quant_config": quant, "bias": False, "params_dtype": torch.bfloat16, "prefix": NAME}
        return linear.MergedColumnParallelLinear(inputs, [width, width], **given, **options)

    return layer


def checked(online: bool, checkpoint: dict[str, Any] = CHECKPOINT) -> Quantized:
    """The config, without the checks of the machine and of SGLang's options, which need an engine."""
    made = super(Fp8MoeConfig, Quantized).from_config(CHECKPOINT)
    made.spec = ONLINE if online else parse_quantization(checkpoint)
    made.ue8m0, made.online, made.loads = False, online, Loads(None if online else made.spec.scale)
    made.checkpoint, made.weight_block_size = checkpoint, made.spec.dense.weight_block
    return made


@pytest.mark.parametrize("side", [128, 32])  # of a scale block; 32: DeepSeek-V4.1
def test_layer_equals_that_of_engine(make, side):
    checkpoint = CHECKPOINT | {"weight_block_size": [side, side], "expert_dtype": "fp4"}
    ours, stock = make(checked(False, checkpoint)), make(Fp8Config.from_config(checkpoint))
    assert type(ours.quant_method) is type(stock.quant_method) is Fp8LinearMethod
    weight = torch.randn(2, WIDTH, INPUTS, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    for layer in (ours, stock):
        for shard in range(2):
            layer.weight.weight_loader(layer.weight, weight[shard], shard)
            scale = layer.weight_scale_inv
            blocks = torch.arange(WIDTH // side * -(-INPUTS // side)) + shard
            scale.weight_loader(scale, blocks.float().view(WIDTH // side, -1), shard)
    for (name, mine), (wanted, its) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        assert name == wanted
        assert h.same_bits(mine.data, its.data)


def test_layer_of_compressed_tensors_has_scales_of_rows(monkeypatch, make):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # for which SGLang has a kernel
    layer, scale = make(checked(False, BY_ROW)), torch.arange(2.0 * WIDTH).view(2, WIDTH, 1)
    assert type(layer.quant_method) is CompressedTensorsLinearMethod
    for shard in range(2):
        layer.weight_scale.weight_loader(layer.weight_scale, scale[shard], shard)
    assert torch.equal(layer.weight_scale.data, scale.flatten(0, 1))


def test_log_and_metrics_name_the_layers(make, plugin_log):
    quant = checked(True)
    layer = make(quant)
    assert type(layer.quant_method) is UnquantizedLinearMethod
    quant.loads.finish_load(torch.nn.ModuleList([layer]))
    kind, summary = (record.getMessage() for record in plugin_log.records if KIND in record.getMessage())
    assert kind.startswith(f"fp8moe: {KIND} runs on SGLang's own UnquantizedLinearMethod: it has 192 input channels")
    assert summary == f"fp8moe: 0 layers run on the plugin's kernels, 1 on SGLang's own: {KIND} (1)"
    assert metrics.LAYERS.labels("engine", "dense")._value.get() == 1


def test_forbidden_fallback_refuses_the_model(make):
    refused = pytest.raises(UnsupportedError, match=f"{NAME} has 192 input channels on this rank.*smaller --tp-size")
    with h.environment("FP8MOE_FALLBACK", "forbid"), refused:
        make(checked(False))


def test_projections_that_share_a_block_are_refused(make):
    with pytest.raises(UnsupportedError, match="192 output channels on this rank, not a multiple"):
        make(checked(False), 192, 256)


class Experts(FusedMoE):
    """A layer of experts without an engine, as far as its method needs it."""

    def __init__(self, quant, hidden: int = 256, experts: int = 4, bias: bool = False, **runner: object) -> None:
        torch.nn.Module.__init__(self)
        self.hidden_size, self.num_experts, self.num_local_experts = hidden, experts, experts
        self.intermediate_size_per_partition, self.moe_tp_size, self.moe_tp_rank = 256, 1, 0
        self.use_triton_kernels = self.use_flashinfer_trtllm_moe = False
        self.num_fused_shared_experts, self.with_bias = 0, bias
        self.moe_runner_config = MoeRunnerConfig(is_gated=True)
        for name, value in runner.items():
            setattr(self.moe_runner_config, name, value)
        self.quant_method = quant.get_quant_method(self, EXPERTS)
        sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size_per_partition": 256}
        given = {"params_dtype": torch.bfloat16, "weight_loader": self.weight_loader, "with_bias": bias}
        self.quant_method.create_weights(layer=self, **sizes, **given)


@pytest.fixture
def quant(monkeypatch, make):
    monkeypatch.setattr(seam, "get_server_args", lambda: SimpleNamespace(ep_num_redundant_experts=0))
    monkeypatch.setattr(seam, "warmup_command", lambda: "warmup")
    if hasattr(fp8, "get_parallel"):
        monkeypatch.setattr(fp8, "get_parallel", lambda: SimpleNamespace(tp_size=1))

    def config(online: bool = False) -> Fp8MoeConfig:
        made = checked(online)
        made.__class__ = Fp8MoeConfig
        return made

    return config


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden": 320}, "hidden size 320 is not a multiple of 128"),
        ({"experts": 1025, "hidden": 128}, "a rank has 1025 experts"),
        ({"bias": True}, "the model's experts have a bias"),
        ({"activation": "gelu"}, "the model's experts have another activation"),
        ({"apply_router_weight_on_input": True}, "the model's experts have weights of the router on their inputs"),
    ],
)
def test_experts_run_on_the_engine(quant, plugin_log, changes, why):
    config = quant()
    assert type(Experts(config).quant_method) is Fp8MoeMethod
    layer = Experts(config, **changes)
    assert type(layer.quant_method) is Fp8MoEMethod
    assert layer.w13_weight_scale_inv.shape[0] == layer.num_experts
    (line,) = [record.getMessage() for record in plugin_log.records if "runs on" in record.getMessage()]
    assert line.startswith(f"fp8moe: model.layers.N.mlp.experts runs on SGLang's own Fp8MoEMethod: {why}")
    assert metrics.LAYERS.labels("engine", "experts")._value.get() == 1
    with h.environment("FP8MOE_FALLBACK", "forbid"):
        refused = Fp8MoeConfig.get_quant_method(config, layer, EXPERTS)
    assert type(refused) is Fp8MoeMethod


def test_unquantized_experts_stay_unquantized(quant):
    layer = Experts(quant(online=True), hidden=320)
    assert type(layer.quant_method) is UnquantizedFusedMoEMethod
    assert layer.w13_weight.dtype == torch.bfloat16


def test_experts_that_the_engine_refuses_too_are_refused(quant, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("320 is not divisible")

    monkeypatch.setattr(Fp8MoEMethod, "create_weights", refuse)
    with pytest.raises(UnsupportedError, match=rf"{EXPERTS}: hidden size 320.*SGLang's own .*: 320 .*\)\. Serve the"):
        Experts(quant(), hidden=320)
    with h.environment("FP8MOE_FALLBACK", "forbid"), pytest.raises(UnsupportedError, match=r"hidden size 320.*block"):
        Experts(quant(), hidden=320)
    fp4 = quant()
    fp4.is_fp4_experts = True
    with pytest.raises(UnsupportedError, match="hidden size 320"):
        Experts(fp4, hidden=320)


@pytest.mark.parametrize("offload", [0, 400])
def test_experts_that_a_gpu_cannot_hold_are_refused_before_loading(offload):
    args, layer = (
        SimpleNamespace(cpu_offload_gb=offload, offload_group_size=-1, pp_size=1),
        SimpleNamespace(top_k=6, hidden_size=4096),
    )
    vars(layer).update(num_experts=256, num_local_experts=128, moe_tp_size=1, intermediate_size_per_partition=2048)
    check_layers(args, SimpleNamespace(num_hidden_layers=43), layer, 150_000_000_000)
    refused = pytest.raises(UnsupportedError, match=r"hold 138\.5 GB .* at least 4 GPUs")
    with contextlib.nullcontext() if offload else refused:
        check_layers(args, SimpleNamespace(num_hidden_layers=43), layer, 80_000_000_000)


@pytest.mark.parametrize(("form", "measured"), [("fp8", 1), ("mxfp4", 0)])
def test_experts_that_stay_in_mxfp4_do_not_double(quant, monkeypatch, form, measured):
    checked = []
    monkeypatch.setattr(seam, "is_cuda", lambda: True)
    monkeypatch.setattr(seam, "check_layers", lambda *arguments: checked.append(arguments))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1))
    fp4 = quant()
    fp4.is_fp4_experts = True
    with h.environment("FP8MOE_FP4_EXPERTS", form):
        layer = Experts(fp4)
    assert type(layer.quant_method) is Fp8MoeMethod
    assert len(checked) == measured
    assert layer.w2_weight.dtype == (torch.float8_e4m3fn if measured else torch.uint8)
