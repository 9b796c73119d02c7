"""Quantize activations to e4m3, one float32 scale per token and 128 channels."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.operands import Rows
from fp8moe_plugin.ops import devices, reference, workspace
from fp8moe_plugin.ops.checks import FP8, check_multiple, check_tensor
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.operands import Quantized, empty_quantized
from fp8moe_plugin.ops.option_checks import check_flag, check_int


def per_token_group_quant_fp8(x: torch.Tensor, group_size: int = GROUP, ue8m0: bool = False) -> Quantized:
    """Quantize each group of 128 channels of each token with a scale from its largest magnitude.

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
    device, k = devices.device_of(x), x.shape[-1]
    if device is None:
        return reference.quantize(x, ue8m0)
    q, scales = empty_quantized(x.numel() // k, k, x.device)
    if x.numel():
        run = prepared_quantize(device, ue8m0, q.shape[0], k)
        run((x.data_ptr(), q.data_ptr(), scales.data_ptr()))
    return q.view(x.shape), scales.unflatten(0, x.shape[:-1]) if x.dim() > 1 else scales[0]


def quantize_tokens(x: torch.Tensor, ue8m0: bool) -> Quantized:
    """Returns the same codes and scales for bfloat16 `[T, H]`, but with contiguous scales, as `fused_moe` reads them.

    Raises:
        InvalidInputError: wrong dtype, shape or layout.
    """
    check_tensor("x", x, dtype=torch.bfloat16, shape=(None, None))
    check_multiple("x's last dimension", x.shape[1], GROUP)
    device = devices.device_of(x)
    if device is None:
        return reference.quantize(x, ue8m0)
    q = workspace.empty(tuple(x.shape), FP8, x.device)
    scales = workspace.empty((len(x), x.shape[1] // GROUP), torch.float32, x.device)
    if len(x):
        run = prepared_quantize(device, ue8m0, *x.shape, row_major=True)
        run((x.data_ptr(), q.data_ptr(), scales.data_ptr()))
    return q, scales


@prepares("per_token_group_quant_fp8")
def prepared_quantize(device: Device, ue8m0: bool, tokens: int, k: int, row_major: bool = False) -> Prepared:
    """Returns a callable that launches `per_token_group_quant_fp8`, given the addresses of x, q and the scales.

    Args:
        row_major: it launches `quantize_tokens`.
    """
    x, q, scales = map(Slot, range(3))
    rows = (Rows.row_major if row_major else Rows.k_major)(q, scales, tokens, k)
    return device.prepare([device.backend.quantize_launch(ue8m0, x, rows)])
