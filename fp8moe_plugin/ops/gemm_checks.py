"""Checks of the operands of the GEMMs, which support more layouts than the layers do."""

import torch

from fp8moe_plugin.checkpoint.shapes import N_MULTIPLE
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.ops.checks import FP8, check_aligned, check_apart, check_multiple, check_tensor, debugs
from fp8moe_plugin.ops.operands import Quantized

K_MULTIPLE = 16  # bytes that TMA needs between rows


def check_rows(name: str, q: torch.Tensor, scales: torch.Tensor, dims: int, *, empty_k: bool = False) -> None:
    """Check `(e4m3 [.., K], f32 [.., ceil(K/128)])` with K contiguous; rows and scales may have any strides.

    Args:
        dims: dimensions of the values.
        empty_k: K may be 0.
    """
    check_tensor(name, q, dtype=FP8, shape=(None,) * dims, contiguous=False)
    k = q.shape[-1]
    if k or not empty_k:
        check_multiple(f"{name}'s K", k, K_MULTIPLE)
    _check_k_major(name, q)
    wanted = (*q.shape[:-1], ceil_div(k, GROUP))
    check_tensor(f"{name}'s scales", scales, dtype=torch.float32, shape=wanted, device=q.device, contiguous=False)


def check_blocks(name: str, q: torch.Tensor, scales: torch.Tensor, dims: int, k: int, device: torch.device) -> None:
    """Check `(e4m3 [.., N, K], f32 [.., ceil(N/128), ceil(K/128)])` like `check_rows`; `k` has been checked."""
    check_tensor(name, q, dtype=FP8, shape=(*(None,) * (dims - 1), k), device=device, contiguous=False)
    check_multiple(f"{name}'s N", q.shape[-2], N_MULTIPLE)
    if 0 in q.shape[:-1]:
        raise InvalidInputError(f"{name} has shape {list(q.shape)}, needs at least one expert. Check what was loaded.")
    _check_k_major(name, q)
    wanted = (*q.shape[:-2], ceil_div(q.shape[-2], GROUP), ceil_div(k, GROUP))
    check_tensor(f"{name}'s scales", scales, dtype=torch.float32, shape=wanted, device=device, contiguous=False)


def check_out(
    name: str,
    out: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check a result or an addend: the elements of a row are contiguous, and rows may have any stride."""
    check_tensor(name, out, dtype=dtype, shape=shape, device=device, contiguous=False)
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise InvalidInputError(
            f"{name} has strides {out.stride()}, needs rows of consecutive elements. Pass a row-major tensor."
        )
    check_aligned(name, out)


def check_out_apart(out: torch.Tensor, a: Quantized, b: Quantized, c: torch.Tensor | None = None) -> None:
    """With FP8MOE_DEBUG=1, raise `InvalidInputError` if `out` shares memory with an operand; it may be `c` itself."""
    if debugs(out.is_cuda):
        itself = c is not None and (c.data_ptr(), c.stride()) == (out.data_ptr(), out.stride())
        read = {"a": a[0], "a_scales": a[1], "b": b[0], "b_scales": b[1], "c": None if itself else c}
        check_apart("out", out, **read)


def _check_k_major(name: str, q: torch.Tensor) -> None:
    if q.shape[-1] > 1 and q.stride(-1) != 1:
        raise InvalidInputError(
            f"{name} has strides {q.stride()}, needs consecutive elements along K: FP8 products on Hopper GPUs take no "
            "other order, in DeepGEMM neither. Transpose it before it is quantized."
        )
