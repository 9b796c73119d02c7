"""The torch ops `torch.ops.fp8moe.*`: one per layer, opaque to torch.compile."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops.checks import check_no_grad, is_aligned_contiguous
from fp8moe_plugin.ops.linear import fp8_linear
from fp8moe_plugin.ops.moe import run_batched_experts, run_fused_moe
from fp8moe_plugin.ops.routed_moe import run_routed_moe
from fp8moe_plugin.ops.router_gemm import router_gemm as _router_gemm
from fp8moe_plugin.plan.options import parse_options
from fp8moe_plugin.settings import settings

LAYER = "Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor? w13_bias, Tensor? w2_bias"
FUSED_MOE = (  # options: `LayerOptions.text`
    f"fused_moe(str options, Tensor hidden_states, Tensor? hidden_scale, {LAYER}, Tensor topk_weights, "
    "Tensor topk_ids, Tensor? expert_map, Tensor(a!) out) -> ()"
)
ROUTED_MOE = (
    f"routed_moe(str options, int topk, bool renormalize, Tensor hidden_states, {LAYER}, Tensor logits, "
    "Tensor? padding, Tensor? shared_gate, Tensor(a!) out) -> ()"
)
BATCHED_EXPERTS = (
    f"batched_experts(str options, int expected_m, Tensor hidden_states, Tensor hidden_scale, {LAYER}, "
    "Tensor expert_num_tokens, Tensor(a!) out) -> ()"
)
ROUTER_GEMM = "router_gemm(Tensor x, Tensor weight) -> Tensor"
LINEAR = "linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, bool ue8m0) -> Tensor"


def _fused_moe_impl(options: str, *tensors: torch.Tensor | None) -> None:
    run_fused_moe(parse_options(options), tensors)


def _routed_moe_impl(options: str, topk: int, renormalize: bool, *tensors: torch.Tensor | None) -> None:
    run_routed_moe(parse_options(options), topk, renormalize, tensors)


def _batched_experts_impl(options: str, expected_m: int, *tensors: torch.Tensor | None) -> None:
    run_batched_experts(parse_options(options), expected_m, tensors)


def _linear_impl(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, ue8m0: bool
) -> torch.Tensor:
    if not is_aligned_contiguous(x):  # engines hand over slices of fused projections
        x = x.clone(memory_format=torch.contiguous_format)
    return fp8_linear(x, weight, weight_scale, bias, ue8m0)


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
    _check_device(x, weight, *rest)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.bfloat16)


def _writes_out(*args: object) -> None:
    """Fake implementation of an op that only writes its last argument."""
    _check_device(*args)


def _check_device(*args: object) -> None:
    """Raise `InvalidInputError` if some tensors are on meta and others are not: torch then calls only the fake."""
    devices = {tensor.device for tensor in args if isinstance(tensor, torch.Tensor)}
    if len(devices) > 1 and any(device.type == "meta" for device in devices):
        raise InvalidInputError(
            f"The tensors are on {', '.join(sorted(map(str, devices)))}. Move all to one device; what is on meta has "
            "no values yet."
        )


def refuses_grad(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Returns the autograd implementation of `op`, which refuses gradients.

    torch.compile also calls it while it traces. In inference mode torch does not call it.
    """
    names = [argument.name for argument in op._schema.arguments]

    def refuse(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            for name, value in zip(names, args, strict=True):
                if isinstance(value, torch.Tensor):
                    check_no_grad(name, value)
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args)

    return refuse


def in_range(op: str, impl: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `impl`; with FP8MOE_NVTX=1 in an NVTX range with the op's name and the sizes of its first two tensors."""
    if not settings().nvtx:
        return impl
    if torch.version.cuda is None:
        log_once(logging.WARNING, "FP8MOE_NVTX=1 is ignored, this torch is built without CUDA and NVTX")
        return impl

    @functools.wraps(impl)
    def ranged(*args: Any) -> Any:
        first, second, *_ = (value for value in args if isinstance(value, torch.Tensor))
        sizes = ", ".join("x".join(map(str, tensor.shape)) for tensor in (first, second))
        with torch.cuda.nvtx.range(f"fp8moe.{op} {sizes}"):
            return impl(*args)

    return ranged


def _register() -> None:
    namespace = torch.ops.fp8moe
    if hasattr(namespace, "library"):  # a second import of this module
        return
    library = torch.library.Library("fp8moe", "FRAGMENT")
    for schema, impl, fake in (
        (FUSED_MOE, _fused_moe_impl, _writes_out),
        (ROUTED_MOE, _routed_moe_impl, _writes_out),
        (BATCHED_EXPERTS, _batched_experts_impl, _writes_out),
        (ROUTER_GEMM, _router_gemm, _linear_fake),
        (LINEAR, _linear_impl, _linear_fake),
    ):
        name = library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        library.impl(name, in_range(name, impl), "CompositeExplicitAutograd")
        library.impl(name, refuses_grad(getattr(namespace, name).default), "Autograd", with_keyset=True)
        library._register_fake(name, fake)
    # The ops live as long as their library, so torch's namespace keeps it, not this module.
    vars(namespace)["library"] = library


_register()

fused_moe: Callable[..., None] = torch.ops.fp8moe.fused_moe.default
routed_moe: Callable[..., None] = torch.ops.fp8moe.routed_moe.default
batched_experts: Callable[..., None] = torch.ops.fp8moe.batched_experts.default
router_gemm: Callable[..., torch.Tensor] = torch.ops.fp8moe.router_gemm.default
linear: Callable[..., torch.Tensor] = torch.ops.fp8moe.linear.default
