"""vLLM's models of published checkpoints, made on a CPU on the meta device: real widths and depth, no weights."""

import importlib.machinery
import json
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fp8moe_plugin.formats.activation import Activation
from tests.engine.generate import LIMITS
from tests.engine.load import join_ranks

IMAGES = "torchvision"  # not installed; vLLM's models that also see import it
QSA = "vllm.models.qwen4_exp.nvidia.qsa"  # needs FlashAttention
LAYER = re.compile(r"^(?:language_model\.)?model\.layers\.\d+\.(.+)")
WARMUP_NAMES = {  # of layers, by vLLM's
    "moe.share_expert.": "mlp.shared_expert.",
    "block_sparse_moe.shared_experts.": "mlp.shared_experts.",
    "feed_forward.shared_expert.": "mlp.shared_expert.",
    "mlp.shared_mlp.": "mlp.shared_experts.",
}


class Images:
    """Finds a module of IMAGES, in which everything is a mock."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        found = name.partition(".")[0] == IMAGES
        return importlib.machinery.ModuleSpec(name, Images, is_package=True) if found else None

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return mock.MagicMock(__spec__=spec, __path__=[], __version__="0")

    @staticmethod
    def exec_module(module: types.ModuleType) -> None: ...


@contextmanager
def on_a_cpu() -> Iterator[ExitStack]:
    """Replaces what vLLM's models need of a GPU, and adds the configs that transformers lacks."""
    from transformers import AutoConfig, PretrainedConfig
    from vllm.model_executor.models import ModelRegistry, registry
    from vllm.models.deepseek_v4.nvidia import mtp
    from vllm.models.deepseek_v4.nvidia.ops import o_proj
    from vllm.platforms.cpu import CpuPlatform
    from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig
    from vllm.v1.attention.backends.mla import flashmla_sparse
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    choose = CpuPlatform.get_attn_backend_cls

    def backend(_: Any, selected_backend: Any, attn_selector_config: Any, **options: Any) -> str:
        if attn_selector_config.use_sparse:
            return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
        return choose(selected_backend, attn_selector_config, **options)

    ling = type("Ling", (PretrainedConfig,), {"model_type": "bailing_hybrid"})
    for config in (ling, MiniMaxM3TextConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    ModelRegistry.register_model("DeepSeekV4MTPModel", mtp.DeepSeekV4MTP)  # there is none for CPUs
    hopper = mock.Mock(get_device_capability=lambda: mock.Mock(major=9))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "meta_path", [*sys.meta_path, Images]))
        for name in ("Event", "Stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.Mock))
        stack.enter_context(mock.patch.object(o_proj, "current_platform", hopper))
        # Without AMX tiles vLLM refuses some models, and dense layers in block FP8.
        stack.enter_context(mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=True))
        # Otherwise vLLM inspects each class in a new process.
        stack.enter_context(mock.patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()))
        stack.enter_context(mock.patch.object(CpuPlatform, "get_attn_backend_cls", classmethod(backend)))
        stack.enter_context(mock.patch.object(flashmla_sparse, "current_workspace_manager", mock.Mock()))
        stack.enter_context(mock.patch.dict(os.environ, {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}))
        yield stack
    for name in [name for name in sys.modules if name.partition(".")[0] == IMAGES]:
        del sys.modules[name]


def build(folder: Path, draft: bool = False) -> torch.nn.Module:
    """Returns the model of a folder with a config.json under `--quantization fp8moe`, as vLLM makes it on one rank.

    Args:
        draft: take the layers for multi-token prediction instead.

    Raises:
        ValidationError: its config is refused, for the reason in the text.
        UnsupportedError: one of its layers is refused.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    own = {"quantization": "fp8moe", "dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True}
    if architecture.startswith("Qwen4Exp"):
        own["engram_config"] = {"cpu_offload": False}  # into pinned memory
    if draft:
        own["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    with on_a_cpu() as stack:
        engine = EngineArgs(model=str(folder), **own, **LIMITS).create_engine_config()
        model = engine.speculative_config.draft_model_config if draft else engine.model_config
        if QSA in sys.modules:
            stack.enter_context(mock.patch.object(sys.modules[QSA], "is_flash_attn_varlen_func_available"))
        try:
            with set_current_vllm_config(engine):
                join_ranks(folder)
                with torch.device("meta"):
                    return initialize_model(vllm_config=engine, model_config=model)
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def activations_of(model: torch.nn.Module) -> Counter[Activation]:
    """Returns the number of layers of experts by activation."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    experts = (module for module in model.modules() if isinstance(module, RoutedExperts))
    return Counter(layer.quant_method.spec.activation for layer in experts)


def layers_of(model: torch.nn.Module) -> Counter[Any]:
    """Returns the number of layers of experts with our method, and of dense ones by name and input channels."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
    from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod

    found: Counter[Any] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            found["experts"] += isinstance(module.quant_method, Fp8MoeMethod)
        if isinstance(module, LinearBase) and (layer := LAYER.match(name)):
            kind = layer[1]
            for theirs, ours in WARMUP_NAMES.items():
                kind = kind.replace(theirs, ours)
            found[kind, module.input_size] += isinstance(module.quant_method, Fp8MoeLinearMethod)
    return +found
