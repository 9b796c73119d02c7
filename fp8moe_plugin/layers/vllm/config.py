"""`Fp8MoeConfig` checks that checkpoint and machine are supported, and chooses the method of each layer."""

import functools
import logging
import re
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.platforms import current_platform

from fp8moe_plugin.checkpoint import deepseek_v4, gpt_oss
from fp8moe_plugin.checkpoint.config_json import language_model
from fp8moe_plugin.checkpoint.expert_format import FIELD, expert_format, may_be_fp4
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.placement import fallback_allowed
from fp8moe_plugin.checkpoint.refusals import check_experts
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.formats.spec import ONLINE, QuantSpec, parse_quantization, recoded
from fp8moe_plugin.jit.lookup import WARMUP
from fp8moe_plugin.layers import metrics
from fp8moe_plugin.layers.fallback import refused_by_both
from fp8moe_plugin.layers.loading import announce_input_scales
from fp8moe_plugin.layers.machine import check_machine
from fp8moe_plugin.layers.traits import Traits
from fp8moe_plugin.layers.unquantized import (
    announce_incomplete_names,
    announce_unquantized,
    is_quantized,
    matches_pattern,
)
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.deepseek_v4 import dtype_of_experts
from fp8moe_plugin.layers.vllm.experts import layer_spec
from fp8moe_plugin.layers.vllm.fallback import engine_config
from fp8moe_plugin.layers.vllm.gpt_oss import gpt_oss_method
from fp8moe_plugin.layers.vllm.indexer import serve_indexer
from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.vllm.model_state import ModelState
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.vllm.online import OnlineLinearMethod, OnlineMoeMethod
from fp8moe_plugin.layers.vllm.pack import PackedMoeMethod
from fp8moe_plugin.layers.vllm.recode import EXPERT_SCALE, RecodedMoeMethod
from fp8moe_plugin.layers.vllm.refusals import Refusal, check_options, refusal_of
from fp8moe_plugin.layers.vllm.shared_expert import DenseLayers
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops.devices import set_num_sms
from fp8moe_plugin.quoting import shell_word
from fp8moe_plugin.settings import settings


