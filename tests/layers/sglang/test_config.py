"""What SGLang finds under the name `fp8moe`, which checkpoints it takes, and which options it refuses."""

import copy
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.layers import quantization
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe_layer
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend, MoeRunnerBackend
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor import model_runner
from sglang.srt.runtime_context import get_flags
from sglang.srt.server_args import QUANTIZATION_CHOICES

import fp8moe_plugin
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.layers.all_to_all import UNDER_SGLANG
from fp8moe_plugin.layers.sglang import compat
from fp8moe_plugin.layers.sglang import config as seam
from fp8moe_plugin.layers.sglang.config import Fp8MoeConfig
from fp8moe_plugin.layers.sglang.entry import Entry
from fp8moe_plugin.layers.sglang.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.sglang.refusals import check_computation, check_experts
from tests.compressed import QUANTIZATION
from tests.helpers import environment
from warmup.options import parse

pytestmark = pytest.mark.seam

CHECKPOINT = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
DEEPEP = {"moe_a2a_backend": "deepep"}


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line; tests change it."""
    args = SimpleNamespace(
        model_path="a model",
        device="cpu",
        tp_size=1,
        dp_size=1,
        ep_size=1,
        enable_dp_attention=False,
        enable_lora=None,
        lora_paths=None,
        moe_runner_backend="auto",
        moe_a2a_backend="none",
        enable_deterministic_inference=False,
        enable_single_batch_overlap=False,
        deepep_dispatcher_output_dtype="auto",
        deepep_mode="normal",
    )
    monkeypatch.setattr(seam, "get_server_args", lambda: args)
    monkeypatch.setattr(seam, "get_moe_runner_backend", lambda: MoeRunnerBackend(args.moe_runner_backend))
    monkeypatch.setattr(seam, "get_moe_a2a_backend", lambda: MoeA2ABackend(args.moe_a2a_backend))
    monkeypatch.setattr(seam, "get_deepep_mode", lambda: DeepEPMode(args.deepep_mode))
    monkeypatch.setattr(seam.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
    return args


@pytest.mark.parametrize("user_quant", [None, "fp8", "awq"])
def test_no_checkpoint_is_taken_over_unless_the_user_asked(user_quant):
    assert Entry.override_quantization_method(CHECKPOINT, user_quant) is None


def test_any_checkpoint_is_taken_over_if_the_user_asked():
    for checkpoint in (CHECKPOINT, {"quant_method": "awq"}, {}):
        assert Entry.override_quantization_method(checkpoint, "fp8moe") == "fp8moe"


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_the_config_is_what_the_checkpoint_says(options, key):
    names = ["lm_head", "model.layers.0.mlp.gate"]
    config = Entry.from_config(CHECKPOINT | {key: names, "scale_fmt": "ue8m0"})
    assert type(config) is Fp8MoeConfig
    assert isinstance(config, Fp8Config)
    assert config.get_name() == "fp8moe"
    assert config.weight_block_size == [128, 128]
    assert set(names) <= set(config.ignored_layers)
    assert config.ue8m0
    assert not Entry.from_config(CHECKPOINT).ue8m0


def test_the_case_of_the_method_does_not_matter(options):
    assert Entry.from_config(CHECKPOINT | {"quant_method": "FP8"}).is_checkpoint_fp8_serialized


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq', but only 'fp8' is supported"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size is \[64, 128\].*128x128 block"),
        ({"ignored_layers": "lm_head"}, "ignored_layers is 'lm_head', but must be a list"),
    ],
)
def test_other_checkpoints_are_refused(options, change, message):
    with pytest.raises(UnsupportedError, match=message):
        Entry.from_config(CHECKPOINT | change)


def test_only_experts_of_gpt_oss_are_quantized(options):
    """By the name, SGLang's model chooses the loader of its tensors."""
    config = Entry.from_config({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    assert config.get_name() == "mxfp4"
    method = config.get_quant_method(ReplicatedLinear(128, 128), "model.layers.0.self_attn.qkv_proj")
    assert type(method) is UnquantizedLinearMethod


@pytest.mark.parametrize("scheme", [CACHE, CACHE | {"num_bits": 4}, CACHE | {"strategy": "attn_head"}])
def test_the_scheme_of_the_cache_is_left_to_the_engine(options, scheme):
    checkpoint = QUANTIZATION | {"kv_cache_scheme": scheme, "sparsity_config": {}}
    ours, own = Entry.from_config(checkpoint), CompressedTensorsConfig.from_config(copy.deepcopy(checkpoint))
    attention = RadixAttention(4, 128, 1.0, 2, 0)
    methods = [config.get_quant_method(attention, "model.layers.0.self_attn.attn") for config in (ours, own)]
    assert type(methods[0]) is type(methods[1])
    algorithms = [getattr(config, "kv_cache_quant_algo", None) for config in (ours, own)]
    assert algorithms[0] == algorithms[1]


def test_a_checkpoint_of_compressed_tensors_is_the_same_with_other_names(options):
    config = Entry.from_config(QUANTIZATION)
    assert type(config) is Fp8MoeConfig
    assert config.weight_block_size == [128, 128]
    names = [made.loads.scale for made in (config, Entry.from_config(CHECKPOINT), Entry())]
    assert names == ["weight_scale", "weight_scale_inv", None]
    with pytest.raises(
        UnsupportedError, match=r"of compressed-tensors, only FP8 .* 'format' of .* is 'pack-quantized'"
    ):
        Entry.from_config(QUANTIZATION | {"format": "pack-quantized"})


@pytest.mark.parametrize(
    ("pattern", "layer", "unquantized"),
    [
        (r"re:.*mlp\.gate$", "model.layers.3.mlp.gate", True),
        (r"re:.*mlp\.gate$", "model.layers.3.mlp.gate_up_proj", False),
        ("re:.*self_attn.*", "model.layers.3.self_attn.fused_qkv_a_proj_with_mqa", True),
        ("re:.*self_attn.*", "model.layers.3.self_attn.qkv_proj", True),
        ("re:.*self_attn.*", "model.layers.3.mlp.down_proj", False),
    ],
)
def test_layers_that_a_pattern_ignores_are_unquantized(options, pattern, layer, unquantized):
    config = Entry.from_config(QUANTIZATION | {"ignore": [pattern]})
    method = config.get_quant_method(ReplicatedLinear(128, 128), layer)
    assert type(method) is (UnquantizedLinearMethod if unquantized else Fp8MoeLinearMethod)


@pytest.mark.parametrize("layer", ["qkv_proj", "fused_qkv_a_proj_with_mqa"])
def test_a_layer_of_which_a_pattern_ignores_a_part_is_refused(options, layer):
    config = Entry.from_config(QUANTIZATION | {"ignore": ["re:.*q_proj$", "re:.*q_a_proj$"]})
    with pytest.raises(UnsupportedError, match=f"keeps only a part of model.layers.0.self_attn.{layer} unquantized"):
        config.get_quant_method(ReplicatedLinear(128, 128), f"model.layers.0.self_attn.{layer}")


LISTED = {
    "all": [f"experts.{i}.{part}_proj" for i in range(3) for part in ("gate", "up", "down")],
    "whole": [f"experts.{i}" for i in range(3)],
    "layer": ["experts"],
    "others": ["shared_experts.down_proj", "gate"],
    "one": [f"experts.1.{part}_proj" for part in ("gate", "up", "down")],
    "two": ["experts.0", "experts.2"],
    "down": [f"experts.{i}.down_proj" for i in range(3)],
}


@pytest.mark.parametrize("listed", LISTED)
def test_experts_are_unquantized_all_together_or_refused(options, monkeypatch, listed):
    """SGLang takes one listed expert for all."""
    layer = fused_moe_layer.FusedMoE.__new__(fused_moe_layer.FusedMoE)
    # One has a copy, and a shared expert is one more of them.
    vars(layer).update(num_experts=5, num_fused_shared_experts=1, use_triton_kernels=False)
    vars(layer).update(hidden_size=256, intermediate_size_per_partition=256, moe_tp_size=1, num_local_experts=5)
    vars(layer).update(with_bias=False, moe_runner_config=MoeRunnerConfig())
    options.ep_num_redundant_experts = 1
    layer.use_flashinfer_trtllm_moe = layer.use_deep_gemm = False
    monkeypatch.setattr(Fp8Config, "get_quant_method", lambda config, layer, prefix: "unquantized")
    names = [f"model.layers.1.mlp.{name}" for name in LISTED[listed]]
    config = Entry.from_config(CHECKPOINT | {"modules_to_not_convert": [*names, "model.layers.11.mlp.experts.1"]})
    if listed in ("one", "two", "down"):
        with pytest.raises(UnsupportedError, match=r"of the 3 experts of model.layers.1.mlp.experts unquantized"):
            config.get_quant_method(layer, "model.layers.1.mlp.experts")
    else:
        method = config.get_quant_method(layer, "model.layers.1.mlp.experts")
        assert (method == "unquantized") is (listed != "others")


def test_a_checkpoint_without_quantization_config_is_quantized_as_it_loads(options):
    config = Entry()
    assert type(config) is Fp8MoeConfig
    assert config.online
    assert config.weight_block_size == [128, 128]
    assert not config.ue8m0
    assert not Entry.from_config(CHECKPOINT).online
    assert not Entry.from_config(CHECKPOINT | {"scale_fmt": "ue8m0"}).online


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_lora": True}, "LoRA is not supported .*Remove --enable-lora"),
        ({"lora_paths": ["adapter"]}, "LoRA is not supported .*Remove --enable-lora"),
        ({"moe_runner_backend": "triton"}, "--moe-runner-backend triton cannot be combined .*Remove one"),
        ({"moe_runner_backend": "deep_gemm"}, "--moe-runner-backend deep_gemm cannot be combined"),
        ({"moe_a2a_backend": "deepep_v2"}, "--moe-a2a-backend deepep_v2 is not supported .*Use deepep, remove"),
        ({"moe_a2a_backend": "megamoe"}, "--moe-a2a-backend megamoe is not supported"),
        (DEEPEP | {"enable_single_batch_overlap": True}, "--enable-single-batch-overlap and .* Remove them"),
        (DEEPEP | {"deepep_dispatcher_output_dtype": "fp8"}, "which chooses the format of rows itself. Remove them"),
        ({"enable_deterministic_inference": True}, "VLLM_BATCH_INVARIANT=1 in the environment. Set it"),
    ],
)
def test_options_are_refused(options, changes, message):
    if changes.get("moe_a2a_backend", "none") not in {backend.value for backend in MoeA2ABackend}:
        pytest.skip("this SGLang has no such option")
    vars(options).update(changes)
    for make in (lambda: Entry.from_config(CHECKPOINT), Entry):
        with pytest.raises(UnsupportedError, match=message):
            make()


