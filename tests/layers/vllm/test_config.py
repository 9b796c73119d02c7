"""Which layers `--quantization fp8moe` serves, and what it refuses; without an engine."""

import dataclasses
import pickle
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from transformers import PretrainedConfig
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

import fp8moe_plugin
from fp8moe_plugin.checkpoint.shapes import dense_refusal
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.layers import machine as machine_check
from fp8moe_plugin.layers.blocks import unsupported_shape
from fp8moe_plugin.layers.vllm import config as seam
from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig
from fp8moe_plugin.layers.vllm.entry import Entry
from fp8moe_plugin.layers.vllm.experts import Fp8MoeExperts, experts_class, layer_spec
from fp8moe_plugin.layers.vllm.refusals import check_layer
from fp8moe_plugin.plan.spec import Arrival
from fp8moe_plugin.settings import Settings
from fp8moe_plugin.testing import invariance

pytestmark = pytest.mark.seam

CHECKPOINT = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("user_quant", [None, "fp8", "awq"])
def test_no_checkpoint_is_taken_over_unless_the_user_asked(user_quant):
    assert Entry.override_quantization_method(CHECKPOINT, user_quant) is None
    assert Entry.override_quantization_method(CHECKPOINT, user_quant, hf_config=object()) is None


def test_any_checkpoint_is_taken_over_if_the_user_asked():
    for checkpoint in (CHECKPOINT, {"quant_method": "awq"}, {}):
        assert Entry.override_quantization_method(checkpoint, "fp8moe") == "fp8moe"


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_the_config_is_what_the_checkpoint_says(key):
    config = Entry.from_config(CHECKPOINT | {key: ["lm_head"], "scale_fmt": "ue8m0"})
    assert isinstance(config, Fp8MoeConfig)
    assert isinstance(config, Fp8Config)
    assert config.get_name() == "fp8moe"
    assert config.weight_block_size == [128, 128]
    assert config.ignored_layers == ["lm_head"]
    assert config.ue8m0
    assert not Entry.from_config(CHECKPOINT).ue8m0


def test_names_without_effect_are_told(plugin_log):
    names = ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.o_proj"]
    Entry.from_config(CHECKPOINT | {"ignored_layers": names})
    assert not plugin_log.records
    Entry.from_config(CHECKPOINT | {"ignored_layers": [*names, "self_attn.o_proj"]})
    assert "unquantized layers, ['self_attn.o_proj'] are not full names" in plugin_log.text


def test_the_config_survives_pickling():
    config = Entry.from_config(CHECKPOINT | {"ignored_layers": ["lm_head"], "scale_fmt": "ue8m0"})
    copy = pickle.loads(pickle.dumps(config))
    assert type(copy) is Fp8MoeConfig
    assert vars(copy) == vars(config)
    assert copy.spec.weights is config.spec.weights  # the formats are compared by identity


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quant_method": "awq"},
            "quant_method is 'awq', but only 'fp8' is supported, and 'compressed-tensors' and 'modelopt' in FP8",
        ),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'.*Use --quantization fp8"),
        (
            {"weight_block_size": [64, 128]},
            r"weight_block_size is \[64, 128\].*128x128 block, row or weight. Rem",
        ),
        ({"quant_method": None}, "quant_method is None, but only 'fp8' is supported"),
        (
            {"activation_scheme": 3},
            "activation_scheme is 3, but must be 'dynamic', or 'static' in one without",
        ),
        ({"weight_block_size": 128}, "weight_block_size is 128, .*128x128 block, row or weight. Remove --quantization"),
        ({"weight_block_size": "128"}, "weight_block_size is '128', but"),
        ({"ignored_layers": "lm_head"}, "ignored_layers is 'lm_head', but must be a list.*Correct quantization_config"),
        ({"ignored_layers": {"lm_head": 1}}, "ignored_layers is {'lm_head': 1}, but must be a list"),
        ({"modules_to_not_convert": [3]}, r"modules_to_not_convert is \[3\], but must be a list of layer names"),
        ({"fmt": 3}, "stores its weights as 3, but the kernels need e4m3"),
        ({"fmt": "e5m2"}, "stores its weights as e5m2, but the kernels need e4m3"),
        ({"store_dtype": "int4"}, "stores its weights as int4, but the kernels need e4m3"),
    ],
)
def test_other_checkpoints_are_refused(change, message):
    with pytest.raises(UnsupportedError, match=message):
        Entry.from_config(CHECKPOINT | change)