class Fp8MoeConfig(Traits, Fp8Config):
    """The quantization config of a checkpoint in FP8, or quantized to block FP8 while it is loaded.

    It is an `Fp8Config`, because vLLM checks for that class in several places.
    """

    def __init__(self, spec: QuantSpec, checkpoint: dict[str, Any] | None = None) -> None:
        """Create the config.

        Args:
            checkpoint: its `quantization_config`; None if it is unquantized.
        """
        super().__init__(
            is_checkpoint_fp8_serialized=True,
            activation_scheme="static" if spec.input_scales else "dynamic",
            ignored_layers=list(spec.unquantized),  # vLLM later maps the names to its own
            weight_block_size=spec.dense.weight_block,
        )
        self.spec, self.ue8m0, self.online = spec, spec.ue8m0, spec.online
        self.checkpoint = checkpoint or {}
        self.kv_cache_scheme = self.checkpoint.get("kv_cache_scheme") or None  # read by vLLM's attention
        self.mappers: list[Any] = []  # that vLLM has applied, see `apply_vllm_mapper`
        self.model = ModelState(scale_names(spec))
        self.dense_layers = DenseLayers()
        self.watches_worker = False
        self.served_indexer = False
        metrics.expose()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8MoeConfig":
        """Create the config from the `quantization_config` of a checkpoint's config.json.

        Raises:
            UnsupportedError: the checkpoint or this machine is not supported.
        """
        spec = cls.check(config)
        announce_incomplete_names(spec.unquantized)
        announce_input_scales(spec)
        return cls(spec, config)

    @classmethod
    def check(cls, config: dict[str, Any], hf_config: Any = None) -> QuantSpec:
        """Returns the quantization of a checkpoint from its `quantization_config`.

        Raises:
            UnsupportedError: the checkpoint or this machine is not supported.
        """
        spec = parse_quantization(config)
        check_platform()
        if hf_config is not None:
            fields = language_model(hf_config.to_dict())
            if fields is None:
                raise UnsupportedError("It describes no model with experts, for which kernels can be precompiled.")
            deepseek_v4.check_format(fields, spec)
            gpt_oss.check_format(fields, spec)
            check_experts(fields, spec.unquantized, gpt_oss=spec.gpt_oss)
        return spec

    @classmethod
    def for_unquantized(cls) -> "Fp8MoeConfig":
        """Create the config for a checkpoint without `quantization_config`, quantized while it is loaded.

        Raises:
            UnsupportedError: this machine is not supported.
        """
        check_platform()
        return cls(ONLINE)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None, *_: Any, **__: Any
    ) -> None:
        """vLLM calls this with the model's config, before it makes a layer.

        Raises:
            UnsupportedError: the kernels do not compute the model's experts.
            CheckpointError: the header of its weights is damaged.
        """
        fields = language_model(hf_config.to_dict()) if hf_config is not None else None
        if not fields:
            return
        deepseek_v4.check_format(fields, self.spec)
        gpt_oss.check_format(fields, self.spec)
        check_experts(fields, self.ignored_layers, self.online, self.spec.gpt_oss)
        if self.spec.gpt_oss:
            announce_form(self.spec)
        if self.online or not may_be_fp4(fields):
            return
        found = expert_format(fields, dtype_of_experts(model_name, revision, fields))
        setattr(hf_config, FIELD, "fp4" if found is MXFP4 else "fp8")  # by which vLLM's model names the scales
        if found is MXFP4:
            self.spec = recoded(self.spec, MXFP4)
            self.model.scales = scale_names(self.spec)
            announce_form(self.spec)

    def _watch_worker(self) -> None:
        """Watch the modules that hold a layer. Once per model, also hook the worker's steps and multiprocessor limit.

        The worker exists before the first layer is created.
        """
        compat.watch_loads(self.model.watch)
        if not self.watches_worker:
            engine = self.model.engine = get_current_vllm_config()
            self.model.in_worker = compat.runs_in_workers(engine.parallel_config)
            self.model.only_rank = compat.is_only_rank(engine.parallel_config)
            compat.check_steps(self.model.prepare_step, compat.computes_without_tokens(engine.parallel_config))
            if current_platform.is_cuda():
                compat.share_num_sms(set_num_sms)
            self.watches_worker = True

    def _serve_indexer(self) -> None:
        """Serve the indexer of the model, once: vLLM gets the method of a layer before it creates the first indexer.

        On a CPU, vLLM has kernels of its own.
        """
        if not self.served_indexer and current_platform.is_cuda():
            model = get_current_vllm_config().model_config
            serve_indexer(model.hf_text_config, torch.device("cuda", torch.cuda.current_device()), warmup_command())
        self.served_indexer = True

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        self._serve_indexer()
        if not isinstance(layer, LinearBase | RoutedExperts):
            method = super().get_quant_method(layer, prefix)
            quantized = self.kv_cache_scheme and isinstance(method, BaseKVCacheMethod)
            return self._own_config().get_quant_method(layer, prefix) if quantized else method
        linear = isinstance(layer, LinearBase)
        if self._is_skipped(prefix) or (linear and self.spec.gpt_oss):
            if self.online and not linear:
                announce_unquantized(re.sub(r"\d+", "N", prefix), "vLLM")
            return UnquantizedLinearMethod() if linear else UnquantizedFusedMoEMethod(layer.moe_config)
        self._watch_worker()
        if linear:
            self.dense_layers.note(prefix, layer)
            dense = OnlineLinearMethod if self.online else Fp8MoeLinearMethod
            return dense(self.spec, prefix, warmup_command(), self.model, self.engine_method)
        try:
            return self._experts_method(layer, prefix)
        except UnsupportedError as error:
            if not (settings().take_fp8 and fallback_allowed()) or self.spec.gpt_oss:
                raise
            method = self.engine_method(layer, prefix)  # the user did not ask for ours
            self.model.leave_layer(prefix, "experts", str(error), method)
            return method

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """vLLM calls this to replace the checkpoint's names of layers by those of its model."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self.mappers.append(hf_to_vllm_mapper)

    def engine_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the method that vLLM would use for a quantized layer without `--quantization fp8moe`."""
        if self.online:
            linear = isinstance(layer, LinearBase)
            return UnquantizedLinearMethod() if linear else UnquantizedFusedMoEMethod(layer.moe_config)
        if self.checkpoint["quant_method"].lower() == Fp8Config.get_name():
            return super().get_quant_method(layer, prefix)  # vLLM's models set attributes of this config
        return self._own_config().get_quant_method(layer, prefix)

    def _own_config(self) -> Any:
        """Returns vLLM's own config of the checkpoint."""
        return engine_config(self.checkpoint, self.mappers, self.packed_modules_mapping)

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> Any:
        shared = self.dense_layers.take(prefix)
        refusal = refusal_of(layer.moe_config, layer_spec(layer.moe_config, self.spec), self.spec.stores_blocks)
        if refusal and refusal.engine and not self.spec.gpt_oss:  # whose tensors vLLM's loader finds by its own config
            return self._engine_experts(layer, prefix, refusal)
        return moe_method(self.spec)(layer.moe_config, self.spec, prefix, warmup_command(), self.model, shared)

    def _engine_experts(self, layer: RoutedExperts, prefix: str, refusal: Refusal) -> Any:
        """Returns vLLM's own method for experts that the kernels do not support.

        Raises:
            UnsupportedError: vLLM does not support them either, which its method may say only when it creates the
                weights, or the command line has options for our experts.
        """
        check_options(prefix, layer.moe_config)
        with refused_by_both("vLLM", functools.partial(refusal.error, prefix)):
            method = self.engine_method(layer, prefix)
        create = method.create_weights

        def create_weights(*args: Any, **kwargs: Any) -> None:
            with refused_by_both("vLLM", functools.partial(refusal.error, prefix)):
                create(*args, **kwargs)
            self.model.leave_layer(prefix, "experts", refusal.why, method)

        method.create_weights = create_weights  # which may refuse the layer, too
        return method

    def _is_skipped(self, prefix: str) -> bool:
        if self.online:
            return not is_quantized(prefix)
        by_name = compat.is_layer_skipped(self, prefix)
        return by_name or matches_pattern(prefix, self.ignored_layers, self.packed_modules_mapping)


