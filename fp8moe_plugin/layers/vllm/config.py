"""`Fp8MoeConfig`: which checkpoints and machines are served, and which method each layer gets."""

import functools
import logging
import re
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.platforms import current_platform

from fp8moe_plugin.checkpoint.model import WEIGHT_BLOCK, check_quantization, unquantized_layers
from fp8moe_plugin.checkpoint.shapes import Parallel
from fp8moe_plugin.checkpoint.untrusted import shell_word
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.jit.lookup import WARMUP
from fp8moe_plugin.layers.unquantized import is_quantized
from fp8moe_plugin.layers.vllm import compat, metrics
from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.vllm.loading import ModelState
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.vllm.online import OnlineLinearMethod, OnlineMoeMethod
from fp8moe_plugin.layers.vllm.traits import Traits
from fp8moe_plugin.plan import HOPPER
from fp8moe_plugin.settings import BATCH_INVARIANT, NAME, batch_invariant, settings

logger = logging.getLogger("fp8moe")


class Fp8MoeConfig(Traits, Fp8Config):
    """A checkpoint served by this plugin, block FP8 or made so when it loads (`online`).

    A `Fp8Config` to the places in vLLM that look for one.
    """

    def __init__(self, ignored_layers: list[str] | None, ue8m0: bool, online: bool = False) -> None:
        super().__init__(
            is_checkpoint_fp8_serialized=True,
            activation_scheme="dynamic",
            ignored_layers=ignored_layers,
            weight_block_size=list(WEIGHT_BLOCK),
        )
        self.ue8m0 = ue8m0
        self.online = online
        self.model = ModelState()
        self.watches_worker = False
        metrics.expose()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8MoeConfig":
        """From the `quantization_config` of a checkpoint's config.json.

        Raises:
            UnsupportedError: the checkpoint or this machine cannot be served.
        """
        check_quantization(config)
        check_machine()
        names = unquantized_layers(config)
        return cls(names, ue8m0=config.get("scale_fmt") == "ue8m0")

    @classmethod
    def for_unquantized(cls) -> "Fp8MoeConfig":
        """For a checkpoint without `quantization_config`: its weights are quantized as they arrive.

        Raises:
            UnsupportedError: this machine cannot serve.
        """
        check_machine()
        return cls(None, ue8m0=False, online=True)

    def _watch_worker(self) -> None:
        """Let the model's state know its worker, once: it exists by the time the first layer is made."""
        if not self.watches_worker:
            self.model.in_worker = compat.runs_in_workers(get_current_vllm_config().parallel_config)
            compat.check_steps(self.model.check_serves)
            self.watches_worker = True

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if not isinstance(layer, LinearBase | RoutedExperts):
            return super().get_quant_method(layer, prefix)
        linear = isinstance(layer, LinearBase)
        if self._is_skipped(prefix):
            if self.online and not linear:
                announce_unquantized(re.sub(r"\d+", "N", prefix))
            return UnquantizedLinearMethod() if linear else UnquantizedFusedMoEMethod(layer.moe_config)
        self._watch_worker()
        if linear:
            dense = OnlineLinearMethod if self.online else Fp8MoeLinearMethod
            return dense(self.ue8m0, prefix, warmup_command(), self.model)
        experts = OnlineMoeMethod if self.online else Fp8MoeMethod
        return experts(layer.moe_config, self.ue8m0, prefix, warmup_command(), self.model)

    def _is_skipped(self, prefix: str) -> bool:
        return not is_quantized(prefix) if self.online else compat.is_layer_skipped(self, prefix)


@functools.cache  # one line for all layers of a kind
def announce_unquantized(experts: str) -> None:
    """Say that the experts of that name are not served: a block-FP8 checkpoint would list them, this one cannot."""
    logger.warning(
        "fp8moe leaves the experts %s unquantized, to vLLM's own kernels: it quantizes those of a language model's "
        "layers, model.layers.N. A checkpoint that is block FP8 already is served under any name.",
        experts,
    )


def warmup_command() -> str:
    """What compiles beforehand every kernel that the model being built needs."""
    engine = get_current_vllm_config()
    ranks = engine.parallel_config
    parallel = Parallel(ranks.tensor_parallel_size, ranks.data_parallel_size, ranks.enable_expert_parallel)
    return f"{WARMUP} --model {shell_word(engine.model_config.model)} {parallel}"


def check_machine() -> None:
    """Raise `UnsupportedError` where neither our kernels nor, on a CPU or by request, the reference can serve."""
    backend = settings().backend
    capability = current_platform.get_device_capability()
    hopper = current_platform.is_cuda() and capability is not None and tuple(capability) == HOPPER
    if batch_invariant() and (backend == "reference" or (backend == "auto" and current_platform.is_cpu())):
        raise UnsupportedError(
            f"{BATCH_INVARIANT}=1: the plain-torch reference multiplies as torch does, whose sums depend on the number "
            "of tokens. Unset it, or serve on a Hopper GPU with our kernels."
        )
    if hopper or backend == "reference" or (backend == "auto" and current_platform.is_cpu()):
        return
    found = f"compute capability {capability[0]}.{capability[1]}" if capability else f"a {current_platform.device_name}"
    # The plain-torch reference reads values back to the host, which no CUDA graph can hold.
    eager = "" if current_platform.is_cpu() else " with --enforce-eager"
    raise UnsupportedError(
        f"--quantization {NAME} (FP8MOE_BACKEND={backend}): the kernels need a Hopper GPU (compute capability 9.0), "
        f"this machine has {found}. Use --quantization fp8 here, or set FP8MOE_BACKEND=reference to try the model on "
        f"the slow plain-torch reference{eager}."
    )