def test_unsupported_experts_are_refused_before_any_layer():
    experts, unquantized = {"num_experts": 8, "hidden_act": "gelu"}, {"ignored_layers": ["model.layers.0.mlp.experts"]}
    with pytest.raises(UnsupportedError, match="hidden_act is 'gelu'"):
        Entry.from_config(CHECKPOINT).maybe_update_config("name", hf_config=PretrainedConfig(**experts))
    with pytest.raises(UnsupportedError, match="hidden_act is 'gelu'"):
        Entry().maybe_update_config("name", PretrainedConfig(**experts), None)
    Entry.from_config(CHECKPOINT).maybe_update_config("name", hf_config=PretrainedConfig(hidden_act="gelu"))
    Entry.from_config(CHECKPOINT | unquantized).maybe_update_config("name", hf_config=PretrainedConfig(**experts))
    Entry.from_config(CHECKPOINT).maybe_update_config("name")


def test_a_checkpoint_without_quantization_config_is_quantized_as_it_loads():
    config = Entry()
    assert type(config) is Fp8MoeConfig
    assert config.online
    assert config.weight_block_size == [128, 128]
    assert not config.ue8m0
    assert vars(pickle.loads(pickle.dumps(config))) == vars(config)
    assert not Entry.from_config(CHECKPOINT).online


class Machine:
    """A platform as vLLM describes it."""

    def __init__(self, name: str, capability: tuple[int, int] | None) -> None:
        self.device_name = name
        self.get_device_capability = lambda: capability
        self.is_cuda = lambda: name == "cuda"
        self.is_cpu = lambda: name == "cpu"


@pytest.mark.parametrize(
    ("machine", "backend", "found", "eager"),
    [
        (Machine("cuda", (8, 0)), "auto", "compute capability 8.0", " with --enforce-eager"),
        (Machine("cuda", (10, 0)), "sm90", "compute capability 10.0", " with --enforce-eager"),
        (Machine("xpu", None), "auto", "a xpu", " with --enforce-eager"),
        (Machine("cpu", None), "sm90", "a cpu", ""),
        (Machine("cpu", None), "triton", "a cpu", ""),
        (Machine("cuda", (8, 6)), "triton", "compute capability 8.6", " with --enforce-eager"),
        (Machine("rocm", (9, 0)), "auto", "compute capability 9.0", " with --enforce-eager"),
    ],
)
def test_another_machine_is_refused(monkeypatch, machine, backend, found, eager):
    monkeypatch.setattr(seam, "current_platform", machine)
    monkeypatch.setattr(machine_check, "settings", lambda: Settings(backend=backend))
    need, advice = r"kernels need an? (Hopper|NVIDIA) GPU", r"FP8MOE_BACKEND=reference .*reference"
    with pytest.raises(UnsupportedError, match=rf"{need}.*has {found}.*{advice}{eager}\.$"):
        Entry.from_config(CHECKPOINT)
    with pytest.raises(UnsupportedError, match=need):
        Entry()


@pytest.mark.parametrize(
    ("machine", "backend"),
    [
        (Machine("cuda", (9, 0)), "auto"),
        (Machine("cuda", (9, 0)), "sm90"),
        (Machine("cuda", (9, 0)), "triton"),
        (Machine("cuda", (8, 9)), "auto"),
        (Machine("cuda", (10, 0)), "auto"),
        (Machine("cuda", (12, 0)), "triton"),
        (Machine("cuda", (8, 0)), "reference"),
        (Machine("cpu", None), "auto"),
    ],
)
def test_gpus_with_kernels_and_the_reference_serve(monkeypatch, machine, backend):
    monkeypatch.setattr(seam, "current_platform", machine)
    monkeypatch.setattr(machine_check, "settings", lambda: Settings(backend=backend))
    assert Entry.from_config(CHECKPOINT).get_name() == "fp8moe"


@pytest.mark.parametrize(
    ("machine", "backend"),
    [
        (Machine("cuda", (9, 0)), "reference"),
        (Machine("cuda", (8, 0)), "reference"),
        (Machine("cpu", None), "auto"),
        (Machine("cpu", None), "reference"),
    ],
)
def test_the_reference_is_refused_where_results_must_not_depend_on_the_batch(monkeypatch, machine, backend):
    monkeypatch.setattr(seam, "current_platform", machine)
    monkeypatch.setattr(machine_check, "settings", lambda: Settings(backend=backend))
    with (
        invariance(True),
        pytest.raises(
            UnsupportedError, match=r"VLLM_BATCH_INVARIANT=1 .* the plain-torch reference.* Unset it, or serve on"
        ),
    ):
        Entry.from_config(CHECKPOINT)


def test_our_kernels_serve_where_results_must_not_depend_on_the_batch(monkeypatch):
    """vLLM asks each class of experts whether it supports the mode."""
    monkeypatch.setattr(seam, "current_platform", Machine("cuda", (9, 0)))
    with invariance(True):
        assert Entry.from_config(CHECKPOINT).get_name() == "fp8moe"
        for batched in (False, True):
            check("L", moe_layer(), batched)


