"""Checks of the arguments of an op. Each error says what is wrong, what is needed, and what to do."""

import functools
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch.autograd import forward_ad

from fp8moe_plugin.checkpoint.shapes import N_MULTIPLE
from fp8moe_plugin.errors import InvalidInputError, WrongResultError
from fp8moe_plugin.formats.dtypes import DTYPES
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops import signature
from fp8moe_plugin.ops.signature import Signature
from fp8moe_plugin.settings import settings

FP8 = torch.float8_e4m3fn
Facts = TypeVar("Facts")


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype for its name in safetensors."""
    found: torch.dtype = getattr(torch, DTYPES[name].torch)
    return found


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...] | None = None,
    device: torch.device | None = None,
    contiguous: bool = True,
) -> None:
    """Raise `InvalidInputError` unless `tensor` has this dtype, shape (None: any size), device and a dense layout.

    A tensor that requires a gradient is refused, too, because no op computes one.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor. Pass a tensor.")
    check_no_grad(name, tensor)
    if not has_strided_storage(tensor):
        raise InvalidInputError(
            f"{name} has no strided storage: it is sparse or nested, or belongs to a transform such as torch.vmap or "
            "torch.func.grad. Pass a dense tensor, and call the op outside the transform."
        )
    if tensor.dim() == 0:
        raise InvalidInputError(f"{name} has no dimension, needs at least one. Check the layout of the call.")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d) for d in dtypes)
        raise InvalidInputError(f"{name} has dtype {tensor.dtype}, needs {wanted}. Convert or quantize it first.")
    if shape is not None:
        check_shape(name, tensor, shape)
    if device is not None and tensor.device != device:
        raise InvalidInputError(f"{name} is on {tensor.device}, the other tensors on {device}. Move it to {device}.")
    if tensor.numel() and not tensor.data_ptr():
        raise InvalidInputError(f"{name} holds no data: it is a meta or fake tensor. Pass a tensor with data.")
    if contiguous and not tensor.is_contiguous():
        raise InvalidInputError(f"{name} has strides {tensor.stride()}, needs a contiguous layout. Call .contiguous().")
    if tensor.element_size() <= 2 and tensor.dtype != torch.bool:  # the kernels read others one at a time
        check_aligned(name, tensor)


