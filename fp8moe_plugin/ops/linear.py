"""A dense FP8 linear layer: quantize the tokens, then one GEMM."""

from typing import NamedTuple

import torch

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.operands import Rows, Weights, placed
from fp8moe_plugin.ops import devices, reference, workspace
from fp8moe_plugin.ops.checks import CheckedOnce, check_multiple, check_tensor, check_weights, debugs, watch_rows
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.operands import Quantized
from fp8moe_plugin.ops.option_checks import check_flag
from fp8moe_plugin.plan.scratch import quantized_scratch
from fp8moe_plugin.plan.spec import Output
from fp8moe_plugin.settings import batch_invariant


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    ue8m0: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias` with x quantized per token and 128 channels.

    Args:
        x: bfloat16 `[.., K]`, K a multiple of 128.
        weight: e4m3 `[N, K]`, N a multiple of 8.
        weight_scale: float32 `[ceil(N/128), K/128]`, or `[N, 1]` (`FP8_CHANNEL`).
        bias: bfloat16 `[N]`, added before the product is rounded where the kernel can, or None.
        ue8m0: round the scales of activations up to powers of two.
    Returns:
        bfloat16 `[.., N]`.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device, or a tensor that requires a gradient.
        WrongResultError: with FP8MOE_DEBUG=1, a row of finite values has NaN in its product.
    """
    check_flag("ue8m0", ue8m0)
    facts, addresses = _check_call(x, weight, weight_scale, bias)
    out = x.new_empty(*facts.out_shape)
    call = x, (weight, weight_scale), bias, ue8m0, out, facts, addresses
    if debugs(out.is_cuda):
        rows, finite = out.view(-1, facts.n), x.view(-1, facts.k).isfinite().all(1)
        if bias is not None:
            finite &= bias.isfinite().all()
        watch_rows("fp8_linear", rows, finite, "row {}".format, lambda: _compute(*call))
    else:
        _compute(*call)
    return out


class LinearFacts(NamedTuple):
    """The properties of a call's tensors that the plan and the result of `fp8_linear` depend on."""

    rows: int
    n: int
    k: int
    out_shape: tuple[int, ...]
    weights: WeightFormat


@CheckedOnce
def _check_call(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> LinearFacts:
    """Raise `InvalidInputError` unless these are valid tensors for `fp8_linear`."""
    check_tensor("x", x, dtype=torch.bfloat16)
    check_multiple("x's last dimension", x.shape[-1], GROUP)
    by_row = tuple(getattr(weight_scale, "shape", ())) == (*getattr(weight, "shape", ())[:1], 1)
    weights = FP8_CHANNEL if by_row else FP8_BLOCK
    check_weights("weight", (weight, weight_scale), 2, x.shape[-1], x.device, weights)
    if bias is not None:
        check_tensor("bias", bias, dtype=torch.bfloat16, shape=(weight.shape[0],), device=x.device)
    n, k = weight.shape
    return LinearFacts(x.numel() // k, n, k, (*x.shape[:-1], n), weights)


def _compute(
    x: torch.Tensor,
    weight: Quantized,
    bias: torch.Tensor | None,
    ue8m0: bool,
    out: torch.Tensor,
    facts: LinearFacts,
    addresses: tuple[int, ...],
) -> None:
    """Run `fp8_linear` on checked arguments; `addresses`: of x, the weight, its scales and the bias."""
    device, (rows, n, k, _, weights) = devices.device_of(x), facts
    if rows == 0:
        return
    if device is None:
        product = reference.gemm(reference.quantize(x.view(rows, k), ue8m0), weight, weights)
        out.view(rows, n).copy_(product if bias is None else product + bias)
        return
    sizes = rows, n, k
    options = batch_invariant(), weights, bias is not None
    plan = device.backend.plan_dense(*sizes, Output.BF16, device.multiprocessors, *options)
    run, nbytes = prepared_linear(device, plan, *sizes, ue8m0, weights)
    scratch = workspace.scratch(nbytes, x)
    run((*addresses, out.data_ptr(), scratch.data_ptr()))
    if bias is not None and not plan.adds_bias:
        out += bias


@prepares("fp8_linear")
def prepared_linear(
    device: Device, plan: Plan, tokens: int, n: int, k: int, ue8m0: bool, format: WeightFormat
) -> tuple[Prepared, int]:
    """Returns a callable that launches `fp8_linear`, given addresses, and the bytes of its scratch.

    It leaves the bias to the caller unless the plan `adds_bias`.
    """
    x, weight, weight_scale, bias, out, scratch = map(Slot, range(6))
    layout = quantized_scratch(tokens, k)
    at = placed(layout, scratch)
    rows = Rows.k_major(at.values, at.scales, tokens, k)
    weights = Weights(weight, 1, n, k, weight_scale, format=format, bias=bias)
    quantize = device.backend.quantize_launch(ue8m0, x, rows)
    return device.prepare([quantize, *plan.launches(rows, weights, out, after_quantize=True)]), layout.nbytes
