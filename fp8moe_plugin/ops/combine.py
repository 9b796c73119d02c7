"""Sum the expert rows of each token, weighted by the router."""

import torch

from fp8moe_plugin.checkpoint.shapes import ceil_div
from fp8moe_plugin.jit.launcher import Launch, launch
from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.plan import combine_key

CHANNELS_PER_THREAD = 8  # 16 bytes of bfloat16


def combine(rows: torch.Tensor, slots: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out[t] = sum over j of topk_weights[t, j] * rows[slots[t, j]]`, in float32, in the order of j.

    Args:
        rows: bfloat16 `[R, H]`.
        slots: int32 `[T, k]`, -1 for an expert that is not here.
        topk_weights: float32 `[T, k]`.
        out: bfloat16 `[T, H]`, written whole; a token with no slot gets zeros.
    """
    if uses_sm90(rows):
        addresses = (rows.data_ptr(), slots.data_ptr(), topk_weights.data_ptr(), out.data_ptr())
        tokens, topk = slots.shape
        if tokens:
            launch(*combine_launch(addresses, tokens, topk, out.shape[1], out.get_device(), early=False))
        return out
    return out.copy_(combine_reference(rows, slots, topk_weights))


def combine_reference(rows: torch.Tensor, slots: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Plain-torch twin of `combine`."""
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for j in range(slots.shape[1]):
        tokens = (slots[:, j] >= 0).nonzero().flatten()
        total[tokens] += topk_weights[tokens, j, None].float() * rows[slots[tokens, j].long()].float()
    return total.to(rows.dtype)


def combine_launch(
    addresses: tuple[int, int, int, int], tokens: int, topk: int, hidden: int, device_index: int, early: bool
) -> Launch:
    """`combine` of what is at these addresses, in the order of its arguments.

    `early` as for `launch`; all that it reads but the rows has been written before the kernel before it could start.
    """
    vectors, key = hidden // CHANNELS_PER_THREAD, combine_key()
    grid = tokens * ceil_div(vectors, key.threads)
    return Launch(key, grid, (*addresses, vectors, topk), device_index, early)