def has_strided_storage(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has an address and strides. Sparse tensors and tensors in `torch.vmap` do not."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return not tensor.is_nested


def check_no_grad(name: str, tensor: torch.Tensor) -> None:
    """Raise `InvalidInputError` if autograd would expect a gradient or a tangent for `tensor`."""
    if (tensor.requires_grad and torch.is_grad_enabled()) or has_tangent(tensor):
        raise InvalidInputError(
            f"{name} requires a gradient, which this op does not compute. Call it under torch.inference_mode() or "
            f"torch.no_grad(), or pass {name}.detach()."
        )


def has_tangent(tensor: torch.Tensor) -> bool:
    """Returns whether forward-mode differentiation is active and `tensor` has a tangent."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


class CheckedOnce(Generic[Facts]):
    """Decorates checks of tensors so that they run once per signature, because they take the host longer than a launch.

    The checks and their result may depend only on properties that the signature contains. A call without a signature is
    checked each time, and so is every call with FP8MOE_DEBUG=1.
    """

    def __init__(self, check: Callable[..., Facts]) -> None:
        functools.update_wrapper(self, check)
        self._check = check
        self._passed: dict[Signature | None, tuple[Facts]] = {}

    def __call__(self, *tensors: torch.Tensor | None) -> tuple[Facts, tuple[int, ...]]:
        """Returns the result of the checks, and the addresses of the arguments, 0 for None."""
        described, addresses = signature.described(tensors)
        passed = self._passed.get(described)  # read once: another thread may clear the dictionary
        if passed and not settings().debug:
            return passed[0], addresses
        facts = self._check(*tensors)
        if described is None:
            return facts, signature.addresses_of(tensors)
        if len(self._passed) >= signature.MAX_SIGNATURES:
            self._passed.clear()
        self._passed[described] = (facts,)
        return facts, addresses


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise `InvalidInputError` unless `tensor` has this shape (None: any size)."""
    if tensor.dim() != len(shape) or any(w not in (None, s) for s, w in zip(tensor.shape, shape, strict=True)):
        wanted = "[" + ", ".join("any" if s is None else str(s) for s in shape) + "]"
        raise InvalidInputError(f"{name} has shape {list(tensor.shape)}, needs {wanted}. Check the layout of the call.")


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raise `InvalidInputError` unless `tensor` starts where the kernels' 16-byte loads, stores and TMA can."""
    if tensor.data_ptr() % 16:
        raise InvalidInputError(
            f"{name} starts at an address that is not a multiple of 16 bytes. Copy it into a new tensor."
        )


def is_aligned_contiguous(tensor: torch.Tensor) -> bool:
    """Returns whether kernels can read `tensor` without a copy."""
    return tensor.is_contiguous() and not tensor.data_ptr() % 16


def check_apart(name: str, tensor: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise `InvalidInputError` if the address range of `tensor` overlaps with that of another tensor."""
    begin, end = _span(tensor)
    for other_name, other in others.items():
        other_begin, other_end = (0, 0) if other is None else _span(other)
        if max(begin, other_begin) < min(end, other_end):
            raise InvalidInputError(
                f"{name} shares memory with {other_name}, which is still read while {name} is written. "
                f"Pass {name} memory of its own."
            )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor's first byte and of the byte after its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def check_writable(name: str, out: torch.Tensor) -> None:
    """Raise `InvalidInputError` if elements of `out` share memory, as in an expanded tensor."""
    reach = 0  # from the first element to the last one, of the dimensions with smaller strides
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride <= reach and out.numel():
            raise InvalidInputError(
                f"{name} has shape {list(out.shape)} and strides {out.stride()}: elements share memory. "
                "Pass a tensor with memory for each."
            )
        reach += max(size - 1, 0) * stride


def check_multiple(name: str, value: int, of: int) -> None:
    """Raise `InvalidInputError` unless `value` is a positive multiple of `of`."""
    if value <= 0 or value % of:
        raise InvalidInputError(
            f"{name} is {value}, needs a positive multiple of {of}. "
            f"The nearest are {max(1, value // of) * of} and {(value // of + 1) * of}."
        )


def check_values(name: str, tensor: torch.Tensor, lowest: int, highest: int) -> None:
    """With FP8MOE_DEBUG=1, wait for the device and check the tensor's values; not while a CUDA graph is captured."""
    if not debugs(tensor.is_cuda):
        return
    bad = tensor[(tensor < lowest) | (tensor > highest)]
    if bad.numel():
        raise InvalidInputError(
            f"{name} holds {bad[0].item()}, needs {lowest} to {highest}. Check where it is computed."
        )


def check_ascending(name: str, tensor: torch.Tensor) -> None:
    """With FP8MOE_DEBUG=1, wait for the device and check that no element is less than the one before."""
    if not debugs(tensor.is_cuda):
        return
    descents = (tensor[1:] < tensor[:-1]).nonzero()
    if descents.numel():
        i = int(descents[0])
        raise InvalidInputError(
            f"{name} descends from {tensor[i].item()} to {tensor[i + 1].item()} at {i + 1}. Check where it is computed."
        )


def debugs(on_gpu: bool) -> bool:
    """Returns whether to check values on the device: with FP8MOE_DEBUG=1, but not while a CUDA graph is captured."""
    if not settings().debug:
        return False
    if on_gpu and torch.cuda.is_current_stream_capturing():
        log_once(
            logging.WARNING,
            "FP8MOE_DEBUG=1 checks nothing in CUDA graphs, which cannot wait for the device. "
            "Run with --enforce-eager to check every step.",
        )
        return False
    return True


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with bytes 0xFF, which are NaN in every float dtype, and return it."""
    tensor.data.view(torch.uint8).fill_(0xFF)
    return tensor


def watch_rows(
    op: str, out: torch.Tensor, finite: torch.Tensor, describe: Callable[..., str], run: Callable[[], object]
) -> None:
    """Call `run`, which writes `out`, and check that it wrote each row and read no uninitialized memory.

    Args:
        op: its name in the message.
        out: bfloat16 `[.., N]`; its `finite` rows are poisoned first. `workspace` poisons scratch memory if `debugs`.
        finite: bool `[..]`, the rows that `run` computes from finite values.
        describe: returns a row's name in the message, given its indices.
    Raises:
        WrongResultError: one of these rows holds NaN.
    """
    out.masked_fill_(finite.unsqueeze(-1), float("nan"))
    run()
    bad = (out.isnan().any(-1) & finite).nonzero()
    if len(bad):
        raise WrongResultError(
            f"{op}: {describe(*bad[0].tolist())} comes out as NaN, one of {len(bad)} rows of {finite.numel()}, though "
            "what went in is finite: weights hold NaN, the layer overflows, or a kernel has read or left what nothing "
            "has written. Run again with FP8MOE_BACKEND=reference; if that is right, report this with the layer's "
            "shapes."
        )


def check_activations(name: str, pair: tuple[torch.Tensor, torch.Tensor], dims: int) -> None:
    """Check `(e4m3 [.., K], f32 [.., K/128])`; the scales may have any strides."""
    q, scales = two_parts(name, pair)
    check_tensor(name, q, dtype=FP8, shape=(None,) * dims)
    check_multiple(f"{name}'s K", q.shape[-1], GROUP)
    wanted = (*q.shape[:-1], q.shape[-1] // GROUP)
    check_tensor(f"{name}'s scales", scales, dtype=torch.float32, shape=wanted, device=q.device, contiguous=False)


def check_weights(
    name: str,
    pair: tuple[torch.Tensor, torch.Tensor],
    dims: int,
    k: int,
    device: torch.device,
    weights: WeightFormat,
) -> None:
    """Check the tensors of weights `[.., N, k]` in this format; `k` has been checked."""
    q, scales = two_parts(name, pair)
    further = 0
    if weights.weight.further:
        check_tensor(name, q, dtype=torch_dtype(weights.weight.dtype), shape=(None,) * dims)
        further = max(weights.weight.further_steps(q.shape, k), 0)
    shape = (*(None,) * (dims - 1), weights.weight.shape(1, k, further)[1])
    check_tensor(name, q, dtype=torch_dtype(weights.weight.dtype), shape=shape, device=device)
    n = weights.weight.channels(q.shape)[-2]
    check_multiple(f"{name}'s N", n, N_MULTIPLE)
    if 0 in q.shape:
        raise InvalidInputError(f"{name} has shape {list(q.shape)}, needs at least one expert. Check what was loaded.")
    wanted = (*q.shape[:-2], *weights.scales.shape(n, k, further))
    check_tensor(f"{name}'s scales", scales, dtype=torch_dtype(weights.scales.dtype), shape=wanted, device=device)


def two_parts(name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values and scales. Raises `InvalidInputError` if `pair` is not a pair."""
    if not isinstance(pair, tuple | list):
        raise InvalidInputError(f"{name} is a {type(pair).__name__}, not a pair. Pass (values, scales).")
    if len(pair) != 2:
        raise InvalidInputError(f"{name} has {len(pair)} parts, needs (values, scales). Pass a pair.")
    return pair[0], pair[1]
