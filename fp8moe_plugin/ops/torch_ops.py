"""The ops as torch sees them, `torch.ops.fp8moe.*`: one a layer, opaque to torch.compile."""

import torch

from fp8moe_plugin.ops.fused_moe import batched_experts as _batched_experts
from fp8moe_plugin.ops.fused_moe import fused_moe as _fused_moe
from fp8moe_plugin.ops.linear import fp8_linear

FUSED_MOE = (
    "fused_moe(Tensor hidden_states, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor topk_weights, "
    "Tensor topk_ids, Tensor? expert_map, bool ue8m0, Tensor(a!) out) -> ()"
)
BATCHED_EXPERTS = (
    "batched_experts(Tensor hidden_states, Tensor hidden_scale, Tensor w13, Tensor w13_scale, Tensor w2, "
    "Tensor w2_scale, Tensor expert_num_tokens, int expected_m, bool ue8m0, Tensor(a!) out) -> ()"
)
LINEAR = "linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, bool ue8m0) -> Tensor"


def _fused_moe_impl(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    ue8m0: bool,
    out: torch.Tensor,
) -> None:
    weights = (w13, w13_scale, w2, w2_scale)
    _fused_moe(hidden_states, *weights, topk_weights, topk_ids, expert_map=expert_map, ue8m0=ue8m0, out=out)


def _batched_experts_impl(
    hidden_states: torch.Tensor,
    hidden_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    expected_m: int,
    ue8m0: bool,
    out: torch.Tensor,
) -> None:
    weights = (w13, w13_scale, w2, w2_scale)
    _batched_experts(
        hidden_states, hidden_scale, *weights, expert_num_tokens, expected_m=expected_m, ue8m0=ue8m0, out=out
    )


def _linear_impl(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, ue8m0: bool
) -> torch.Tensor:
    # Engines hand over slices of fused projections.
    return fp8_linear(x.contiguous(), weight, weight_scale, bias, ue8m0)


def _linear_fake(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, ue8m0: bool
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.bfloat16)


def _writes_out(*args: object) -> None:
    """Fake of an op that only writes its last argument."""


def _register() -> None:
    namespace = torch.ops.fp8moe
    if hasattr(namespace, "library"):  # a second import of this module
        return
    library = torch.library.Library("fp8moe", "FRAGMENT")
    for schema, impl, fake in (
        (FUSED_MOE, _fused_moe_impl, _writes_out),
        (BATCHED_EXPERTS, _batched_experts_impl, _writes_out),
        (LINEAR, _linear_impl, _linear_fake),
    ):
        name = library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        library.impl(name, impl, "CompositeExplicitAutograd")
        library._register_fake(name, fake)
    # The ops live as long as their library, so it lives with torch's namespace and not with this module.
    vars(namespace)["library"] = library


_register()

fused_moe = torch.ops.fp8moe.fused_moe.default
batched_experts = torch.ops.fp8moe.batched_experts.default
linear = torch.ops.fp8moe.linear.default
