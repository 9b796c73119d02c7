"""The signature of a call's tensors: all that its checks, its plan and its launches depend on, except the addresses."""

import functools
import importlib
import logging
from typing import Any

import torch
from torch.autograd import forward_ad

from fp8moe_plugin.logs import log_once

Tensors = tuple[torch.Tensor | None, ...]
Signature = bytes | tuple[Any, ...]
SLOWER = "tensors are read by Python, which costs the host about 6 us more for each call outside CUDA graphs"
MAX_SIGNATURES = 1024  # that an op remembers; one for each kind of layer and number of tokens


def described(tensors: Tensors) -> tuple[Signature | None, tuple[int, ...]]:
    """The signature of tensors, and their addresses, 0 for None.

    It has dtype, shape, strides and device, whether autograd expects a gradient, and how the address is aligned. Checks
    that look at no more pass or fail alike for all tensors that share it.

    Returns:
        None and no addresses if an argument is not a tensor, has no storage, or may have a tangent.
    """
    if forward_ad._current_level >= 0:
        return None, ()
    grad = torch.is_grad_enabled()
    if native := _native():
        describe, exchange = native
        return describe(exchange, tensors, grad) or (None, ())
    return described_in_python(tensors, grad)


def described_in_python(tensors: Tensors, grad: bool) -> tuple[Signature | None, tuple[int, ...]]:
    """`described` without the extension, which takes four times as long."""
    parts: list[Any] = [grad]
    try:
        addresses = addresses_of(tensors)
        for t, address in zip(tensors, addresses, strict=True):
            if t is None:
                parts.append(None)
                continue
            # A fake tensor has no address.
            parts += (t.dtype, t.shape, t.stride(), t.device, address % 16 if address else None)
            if grad:
                parts.append(t.requires_grad)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, ()
    return tuple(parts), addresses


def addresses_of(tensors: Tensors) -> tuple[int, ...]:
    """The addresses of tensors, 0 for None."""
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


@functools.cache
def _native() -> tuple[Any, Any] | None:
    """The C extension's function, and torch's interface that it reads tensors by; None without either."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        log_once(logging.WARNING, f"{SLOWER}: PyTorch {torch.__version__} lacks DLPack's exchange interface")
        return None
    try:
        extension = importlib.import_module("fp8moe_plugin.ops._signature")
    except ImportError as error:
        log_once(logging.WARNING, f"{SLOWER}: install a wheel, or build with a C compiler ({error})")
        return None
    return extension.describe, exchange