def test_sglangs_own_choice_of_a_runner_for_fp4_experts_is_undone(options, monkeypatch, plugin_log):
    moe = get_flags().moe
    monkeypatch.setattr(moe, "runner_backend", MoeRunnerBackend.FLASHINFER_MXFP4)
    monkeypatch.setattr(seam, "get_moe_runner_backend", lambda: moe.runner_backend)
    plugin_log.set_level("INFO", logger="fp8moe")
    Entry.from_config(CHECKPOINT)
    assert moe.runner_backend is MoeRunnerBackend.AUTO
    assert "in place of SGLang's runner flashinfer_mxfp4" in plugin_log.text


def test_windows_have_no_effect_and_the_log_says_why(options, plugin_log):
    with environment("FP8MOE_EP", "push"):
        Entry.from_config(CHECKPOINT)
    assert [line for line in plugin_log.messages if "FP8MOE_EP" in line] == [f"fp8moe: {UNDER_SGLANG}"]


@pytest.mark.parametrize(("form", "weights"), [("fp8", FP8_BLOCK), ("mxfp4", PACKED_MXFP4)])
def test_a_variable_keeps_experts_in_mxfp4(options, form, weights):
    config = Entry.from_config(CHECKPOINT)
    config.is_fp4_experts = True
    with environment("FP8MOE_FP4_EXPERTS", form):
        assert (config.expert_spec.weights, config.expert_spec.recoded_from) == (weights, MXFP4)


