"""`Fp8MoeConfig` checks that checkpoint, machine and options are supported, and chooses the method of each layer."""

import functools
import logging
import re
from copy import deepcopy
from typing import Any

import torch
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe import get_deepep_mode, get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils import is_cpu, is_cuda

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.placement import Server
from fp8moe_plugin.checkpoint.unquantized import FUSED
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.compressed import is_compressed
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.spec import GPT_OSS_METHODS, ONLINE, QuantSpec, parse_quantization, recoded
from fp8moe_plugin.jit.lookup import WARMUP
from fp8moe_plugin.layers.all_to_all import UNDER_SGLANG
from fp8moe_plugin.layers.fallback import refused_by_both
from fp8moe_plugin.layers.loading import announce_input_scales
from fp8moe_plugin.layers.machine import check_machine
from fp8moe_plugin.layers.sglang import compat, gpt_oss
from fp8moe_plugin.layers.sglang.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.sglang.loads import Loads, scale_parameter
from fp8moe_plugin.layers.sglang.moe import Fp8MoeMethod
from fp8moe_plugin.layers.sglang.refusals import check_layers, experts_error, place_layer
from fp8moe_plugin.layers.traits import Traits
from fp8moe_plugin.layers.unquantized import announce_unquantized, is_quantized, matches_pattern
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.quoting import shell_word
from fp8moe_plugin.settings import BATCH_INVARIANT, NAME, batch_invariant, settings

PARTS = FUSED | {"fused_qkv_a_proj_with_mqa": FUSED["fused_qkv_a_proj"]}  # of fused layers, by SGLang's names