def test_vllm_refuses_experts_that_do_not_say_so(monkeypatch):
    monkeypatch.setattr(Fp8MoeExperts, "_supports_batch_invariance", staticmethod(lambda: False))
    with invariance(True), pytest.raises(UnsupportedError, match="batch invariance"):
        check("L", moe_layer())


NO_PARALLEL = FusedMoEParallelConfig.make_no_parallel()
OF_32_RANKS = dataclasses.replace(NO_PARALLEL, ep_size=32, use_ep=True)


def moe_layer(ranks: int = 1, dp: int = 1, intermediate: int = 256, **changes: object) -> FusedMoEConfig:
    """Returns a layer's description as vLLM passes it to a quantization method; `ranks` split each expert."""
    parallel = dataclasses.replace(NO_PARALLEL, tp_size=ranks, dp_size=dp)
    plain = {
        "num_experts": 16,
        "experts_per_token": 4,
        "hidden_dim": 256,
        "intermediate_size": intermediate,
        "num_local_experts": 16,
        "num_logical_experts": 16,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
    }
    return FusedMoEConfig(**plain | changes)


def experts_of(batched: bool, ue8m0: bool = False, weights: WeightFormat = FP8_BLOCK) -> type[Fp8MoeExperts]:
    """Returns the experts of a plain layer, whose rows arrive `batched` or not."""
    spec = layer_spec(moe_layer(), QuantSpec(weights, ue8m0))
    return experts_class(Arrival.BATCHED if batched else Arrival.STANDARD, spec)


def check(prefix: str, moe: FusedMoEConfig, batched: bool = False, ue8m0: bool = False) -> None:
    check_layer(prefix, moe, layer_spec(moe, QuantSpec(FP8_BLOCK, ue8m0)), experts_of(batched, ue8m0))


def test_a_plain_layer_is_served():
    for batched in (False, True):
        for ue8m0 in (False, True):
            assert experts_of(batched, ue8m0).spec.ue8m0 == ue8m0
            check("model.layers.1.mlp.experts", moe_layer(), batched, ue8m0)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"moe_backend": "triton"}, "--moe-backend triton cannot be combined with --quantization fp8moe"),
        ({"is_lora_enabled": True}, "L: LoRA .* is not supported.*Remove --enable-lora"),
        (
            {"hidden_dim": 320},
            "L: hidden size 320 is not a multiple of 128, the size of a scale block. Serve the model without",
        ),
        ({"moe_parallel_config": OF_32_RANKS}, "L: 32 ranks cannot share 16 experts. Use fewer ranks"),
        ({"num_local_experts": 1025}, "L: a rank has 1025 experts, .* at most 1024. Use more GPUs and --enable-expert"),
    ],
)
def test_other_layers_are_refused(layer, message):
    with pytest.raises(UnsupportedError, match=message):
        check("L", moe_layer(**layer))


@pytest.mark.parametrize(
    ("inputs", "outputs", "split", "message"),
    [
        (192, [256], False, "L has 192 input channels on this rank.*smaller --tensor-parallel-size"),
        (256, [192, 256], False, "L has 192 output channels on this rank"),
        (256, [192], True, "L has 192 output channels on this rank"),
        (256, [260], False, "L has 260 output channels, but the kernels need a multiple of 8"),
    ],
)
def test_dense_layers_that_end_within_a_scale_block_are_refused(inputs, outputs, split, message):
    refusal = dense_refusal(inputs, outputs, split, FP8_BLOCK)
    assert re.match(message, str(unsupported_shape("L", refusal, "--tensor-parallel-size")))


def test_only_the_last_projection_may_end_within_a_scale_block():
    assert dense_refusal(256, [256, 192], False, FP8_BLOCK) is None


def test_registering_twice_is_registering_once():
    fp8moe_plugin.register()
    methods, config = list(quantization.QUANTIZATION_METHODS), quantization.get_quantization_config("fp8moe")
    fp8moe_plugin.register()
    assert methods == quantization.QUANTIZATION_METHODS
    assert methods.count("fp8moe") == 1
    assert quantization.get_quantization_config("fp8moe") is config is Entry


def test_registering_never_raises(monkeypatch, plugin_log):
    monkeypatch.delattr(quantization, "register_quantization_config")
    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", [])
    fp8moe_plugin.register()
    assert "--quantization fp8moe is not available" in plugin_log.text


PASSIVE = """
import sys
import vllm.model_executor.layers.quantization
before = set(sys.modules)
import fp8moe_plugin, torch
fp8moe_plugin.register()
assert not torch.cuda.is_initialized()
print(sorted(name for name in set(sys.modules) - before if not name.startswith("fp8moe_plugin.layers.vllm")))
"""


def test_registering_touches_no_gpu_and_loads_no_kernel():
    done = subprocess.run([sys.executable, "-c", PASSIVE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1]
    assert "fp8moe_plugin.ops" not in loaded
    assert "fp8moe_plugin.jit" not in loaded
    assert "cuda" not in loaded
