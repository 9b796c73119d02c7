"""Refusals of experts when vLLM creates their layer: by the command line, or by what the kernels do not support."""

from typing import Any, NamedTuple

from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

from fp8moe_plugin.checkpoint.placement import Engine, ExpertsPart, Server, place_experts
from fp8moe_plugin.checkpoint.shapes import too_many_experts
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.plan.spec import LayerSpec, layer_refusal


def check_layer(prefix: str, moe: Any, spec: LayerSpec, experts_cls: Any, quantized: bool = True) -> None:
    """Raise `UnsupportedError` for a model or a command line that requires what the kernels do not support.

    Args:
        quantized: see `Engine`.
    """
    check_options(prefix, moe)
    if refusal := refusal_of(moe, spec, quantized):
        raise refusal.error(prefix)
    supported, why = experts_cls.is_supported_config(
        experts_cls, moe, kFp8Static128BlockSym, kFp8Dynamic128Sym, experts_cls.activation_format()
    )
    if not supported:
        raise UnsupportedError(
            f"{prefix}: the plugin's experts do not support this configuration ({why}). Change it, or use "
            "--quantization fp8."
        )


def check_options(prefix: str, moe: Any) -> None:
    """Raise `UnsupportedError` for options of the command line that experts do not support."""
    if moe.moe_backend != "auto":
        raise UnsupportedError(
            f"--moe-backend {moe.moe_backend} cannot be combined with --quantization fp8moe, which has a backend of "
            "its own. Remove one of the two options."
        )
    if moe.is_lora_enabled:
        raise UnsupportedError(
            f"{prefix}: LoRA on a mixture-of-experts model is not supported by --quantization fp8moe. "
            "Remove --enable-lora, or use --quantization fp8."
        )
    if moe.ep_size > moe.num_experts:
        raise UnsupportedError(
            f"{prefix}: {moe.ep_size} ranks cannot share {moe.num_experts} experts. Use fewer ranks, or remove "
            "--enable-expert-parallel."
        )


class Refusal(NamedTuple):
    """Why the kernels do not support the experts of a layer, and what to do about it."""

    why: str
    advice: str
    engine: bool  # whether vLLM may compute them

    def error(self, prefix: str, more: str = "") -> UnsupportedError:
        return UnsupportedError(f"{prefix}: {self.why}{more}. {self.advice}")


def refusal_of(moe: Any, spec: LayerSpec, quantized: bool) -> Refusal | None:
    """Returns why the kernels do not support the shape or the format of a layer, or None if they do.

    Args:
        quantized: see `Engine`.
    """
    number = moe.num_local_experts
    part = ExpertsPart(spec.shape.hidden, moe.intermediate_size, moe.tp_size, number, layer_refusal(spec))
    server, why = place_experts(part, Engine("vLLM", quantized))
    if server is Server.OURS:
        return None
    more = why == too_many_experts(number)
    more_gpus, without = "Use more GPUs and --enable-expert-parallel.", "Serve the model without --quantization fp8moe."
    advice = more_gpus if more else without
    return Refusal(why, advice, server is Server.ENGINE)