class Fp8MoeConfig(Traits, Fp8Config):
    """The quantization config of a checkpoint in FP8, or quantized to block FP8 while it is loaded.

    It is an `Fp8Config`, because SGLang checks for that class in several places.
    """

    spec: QuantSpec
    ue8m0: bool
    online: bool
    checkpoint: dict[str, Any]  # its `quantization_config`
    loads: Loads
    of_cache: QuantizationConfig | None = None  # SGLang's own, where the checkpoint has a quantized KV cache

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8MoeConfig":
        """Create the config from the `quantization_config` of a checkpoint's config.json.

        Raises:
            UnsupportedError: the checkpoint, this machine or an option of the command line is not supported.
        """
        spec = cls.check(config)
        announce_input_scales(spec)
        return cls._checked(spec, config)

    @classmethod
    def check(cls, config: dict[str, Any], _: object = None) -> QuantSpec:
        """Returns the quantization of a checkpoint from its `quantization_config`.

        Raises:
            UnsupportedError: the checkpoint or this machine is not supported.
        """
        if config.keys() == {"quant_method", "quant_algo"}:
            raise UnsupportedError(
                "SGLang does not pass on hf_quant_config.json. Copy its content to quantization_config of config.json."
            )
        spec = parse_quantization(config)
        check_platform()
        return spec

    @classmethod
    def for_unquantized(cls) -> "Fp8MoeConfig":
        """Create the config for a checkpoint without `quantization_config`, quantized while it is loaded.

        Raises:
            UnsupportedError: this machine or an option of the command line is not supported.
        """
        check_platform()
        return cls._checked(ONLINE, {})

    @classmethod
    def _checked(cls, spec: QuantSpec, config: dict[str, Any]) -> "Fp8MoeConfig":
        check_options()
        compat.allow_uneven_shares()
        compat.follow_loads()
        parsed = {
            "quant_method": "fp8",
            "activation_scheme": "static" if spec.input_scales else "dynamic",
            "weight_block_size": spec.dense.weight_block,
            "ignored_layers": list(spec.unquantized),
        }
        made: Fp8MoeConfig = super().from_config(config | parsed)
        made.spec, made.ue8m0, made.online, made.checkpoint = spec, spec.ue8m0, spec.online, config
        if is_compressed(config) and config.get("kv_cache_scheme"):
            made.of_cache = CompressedTensorsConfig.from_config(deepcopy(config))
            made.kv_cache_quant_algo = getattr(made.of_cache, "kv_cache_quant_algo", None)  # for the cache's dtype
        made.loads = Loads(None if spec.online else spec.scale, scale_parameter(spec.weights))
        if spec.gpt_oss:
            made.loads.own_scale = gpt_oss.SCALE
            made.get_name = lambda: GPT_OSS_METHODS[0]  # type: ignore[method-assign]  # chooses the loader of the model
        return made

    @property
    def expert_spec(self) -> QuantSpec:
        """The quantization of experts. SGLang says after `from_config` whether the checkpoint has them in MXFP4.

        Raises:
            UnsupportedError: see `recoded`.
        """
        return recoded(self.spec, MXFP4) if self.is_fp4_experts else self.spec

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the method of a layer. SGLang also calls this for layers that it then discards."""
        if self.of_cache and isinstance(layer, RadixAttention):
            return self.of_cache.get_quant_method(layer, prefix)
        if not isinstance(layer, LinearBase | FusedMoE):
            return super().get_quant_method(layer, prefix)
        linear = isinstance(layer, LinearBase)
        by_pattern = matches_pattern(prefix, self.ignored_layers, PARTS | dict(self.packed_modules_mapping))
        if linear and self.spec.gpt_oss:
            return UnquantizedLinearMethod()
        if by_pattern or (self.online and not is_quantized(prefix)):
            if self.online and not linear:
                announce_unquantized(re.sub(r"\d+", "N", prefix), "SGLang")
            return UnquantizedLinearMethod() if linear else None  # SGLang then uses its own method for experts
        if not linear:
            added = get_server_args().ep_num_redundant_experts + layer.num_fused_shared_experts
            check_listed_experts(prefix, self.ignored_layers, layer.num_experts - added)
        if is_layer_skipped(prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping):
            return super().get_quant_method(layer, prefix)
        if linear:
            return Fp8MoeLinearMethod(self, prefix, warmup_command())
        spec = self.expert_spec
        if spec.gpt_oss:
            self._check_memory(spec, layer)
            return gpt_oss.GptOssMethod(self, prefix, warmup_command())
        server, why = place_layer(layer, None if self.online else spec.recoded_from or spec.weights)
        if server is Server.ENGINE:
            return self._engine_experts(layer, prefix, why)
        self._check_memory(spec, layer)
        return Fp8MoeMethod(self, prefix, warmup_command())

    def _check_memory(self, spec: QuantSpec, layer: Any) -> None:
        """Raise `UnsupportedError` if a GPU cannot hold its experts in the form that they get; see `check_layers`."""
        if spec.recoded_from and spec.weights is FP8_BLOCK and is_cuda():
            memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            check_layers(get_server_args(), self.checkpoint.get("hf_config"), layer, memory)

    def engine_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the method that SGLang would use for a quantized layer without `--quantization fp8moe`."""
        if self.online:
            if isinstance(layer, LinearBase):
                return UnquantizedLinearMethod()
            return UnquantizedFusedMoEMethod(layer.use_triton_kernels, layer.use_flashinfer_trtllm_moe)
        if self.spec.dense is FP8_CHANNEL and is_compressed(self.checkpoint):  # SGLang's `fp8` has no scales of rows
            described = self.checkpoint | {"packed_modules_mapping": dict(self.packed_modules_mapping)}
            return CompressedTensorsConfig.from_config(deepcopy(described)).get_quant_method(layer, prefix)
        return super().get_quant_method(layer, prefix)

    def _engine_experts(self, layer: Any, prefix: str, why: str) -> Any:
        """Returns SGLang's own method for experts that the kernels do not support.

        Raises:
            UnsupportedError: SGLang does not support them either, which its method may say only when it creates the
                weights.
        """
        refused = functools.partial(experts_error, prefix, why, layer.num_local_experts)
        with refused_by_both("SGLang", refused):
            method = self.engine_method(layer, prefix)
        create = method.create_weights

        def create_weights(*args: Any, **kwargs: Any) -> None:
            with refused_by_both("SGLang", refused):
                create(*args, **kwargs)
            self.loads.fallback.note(prefix, "experts", why, method)

        method.create_weights = create_weights
        return method


