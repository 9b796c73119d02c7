"""Random FP8 operands."""

import torch

Pair = tuple[torch.Tensor, torch.Tensor]  # e4m3 values and their float32 scales


def random_fp8(shape: tuple[int, ...]) -> torch.Tensor:
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in out.view(-1).split(1 << 27):
        part.copy_((torch.randn(part.numel(), device="cuda") * 110).clamp_(-448, 448))
    return out


def random_scales(shape: tuple[int, ...], k: int) -> torch.Tensor:
    return (torch.rand(shape, device="cuda") + 0.5) / (110 * k**0.25)
