"""Quantize activations to e4m3, one float32 scale per token and 128 channels."""

import torch

from fp8moe_plugin.checkpoint.shapes import GROUP, ceil_div
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launch import Address, Launch, Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.ops import backend, reference
from fp8moe_plugin.ops.backend import Device, prepares
from fp8moe_plugin.ops.checks import check_multiple, check_tensor
from fp8moe_plugin.ops.operands import Quantized, Rows, empty_quantized
from fp8moe_plugin.ops.option_checks import check_flag, check_int
from fp8moe_plugin.ops.triton_launches import triton_quantize_launch
from fp8moe_plugin.plan import KernelKey, Layout
from fp8moe_plugin.plan.catalog import quantize_key
from fp8moe_plugin.plan.constants import FEW_TOKENS_PER_WARP, TOKENS_PER_WARP
from fp8moe_plugin.plan.triton_catalog import is_triton
from fp8moe_plugin.plan.tuning import QUANTIZE_FEW_TOKENS


def per_token_group_quant_fp8(x: torch.Tensor, group_size: int = GROUP, ue8m0: bool = False) -> Quantized:
    """Quantize each group of 128 channels of each token by its own largest magnitude.

    Args:
        x: bfloat16 `[.., K]`, K a multiple of 128.
        group_size: 128, the only size the kernels take.
        ue8m0: round each scale up to a power of two.
    Returns:
        e4m3 `[.., K]` and float32 scales `[.., K/128]`, the latter K-major (`empty_scales`), as the GEMMs read them.
        `x` is about `q * scale`.
    Raises:
        InvalidInputError: wrong dtype, group size, K, or `ue8m0`.
    """
    check_tensor("x", x, dtype=torch.bfloat16)
    check_int("group_size", group_size)
    check_flag("ue8m0", ue8m0)
    if group_size != GROUP:
        raise InvalidInputError(f"group_size is {group_size}, needs {GROUP}: the scale granularity of the kernels.")
    check_multiple("x's last dimension", x.shape[-1], GROUP)
    device, k = backend.device_of(x), x.shape[-1]
    if device is None:
        return reference.quantize(x, ue8m0)
    q, scales = empty_quantized(x.numel() // k, k, x.device)
    if x.numel():
        run = prepared_quantize(device, ue8m0, q.shape[0], k)
        run((x.data_ptr(), q.data_ptr(), scales.data_ptr()))
    return q.view(x.shape), scales.unflatten(0, x.shape[:-1]) if x.dim() > 1 else scales[0]


@prepares("per_token_group_quant_fp8")
def prepared_quantize(device: Device, ue8m0: bool, tokens: int, k: int) -> Prepared:
    """What launches `per_token_group_quant_fp8`, given the addresses of x, q and the scales."""
    x, q, scales = map(Slot, range(3))
    return device.prepare([quantize_rows_launch(device, ue8m0, x, Rows.k_major(q, scales, tokens, k))])


def quantize_rows_launch(device: Device, ue8m0: bool, x: Address, out: Rows) -> Launch:
    """Quantize bfloat16 `[rows, k]` at `x` to rows with K-major scales."""
    if is_triton(device.target):
        return triton_quantize_launch(device.target, ue8m0, x, out)
    key = quantize_key(ue8m0, Layout.K_MAJOR)
    return quantize_launch(key, x, out.values, out.scales, out.rows, out.k, early=True)


def quantize_launch(
    key: KernelKey,
    x: Address,
    q: Address,
    scales: Address,
    tokens: int,
    k: int,
    *,
    slots: Address = 0,
    topk: int = 0,
    early: bool = False,
) -> Launch:
    """Quantize bfloat16 `[tokens, k]` at `x` to `q`, in the layout of the key.

    Args:
        slots: for `Layout.PERMUTED` the address of int32 `[tokens, topk]`, the rows that get each token; -1 for none.
        early: it may start before the preceding kernel ends; unless the layout is `Layout.K_MAJOR`, which waits for it,
            that kernel must not access these tensors.
    """
    groups = k // GROUP
    few = tokens <= QUANTIZE_FEW_TOKENS and dict(key.defines)["LAYOUT"] == Layout.K_MAJOR
    tokens_per_warp = FEW_TOKENS_PER_WARP if few else TOKENS_PER_WARP
    return Launch(
        key,
        ceil_div(ceil_div(tokens, tokens_per_warp) * groups, key.threads // 32),
        key.arguments(
            x=x,
            q=q,
            scales=scales,
            slots=slots,
            tokens=tokens,
            groups=groups,
            topk=topk,
            tokens_per_warp=tokens_per_warp,
        ),
        early=early,
    )