def scale_names(spec: QuantSpec) -> tuple[str, ...]:
    """Returns the suffixes of scales' names in vLLM's model."""
    if spec.online:
        return ()
    return (spec.scale, EXPERT_SCALE) if spec.recoded_from else (spec.scale,)


def moe_method(spec: QuantSpec) -> type[Fp8MoeMethod]:
    """Returns the method of experts, by how they are loaded."""
    if spec.online:
        return OnlineMoeMethod
    if spec.gpt_oss:
        return gpt_oss_method(spec)
    if spec.weights is PACKED_MXFP4:
        return PackedMoeMethod
    return RecodedMoeMethod if spec.recoded_from else Fp8MoeMethod


def announce_form(spec: QuantSpec) -> None:
    """Log the form of experts whose checkpoint has them in MXFP4."""
    done = "re-encoded to" if spec.weights is FP8_BLOCK else "kept as"
    form = f"{done} {spec.weights.name} (FP8MOE_FP4_EXPERTS={settings().fp4_experts})"
    log_once(logging.INFO, f"experts in MXFP4 are {form}")


def warmup_command() -> str:
    """Returns the command that precompiles every kernel needed by the model that vLLM is building."""
    engine = get_current_vllm_config()
    ranks = engine.parallel_config
    tp, dp = ranks.tensor_parallel_size, ranks.data_parallel_size
    parallel = Parallel(tp, dp, tp * dp if ranks.enable_expert_parallel else 1)
    return f"{WARMUP} --model {shell_word(engine.model_config.model)} {parallel}"


def check_platform() -> None:
    """Raise `UnsupportedError` if this machine is not supported; see `check_machine`."""
    platform = current_platform
    device = "cuda" if platform.is_cuda() else "cpu" if platform.is_cpu() else platform.device_name
    check_machine(device, platform.get_device_capability(), "--enforce-eager")
