"""Experts that the kernels do not support, when SGLang creates their layer: SGLang's own method computes them, or none.

`create_weights` and `create_moe_runner` of our method refuse what is not left to SGLang.
"""

from typing import Any

from fp8moe_plugin.checkpoint.placement import ExpertsPart, Placement, Server, place_experts, sglang_experts
from fp8moe_plugin.checkpoint.shapes import Experts, local_intermediate, too_many_experts
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.layers.recode import check_memory


def place_layer(layer: Any, stored: WeightFormat | None) -> Placement:
    """Returns who computes the experts of a `FusedMoE` layer; `stored`: see `sglang_experts`."""
    ranks, number = layer.moe_tp_size, layer.num_local_experts
    kind = "a bias" if layer.with_bias else computation_refusal(layer.moe_runner_config)
    width = layer.intermediate_size_per_partition * ranks
    return place_experts(ExpertsPart(layer.hidden_size, width, ranks, number, kind), sglang_experts(stored))


def experts_error(prefix: str, why: str, experts: int, more: str = "") -> UnsupportedError:
    """Returns the error for the experts of a layer; `experts`: on this rank."""
    more_gpus, without = "Use more GPUs and --ep-size.", "Serve the model without --quantization fp8moe."
    advice = more_gpus if why == too_many_experts(experts) else without
    return UnsupportedError(f"{prefix}: {why}{more}. {advice}")


def check_layers(args: Any, hf_config: Any, layer: Any, memory: int) -> None:
    """Check that a GPU can hold its experts, unless SGLang keeps a part of the weights elsewhere; see `check_memory`.

    Args:
        args: SGLang's command line.
        hf_config: the description of the model.
        layer: a `FusedMoE` layer.
    """
    layers = getattr(hf_config, "num_hidden_layers", 0)
    if args.cpu_offload_gb or args.offload_group_size > 0 or not layers:
        return
    sizes, width = (layer.top_k or 1, layer.hidden_size), layer.intermediate_size_per_partition * layer.moe_tp_size
    local = local_intermediate(width, layer.moe_tp_size)
    own = Experts(layers // args.pp_size, layer.num_local_experts, *sizes, local)
    check_memory(Experts(layers, layer.num_experts, *sizes, width), own, memory)


def check_experts(prefix: str, experts: int, hidden: int, intermediate: int, ranks: int) -> None:
    """Raise `UnsupportedError` for experts of a size or number that the kernels do not support on one rank."""
    server, why = place_experts(ExpertsPart(hidden, intermediate, ranks, experts), sglang_experts(None))
    if server is not Server.OURS:
        raise experts_error(prefix, why, experts)


def activation(config: Any) -> Activation:
    """Returns the activation that a `MoeRunnerConfig` describes, as SGLang's Triton kernels read it."""
    if config.activation != SILU.kind:
        return Activation(config.activation)
    if config.gemm1_alpha is not None:
        kind = "swigluoai" if config.gate_up_interleaved else "swigluoai_uninterleave"
        beta = getattr(config, "gemm1_beta", None)  # SGLang 0.5.17 always adds 1
        return Activation(kind, config.gemm1_clamp_limit, config.gemm1_alpha, 1.0 if beta is None else beta)
    if config.gemm1_clamp_limit is not None:
        return Activation("swiglustep", config.gemm1_clamp_limit)
    return Activation(limit=config.swiglu_limit)


def computation_refusal(config: Any) -> str | None:
    """Returns what a `MoeRunnerConfig` requires that no kernel supports, or None: a property of a model's experts."""
    if not config.is_gated:
        return f"an activation without a gate ({config.activation})"
    if refusal := activation(config).refusal:
        return refusal
    if config.apply_router_weight_on_input or config.no_combine:
        return "weights of the router on their inputs, or results that the model adds up itself"
    return None


def check_computation(prefix: str, config: Any) -> None:
    """Raise `UnsupportedError` unless a `MoeRunnerConfig` requires a gated activation and the weighted sum."""
    if refusal := computation_refusal(config):
        raise UnsupportedError(
            f"{prefix}: the model's experts have {refusal}, which the kernels do not support. Serve the model without "
            "--quantization fp8moe."
        )
