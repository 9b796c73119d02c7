"""SiLU(gate) * up, quantized again: what stands between the two GEMMs of an expert."""

import torch

from fp8moe_plugin.checkpoint.shapes import GROUP, ceil_div
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launcher import Launch, launch, multiprocessors
from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.ops.checks import check_multiple, check_tensor
from fp8moe_plugin.ops.quantize import empty_quantized, per_token_group_quant_fp8_reference
from fp8moe_plugin.plan import silu_mul_quant_key

ROWS_PER_WARP = 8  # as in csrc/silu_mul_quant.cu
MAX_GROUPS = 65535  # blocks of a CUDA grid along y
CTAS_PER_SM = 8  # two waves: enough to even out experts of unequal size


def silu_mul_quant_fp8(
    gate_up: torch.Tensor, counts: torch.Tensor, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `silu(gate_up[.., :I]) * gate_up[.., I:]` per row and 128 channels.

    SiLU and the product are computed in float32 and each rounded to bfloat16, as vLLM's own kernels do.

    Args:
        gate_up: bfloat16 `[G, max_m, 2I]`, I a multiple of 128, G up to 65535.
        counts: int32 `[G]` on the device; rows from `counts[g]` on are neither read nor written.
        ue8m0: round each scale up to a power of two.
    Returns:
        e4m3 `[G, max_m, I]` and float32 scales `[G, max_m, I/128]`, K-major over all rows.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    check_tensor("gate_up", gate_up, dtype=torch.bfloat16, shape=(None, None, None))
    check_multiple("gate_up's last dimension", gate_up.shape[-1], 2 * GROUP)
    groups, max_m, width = gate_up.shape
    if groups > MAX_GROUPS:
        raise InvalidInputError(f"gate_up has {groups} groups, the kernel takes up to {MAX_GROUPS}. Split the call.")
    check_tensor("counts", counts, dtype=torch.int32, shape=(groups,), device=gate_up.device)
    q, scales = empty_quantized(groups * max_m, width // 2, gate_up.device)
    q, scales = q.view(groups, max_m, width // 2), scales.unflatten(0, (groups, max_m))
    if uses_sm90(gate_up):
        addresses = (gate_up.data_ptr(), counts.data_ptr(), q.data_ptr(), scales.data_ptr())
        if groups and max_m:
            launch(*silu_mul_quant_launch(addresses, (groups, max_m, width // 2), ue8m0, gate_up.get_device()))
    else:
        _write_reference(gate_up, counts, q, scales, ue8m0)
    return q, scales


def silu_mul_quant_fp8_reference(gate_up: torch.Tensor, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain-torch twin for dense rows: bfloat16 `[.., 2I]` -> e4m3 `[.., I]` and scales `[.., I/128]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return per_token_group_quant_fp8_reference(torch.nn.functional.silu(gate) * up, ue8m0)


def _write_reference(
    gate_up: torch.Tensor, counts: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, ue8m0: bool
) -> None:
    for group, count in enumerate(counts.clamp(min=0).tolist()):
        rows_q, rows_scales = silu_mul_quant_fp8_reference(gate_up[group, :count], ue8m0)
        q[group, :count].view(torch.uint8).copy_(rows_q.view(torch.uint8))
        scales[group, :count].copy_(rows_scales)


def silu_mul_quant_launch(
    addresses: tuple[int, int, int, int], shape: tuple[int, int, int], ue8m0: bool, device_index: int
) -> Launch:
    """`silu_mul_quant_fp8` of `gate_up` and `counts` to values of `shape` `[G, max_m, I]` and their scales."""
    experts, max_m, channels = shape
    groups = channels // GROUP
    key = silu_mul_quant_key(ue8m0)
    needed = ceil_div(ceil_div(max_m, ROWS_PER_WARP) * groups, key.threads // 32)
    at_once = ceil_div(multiprocessors(device_index) * CTAS_PER_SM, experts)
    grid = (min(needed, at_once), experts)
    return Launch(key, grid, (*addresses, max_m, groups), device_index)
