"""Packing of projections in MXFP4: in one kernel where no exponents are far apart, else in plain torch."""

import torch

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import CHUNK_BYTES
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.sm90.pack import pack_mxfp4_launch
from fp8moe_plugin.ops import devices
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.fp4_blocks import CODES, EXPONENTS, Fp4Blocks
from fp8moe_plugin.ops.mxfp4 import Steps, further_steps, steps_of, write_down, write_half

PARTS = {"w1": (0, 2), "w2": (0, 1), "w3": (1, 2)}  # number among the projections in the same tensors, and how many
ALIGNMENT = 16  # bytes of codes that the kernel loads at once


def pack_mxfp4(
    weight: torch.Tensor,
    scales: torch.Tensor,
    shard_id: str,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    largest: int,
) -> None:
    """Write a projection of each expert, none of whose exponents differ by more than `SPAN`, to the experts' tensors.

    Args:
        weight, scales: of w13 or w2 of E consecutive experts, contiguous; `ops/mxfp4.py` has their layouts.
        shard_id: "w1" (gate), "w2" (down) or "w3" (up).
        codes: uint8 `[E * rows, K/2]` on the device of the tensors. Rows and K may be fewer than the tensors have room
            for; the rest becomes zeros.
        exponents: E8M0 or uint8 `[E * rows, K/32]`, likewise.
        largest: the largest of them. It is the base of all steps.
    """
    device = devices.device_of(codes)
    if device is None or not device.backend.has_all_ops:
        blocks = padded_blocks(weight, scales, shard_id, codes, exponents)
        write(weight, scales, shard_id, steps_of(blocks, largest))
        return
    codes, exponents = codes.contiguous(), exponents.contiguous()
    if codes.data_ptr() % ALIGNMENT:
        codes = codes.clone()
    rows, groups = exponents.shape
    run = prepared_pack(device, weight.shape, scales.shape[-1], shard_id, rows, groups, largest)
    run((codes.data_ptr(), exponents.data_ptr(), weight.data_ptr(), scales.data_ptr()))


@prepares("pack_mxfp4")
def prepared_pack(
    device: Device, shape: tuple[int, ...], pitch: int, shard_id: str, rows: int, groups: int, largest: int
) -> Prepared:
    """Returns a callable that launches `pack_mxfp4`, given the addresses of codes, exponents, weight and scales.

    Args:
        shape: of the weight.
        pitch: scales of a row block.
        rows, groups: of the exponents.
        largest: exponent.
    """
    codes, exponents, chunks, scales = map(Slot, range(4))
    part, parts = PARTS[shard_id]
    experts, row_blocks, steps = shape[0], shape[1] // parts, shape[2] // CHUNK_BYTES
    further = pitch - steps
    launch = pack_mxfp4_launch(
        codes,
        exponents,
        chunks,
        scales,
        experts=experts,
        given=(rows // experts, groups),
        blocks=(row_blocks, steps - further),
        further=further,
        part=(part, parts),
        largest=largest,
    )
    return device.prepare([launch])


def padded_blocks(
    weight: torch.Tensor, scales: torch.Tensor, shard_id: str, codes: torch.Tensor, exponents: torch.Tensor
) -> Fp4Blocks:
    """Returns the blocks of projections with zeros where the experts' tensors have room for more, see `pack_mxfp4`."""
    _, parts = PARTS[shard_id]
    experts, rows = weight.shape[0], weight.shape[1] // parts * GROUP
    k_blocks = weight.shape[2] // CHUNK_BYTES - further_steps(weight, scales)

    def padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
        missing = k_blocks * width - tensor.shape[1], rows - tensor.shape[0] // experts
        if not any(missing):
            return tensor
        of_experts = tensor.view(torch.uint8).unflatten(0, (experts, -1))
        return torch.nn.functional.pad(of_experts, (0, missing[0], 0, missing[1])).flatten(0, 1)

    return Fp4Blocks.of(padded(codes, CODES), padded(exponents, EXPONENTS))


def write(weight: torch.Tensor, scales: torch.Tensor, shard_id: str, steps: Steps) -> None:
    """Write a projection of an expert, or of several, to their tensors, which have room for its further steps."""
    part, parts = PARTS[shard_id]
    if parts == 1:
        write_down(weight, scales, steps)
    else:
        write_half(weight, scales, part, steps)
