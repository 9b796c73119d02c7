"""The order of codes in packed MXFP4: words of eight codes, and the slots of threads in shared memory."""

import torch

from fp8moe_plugin.ops.fp4_blocks import MAGNITUDES
from fp8moe_plugin.ops.tables import table


def words(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of rows in the order of wgmma's operand: uint8 `[.., 64]` to two int32 `[.., 4, 4]`.

    The dimensions are the 32 channels of a wgmma and the thread of four. A word is the bitwise or of both parts: the
    codes of channels 4t to 4t + 3, and those of 16 + 4t to 16 + 4t + 3. It has the magnitudes of the former in its
    lower 16 bits. The signs of the former are bit 7 of each byte, those of the latter bit 3.
    """
    index = codes.view(torch.int16).unflatten(-1, (4, 2, 4)) + _first_parts(codes.device)
    found = _parts(codes.device).index_select(0, index.flatten()).view(index.shape)
    return found.select(-2, 0), found.select(-2, 1)


@table
def _first_parts(device: torch.device) -> torch.Tensor:
    """Returns where `_parts` has the code 0 of channels 4t on, and of channels 16 + 4t on."""
    return torch.tensor([[1 << 15], [3 << 15]], dtype=torch.int32, device=device)


@table
def _parts(device: torch.device) -> torch.Tensor:
    """Returns the parts of words of four codes, for both parts by the codes as an int16, from the smallest on."""
    codes = torch.arange(-1 << 15, 1 << 15, device=device) & 0xFFFF
    magnitudes = codes & (MAGNITUDES << 8 | MAGNITUDES)
    signs = sum((codes >> (4 * i + 3) & 1) << 8 * i for i in range(4))
    both = torch.cat([magnitudes | signs << 7, magnitudes << 16 | signs << 3])
    return both.view(torch.int32)[::2].contiguous()  # the lower halves


def swizzled(codes: torch.Tensor) -> torch.Tensor:
    """Returns the codes of rows, uint8 `[.., 8 * n, 64]`, in another order of threads; twice is the order of before.

    The threads of lane g of 8 rows are numbered t xor g / 2, so that the words of the same thread of all lanes are in
    different banks of shared memory.
    """
    of_threads = codes.view(torch.int16).unflatten(-1, (-1, 4)).unflatten(-3, (-1, 8))
    index = _thread_order(codes.device)[:, None].expand(of_threads.shape)
    reordered: torch.Tensor = of_threads.gather(-1, index).flatten(-4, -3).flatten(-2)
    return reordered.view(torch.uint8)


@table
def _thread_order(device: torch.device) -> torch.Tensor:
    """Returns int64 `[8, 4]`, by lane and thread."""
    return torch.arange(4, device=device) ^ torch.arange(8, device=device)[:, None] // 2


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """Returns the codes of words, given as bytes `[.., 4, 4, 4]`."""
    i, j, k, m = words.unbind(-1)
    pairs = ((i >> 4, j), (k >> 4, m), (i, j << 4), (k, m << 4))
    parts = [(w & MAGNITUDES) | (s & 0x08) | (t & 0x80) for w, (s, t) in zip((i, j, k, m), pairs, strict=True)]
    codes: torch.Tensor = torch.stack(parts, -1).unflatten(-1, (2, 2))
    return codes.transpose(-3, -2).flatten(-4)
