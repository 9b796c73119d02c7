"""Quantize activations to e4m3, one float32 scale per token and 128 channels."""

import torch

from fp8moe_plugin.checkpoint.shapes import GROUP, ceil_div
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launcher import Launch, launch
from fp8moe_plugin.ops import workspace
from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.ops.checks import FP8, check_multiple, check_tensor
from fp8moe_plugin.plan import Layout, quantize_key, scale_rows

FP8_MAX = 448.0
SMALLEST_AMAX = 1e-10  # keeps the scale of an all-zero group finite

Quantized = tuple[torch.Tensor, torch.Tensor]  # values and scales

TOKENS_PER_WARP = 8  # as in csrc/quantize.cu


def per_token_group_quant_fp8(
    x: torch.Tensor, group_size: int = GROUP, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each group of 128 channels of each token by its own largest magnitude.

    Args:
        x: bfloat16 `[.., K]`, K a multiple of 128.
        group_size: 128, the only size the kernels take.
        ue8m0: round each scale up to a power of two.
    Returns:
        e4m3 `[.., K]` and float32 scales `[.., K/128]`, the latter K-major (`empty_scales`), as the GEMMs read them.
        `x` is about `q * scale`.
    Raises:
        InvalidInputError: wrong dtype, group size, or K.
    """
    check_tensor("x", x, dtype=torch.bfloat16)
    if group_size != GROUP:
        raise InvalidInputError(f"group_size is {group_size}, needs {GROUP}: the scale granularity of the kernels.")
    check_multiple("x's last dimension", x.shape[-1], GROUP)
    if not uses_sm90(x):
        return per_token_group_quant_fp8_reference(x, ue8m0)
    q, scales = quantize_matrix(x.view(-1, x.shape[-1]), ue8m0)
    return q.view(x.shape), scales.unflatten(0, x.shape[:-1]) if x.dim() > 1 else scales[0]


def quantize_matrix(x: torch.Tensor, ue8m0: bool) -> Quantized:
    """`per_token_group_quant_fp8` of bfloat16 `[M, K]` on the GPU."""
    rows, k = x.shape
    out = empty_quantized(rows, k, x.device)
    _launch_quantize(x, out, Layout.K_MAJOR, ue8m0)
    return out


def quantize_rows(x: torch.Tensor, slots: torch.Tensor, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each token once and write it to the rows its experts read.

    Args:
        x: bfloat16 `[T, K]`.
        slots: int32 `[T, k]`, the rows (below T*k) that get token t; -1 for none.
    Returns:
        e4m3 `[T*k, K]` and float32 scales `[T*k, K/128]`, K-major; rows no slot names are not written.
    """
    if not uses_sm90(x):
        return quantize_rows_reference(x, slots, ue8m0)
    q, scales = empty_quantized(slots.numel(), x.shape[-1], x.device)
    _launch_quantize(x, (q, scales), Layout.PERMUTED, ue8m0, slots)
    return q, scales


def quantize_tokens(x: torch.Tensor, out: Quantized, ue8m0: bool = False) -> None:
    """Quantize bfloat16 `[T, K]` for a GEMM that gathers its rows, into `empty_tokens(T, K)`.

    On a GPU this runs beside the kernels of a `route` launched just before it, which need other parts of the GPU.
    These must not have got memory that `out` has: it is allocated before them.
    """
    if not uses_sm90(x):
        for result, value in zip(out, per_token_group_quant_fp8_reference(x, ue8m0), strict=True):
            result.copy_(value)
        return
    _launch_quantize(x, out, Layout.ROW_MAJOR, ue8m0)


def empty_tokens(tokens: int, k: int, device: torch.device) -> Quantized:
    """Room for quantized tokens that a GEMM gathers: e4m3 `[tokens, k]` and row-major scales `[tokens, k/128]`."""
    return (
        workspace.empty((tokens, k), FP8, device),
        workspace.empty((tokens, k // GROUP), torch.float32, device),
    )


def empty_quantized(rows: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for quantized rows: e4m3 `[rows, k]` and their scales."""
    return workspace.empty((rows, k), FP8, device), empty_scales(rows, k // GROUP, device)


def empty_scales(rows: int, k_blocks: int, device: torch.device) -> torch.Tensor:
    """Room for float32 scales `[rows, k_blocks]`, K-major: rows contiguous, k blocks a multiple of 16 bytes apart."""
    return workspace.empty((k_blocks, scale_rows(rows)), torch.float32, device)[:, :rows].t()


def group_scales(amax: torch.Tensor, ue8m0: bool) -> torch.Tensor:
    """The scale of a group from its largest magnitude."""
    # By a tensor: torch divides by a number as it multiplies with its inverse, which rounds twice.
    scales = amax.clamp(min=SMALLEST_AMAX) / torch.full_like(amax, FP8_MAX)
    if not ue8m0:
        return scales
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def per_token_group_quant_fp8_reference(x: torch.Tensor, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain-torch twin of `per_token_group_quant_fp8`; takes any float dtype."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = group_scales(groups.abs().amax(-1), ue8m0)
    q = (groups / scales.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return q.view(x.shape), scales


def quantize_rows_reference(x: torch.Tensor, slots: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain-torch twin of `quantize_rows`."""
    q, scales = empty_quantized(slots.numel(), x.shape[-1], x.device)
    token_q, token_scales = per_token_group_quant_fp8_reference(x, ue8m0)
    token, column = (slots >= 0).nonzero(as_tuple=True)
    rows = slots[token, column].long()
    q.view(torch.uint8)[rows] = token_q.view(torch.uint8)[token]
    scales[rows] = token_scales[token]
    return q, scales


def dequantize_rows(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 `[.., K]` from e4m3 `[.., K]` and scales `[.., K/128]`."""
    return (q.float().unflatten(-1, (-1, GROUP)) * scales.unsqueeze(-1)).flatten(-2)


def _launch_quantize(
    x: torch.Tensor,
    out: Quantized,
    layout: Layout,
    ue8m0: bool,
    slots: torch.Tensor | None = None,
) -> None:
    k, permuted = x.shape[-1], (0, 0) if slots is None else (slots.data_ptr(), slots.shape[1])
    addresses = (x.data_ptr(), out[0].data_ptr(), out[1].data_ptr())
    if x.numel():
        launch(*quantize_launch(addresses, x.numel() // k, k, layout, ue8m0, x.get_device(), *permuted))


def quantize_launch(
    addresses: tuple[int, int, int],
    tokens: int,
    k: int,
    layout: Layout,
    ue8m0: bool,
    device_index: int,
    slots: int = 0,
    topk: int = 0,
) -> Launch:
    """The kernel that quantizes bfloat16 `[tokens, k]`; the addresses are those of tokens, values and scales.

    For `Layout.PERMUTED` to the rows named at `slots`, int32 `[tokens, topk]`.
    """
    groups, key = k // GROUP, quantize_key(ue8m0, layout)
    grid = ceil_div(ceil_div(tokens, TOKENS_PER_WARP) * groups, key.threads // 32)
    early = layout == Layout.ROW_MAJOR
    return Launch(key, grid, (*addresses, slots, tokens, groups, topk), device_index, early)