def check_listed_experts(prefix: str, names: list[str], experts: int) -> None:
    """Raise `UnsupportedError` if a checkpoint keeps only a part of a layer's experts unquantized.

    If one expert is listed, SGLang keeps all experts unquantized.

    Args:
        prefix: the full name of the layer of experts.
        names: the checkpoint's list of unquantized layers.
        experts: the number of experts in this layer of the checkpoint.
    """
    own = re.compile(rf"{re.escape(prefix)}\.(\d+)(?:\.(\w+))?", re.ASCII)
    listed: dict[int, set[str | None]] = {}
    for match in filter(None, map(own.fullmatch, names)):
        listed.setdefault(int(match[1]), set()).add(match[2])
    whole = [expert for expert, projections in listed.items() if None in projections or len(projections) == 3]
    if listed and len(whole) < experts:
        raise UnsupportedError(
            f"The checkpoint keeps {len(listed)} of the {experts} experts of {prefix} unquantized, or some of their "
            "projections, but the engine computes all of them in one format. Correct quantization_config in its "
            "config.json so that all of them are unquantized, or none."
        )


def warmup_command() -> str:
    """Returns the command that precompiles every kernel needed by the model that SGLang is building."""
    args = get_server_args()
    dp = args.dp_size if args.enable_dp_attention else 1  # otherwise data parallel replicas are engines of their own
    parallel = Parallel(args.tp_size // dp, dp, args.ep_size, sglang=True)
    return f"{WARMUP} --model {shell_word(args.model_path)} {parallel}"


def check_platform() -> None:
    """Raise `UnsupportedError` if this machine is not supported; see `check_machine`."""
    capability = torch.cuda.get_device_capability() if is_cuda() else None
    device = "cuda" if is_cuda() else "cpu" if is_cpu() else get_server_args().device
    check_machine(device, capability, "--disable-cuda-graph")


def check_options() -> None:
    """Raise `UnsupportedError` for options of the command line that the plugin's layers do not support."""
    args = get_server_args()
    if args.enable_lora or args.lora_paths:
        raise UnsupportedError(
            f"LoRA is not supported by --quantization {NAME}. Remove --enable-lora and --lora-paths, or use "
            "--quantization fp8."
        )
    compat.leave_fp4_runner()
    if not get_moe_runner_backend().is_auto():
        draft = "speculative-" if args.moe_runner_backend == "auto" else ""  # a model that drafts has its own option
        raise UnsupportedError(
            f"--{draft}moe-runner-backend {get_moe_runner_backend().value} cannot be combined with --quantization "
            f"{NAME}, which has a backend of its own. Remove one of the two options."
        )
    if not get_moe_a2a_backend().is_none():
        check_deepep(args)
    if settings().ep == "push":
        log_once(logging.WARNING, UNDER_SGLANG)
    if args.enable_deterministic_inference and not batch_invariant():
        raise UnsupportedError(
            f"--enable-deterministic-inference: the kernels of --quantization {NAME} compute a token without regard to "
            f"the others only with {BATCH_INVARIANT}=1 in the environment. Set it."
        )


def check_deepep(args: Any) -> None:
    """Raise `UnsupportedError` unless the all-to-all is DeepEP, with options that the plugin's experts support."""
    if not get_moe_a2a_backend().is_deepep():
        raise UnsupportedError(
            f"--moe-a2a-backend {args.moe_a2a_backend} is not supported by --quantization {NAME}. Use deepep, remove "
            "the option, or use --quantization fp8."
        )
    if args.enable_single_batch_overlap or args.deepep_dispatcher_output_dtype != "auto":
        raise UnsupportedError(
            f"--enable-single-batch-overlap and --deepep-dispatcher-output-dtype are not supported by --quantization "
            f"{NAME}, which chooses the format of rows itself. Remove them."
        )
    if not deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:
        raise UnsupportedError(
            "--moe-a2a-backend deepep: SGLang's DeepEP layers need sgl-deep-gemm, though the plugin's experts do not. "
            "Install it, and do not set SGLANG_ENABLE_JIT_DEEPGEMM=0."
        )
    if get_deepep_mode().value == "auto" and not compat.rows_differ_by_mode():
        raise UnsupportedError(
            "--moe-a2a-backend deepep: this SGLang sends rows in the same format in both modes of DeepEP. Choose "
            "--deepep-mode normal or low_latency, or use SGLang 0.5.18 or newer."
        )
