"""A format of 4 bits: two codes share a byte, and each scale, an exponent of 8 bits, belongs to 32 input channels."""

import torch
from torch.nn.functional import pad

from fp8moe_plugin.formats.weight_format import TensorFormat, WeightFormat
from tests.layers.experts import EXPERTS, HIDDEN

FP4 = WeightFormat(
    name="FP4",
    weight=TensorFormat("U8", ("U8", "I8"), block=(1, 2)),
    scales=TensorFormat("F8_E8M0", ("F8_E8M0", "U8"), block=(1, 32)),
    scale_names=("scale",),
)
KINDS = {"weight": 2, "weight_scale_inv": 32}  # input channels for each element
WIDTH, RANKS, PART = 320, 2, 256  # intermediate channels, which are padded for each rank


def codes(*shape: int) -> torch.Tensor:
    """Bytes that are valid weights and scales; those next to each other differ."""
    return torch.arange(torch.Size(shape).numel()).remainder(239).to(torch.uint8).view(shape)


CHECKPOINT = {
    f"{name}_{kind}": [codes(n, k // channels) + expert for expert in range(EXPERTS)]
    for name, n, k in (("w1", WIDTH, HIDDEN), ("w3", WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH))
    for kind, channels in KINDS.items()
}


def bits(tensor: torch.Tensor) -> list[list[int]]:
    return tensor.view(torch.uint8).tolist()


def part_of(rank: int, name: str, expert: int) -> list[list[int]]:
    """Returns the bits of a tensor of `CHECKPOINT` on a rank."""
    whole, channels = CHECKPOINT[name][expert], KINDS[name.partition("_")[2]]
    if name.startswith("w2"):
        columns = PART // channels
        return bits(pad(whole, (0, RANKS * columns - whole.shape[1]))[:, columns * rank :][:, :columns])
    return bits(pad(whole, (0, 0, 0, RANKS * PART - WIDTH))[PART * rank :][:PART])