@pytest.mark.parametrize("fp4", [False, True])
def test_sglang_says_whether_experts_are_fp4_after_the_config_is_made(options, fp4):
    config = Entry.from_config(CHECKPOINT)
    config.is_fp4_experts = fp4
    assert config.expert_spec.recoded_from is (MXFP4 if fp4 else None)
    assert config.spec.recoded_from is None


def test_the_backend_of_a_drafting_model_is_refused_by_its_own_option(options, monkeypatch):
    monkeypatch.setattr(seam, "get_moe_runner_backend", lambda: MoeRunnerBackend("triton"))
    with pytest.raises(UnsupportedError, match="--speculative-moe-runner-backend triton cannot be combined"):
        Entry.from_config(CHECKPOINT)


@pytest.mark.parametrize("mode", ["normal", "low_latency", "auto"])
def test_deepep_is_served_if_it_can_send_the_rows_of_each_mode(options, monkeypatch, mode):
    vars(options).update(DEEPEP, deepep_mode=mode)
    for differ in (True, False):
        monkeypatch.setattr(compat, "rows_differ_by_mode", lambda differ=differ: differ)
        if differ or mode != "auto":
            Entry.from_config(CHECKPOINT)
        else:
            with pytest.raises(UnsupportedError, match=r"Choose --deepep-mode normal or low_latency, or use"):
                Entry.from_config(CHECKPOINT)
    monkeypatch.setattr(seam.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", False)
    with pytest.raises(UnsupportedError, match=r"need sgl-deep-gemm.* Install it"):
        Entry.from_config(CHECKPOINT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_gated": False}, r"L: the model's experts have an activation without a gate \(silu\)"),
        ({"apply_router_weight_on_input": True}, "L: the model's experts have weights of the router on their inputs"),
        ({"no_combine": True}, "L: .*results that the model adds up itself"),
    ],
)
def test_experts_that_compute_something_else_are_refused(changes, message):
    check_computation("L", MoeRunnerConfig())
    config = MoeRunnerConfig()
    for name, value in changes.items():
        if not hasattr(config, name):
            pytest.skip(f"this SGLang has no {name}")
        setattr(config, name, value)
    with pytest.raises(UnsupportedError, match=message):
        check_computation("L", config)


