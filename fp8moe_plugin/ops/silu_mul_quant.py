"""The activation and the quantization of its result: the step between the two GEMMs of an expert, as a separate op."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.operands import Rows
from fp8moe_plugin.ops import devices, reference
from fp8moe_plugin.ops.checks import check_multiple, check_tensor
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.operands import Quantized, empty_quantized
from fp8moe_plugin.ops.option_checks import as_activation, check_flag

MAX_GROUPS = 65535  # blocks of a CUDA grid along y


def silu_mul_quant_fp8(
    gate_up: torch.Tensor, counts: torch.Tensor, ue8m0: bool = False, activation: str | Activation = SILU
) -> Quantized:
    """Quantize `silu(gate_up[.., :I]) * gate_up[.., I:]`, or another activation, per row and 128 channels.

    SiLU and the product are computed in float32 and each rounded to bfloat16, as vLLM's own kernels do. Of another
    activation only the result is rounded to bfloat16.

    Args:
        gate_up: bfloat16 `[G, max_m, 2I]`, I a multiple of 128, G up to 65535.
        counts: int32 `[G]` on the device; rows from `counts[g]` on are not read or written.
        ue8m0: round each scale up to a power of two.
        activation: "silu", or an `Activation` (`formats/activation.py`).
    Returns:
        e4m3 `[G, max_m, I]` and float32 scales `[G, max_m, I/128]`, K-major over all rows.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    check_tensor("gate_up", gate_up, dtype=torch.bfloat16, shape=(None, None, None))
    check_multiple("gate_up's last dimension", gate_up.shape[-1], 2 * GROUP)
    check_flag("ue8m0", ue8m0)
    activation = as_activation(activation)
    if refusal := activation.refusal:
        raise InvalidInputError(f"activation is {refusal}. Use one that the kernels compute.")
    (groups, max_m, _), channels = gate_up.shape, gate_up.shape[-1] // 2
    if groups > MAX_GROUPS:
        raise InvalidInputError(f"gate_up has {groups} groups, the kernel takes up to {MAX_GROUPS}. Split the call.")
    check_tensor("counts", counts, dtype=torch.int32, shape=(groups,), device=gate_up.device)
    rows, scales = empty_quantized(groups * max_m, channels, gate_up.device)
    q, scales = rows.view(groups, max_m, channels), scales.unflatten(0, (groups, max_m))
    device = devices.device_of(gate_up)
    if device is None:
        for out_q, out_scales, rows, count in zip(q, scales, gate_up, counts.clamp(min=0).tolist(), strict=True):
            reference.write(
                (out_q[:count], out_scales[:count]), reference.silu_mul_quant(rows[:count], ue8m0, activation)
            )
    elif groups and max_m:
        run = prepared_silu_mul_quant(device, q.shape, ue8m0, activation)
        run((gate_up.data_ptr(), counts.data_ptr(), q.data_ptr(), scales.data_ptr()))
    return q, scales


@prepares("silu_mul_quant_fp8")
def prepared_silu_mul_quant(device: Device, shape: tuple[int, ...], ue8m0: bool, activation: Activation) -> Prepared:
    """Returns a callable that launches `silu_mul_quant_fp8`, given the addresses of its arguments, q and the scales."""
    gate_up, counts, q, scales = map(Slot, range(4))
    groups, max_m, channels = shape
    out, sizes = Rows.k_major(q, scales, groups * max_m, channels), (groups, max_m)
    launch = device.backend.silu_mul_quant_launch(
        ue8m0, activation, gate_up, counts, *sizes, out, device.multiprocessors
    )
    return device.prepare([launch])