def test_experts_of_other_sizes_are_refused():
    check_experts("L", 16, 256, 384, 2)
    with pytest.raises(UnsupportedError, match="L: hidden size 320 is not a multiple of 128"):
        check_experts("L", 16, 320, 256, 1)
    with pytest.raises(UnsupportedError, match=r"L: a rank has 1025 experts, .*Use more GPUs and --ep-size"):
        check_experts("L", 1025, 256, 256, 1)


@pytest.mark.parametrize(
    ("changes", "tp", "dp", "ep"),
    [
        ({"tp_size": 8}, 8, 1, 1),
        ({"tp_size": 8, "ep_size": 8}, 8, 1, 8),
        ({"tp_size": 8, "ep_size": 2}, 8, 1, 2),
        ({"tp_size": 8, "ep_size": 8, "dp_size": 4, "enable_dp_attention": True}, 2, 4, 8),
        ({"tp_size": 2, "dp_size": 4}, 2, 1, 1),  # four engines
    ],
)
def test_the_command_that_spares_compiling_names_the_model_and_the_split(options, changes, tp, dp, ep):
    vars(options).update(changes)
    words = shlex.split(seam.warmup_command())
    assert words[0] == "fp8moe-warmup"
    asked = parse(words[1:])
    assert asked.model == "a model"
    assert asked.parallel == Parallel(tp, dp, ep, sglang=True)


@pytest.fixture
def sglangs_check(monkeypatch):
    """SGLang's own check of shares, as a process has it before a model is served."""
    check = model_runner.check_quantized_moe_compatibility
    monkeypatch.setattr(model_runner, "check_quantized_moe_compatibility", getattr(check, "__wrapped__", check))


def test_shares_of_partial_blocks_are_allowed_for_our_method_alone(options, sglangs_check):
    """SGLang refuses 384 channels over two ranks in blocks of 128."""
    text = SimpleNamespace(moe_intermediate_size=384)

    def check(quantization):
        config = SimpleNamespace(quantization_config=CHECKPOINT)
        model = SimpleNamespace(quantization=quantization, hf_config=config, hf_text_config=text)
        sizes = {"tp_size": 2, "moe_ep_size": 1, "moe_dp_size": 1}
        model_runner.check_quantized_moe_compatibility(model_config=model, **sizes)

    with pytest.raises(ValueError, match="moe_intermediate_size=384"):
        check("fp8moe")
    for _ in range(2):
        Entry.from_config(CHECKPOINT)
    check("fp8moe")
    with pytest.raises(ValueError, match="moe_intermediate_size=384"):
        check("fp8")


def test_registering_twice_is_registering_once():
    for _ in range(2):
        fp8moe_plugin.register_sglang()
    assert QUANTIZATION_CHOICES.count("fp8moe") == 1
    assert quantization.get_quantization_config("fp8moe") is Entry
    assert quantization.CPU_QUANTIZATION_METHODS["fp8moe"] is Entry


@pytest.mark.parametrize(("user", "first"), [("fp8moe", "fp8moe"), (None, "modelopt_fp8")])
def test_modelopt_does_not_take_what_the_user_chose(user, first):
    fp8moe_plugin.register_sglang()
    given = {"quant_method": "modelopt_fp8", "quant_algo": "FP8"}, user
    found = (method.override_quantization_method(*given) for method in quantization.QUANTIZATION_METHODS.values())
    assert next(filter(None, found)) == first


def test_registering_never_raises(monkeypatch, plugin_log):
    monkeypatch.delattr(quantization, "QUANTIZATION_METHODS")
    fp8moe_plugin.register_sglang()
    assert "--quantization fp8moe is not available, because registering it with SGLang failed" in plugin_log.text


PASSIVE = """
import sys
import sglang.srt.managers.detokenizer_manager  # of the processes that SGLang starts, the one that imports least
before = set(sys.modules)
import fp8moe_plugin, torch
fp8moe_plugin.register_sglang()
assert not torch.cuda.is_initialized()
print(sorted(set(sys.modules) - before))
"""


def test_registering_loads_neither_kernels_nor_more_of_sglang_nor_vllm():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", PASSIVE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1]
    assert "fp8moe_plugin.layers.sglang.entry" in loaded
    for package in ("fp8moe_plugin.ops", "fp8moe_plugin.jit", "layers.vllm", "'sglang", "'vllm", "cuda", "prometheus"):
        assert package not in loaded
