"""The signature of a call's tensors: everything that checks, plan and launches depend on, except the addresses."""

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
MAX_SIGNATURES = 1024  # signatures that an op caches, one for each kind of layer and number of tokens


def described(tensors: Tensors) -> tuple[Signature | None, tuple[int, ...]]:
    """Returns the signature of tensors, and their addresses, 0 for None.

    A signature contains dtype, shape, strides, device, whether autograd expects a gradient, and the alignment of the
    address. Checks that use only these properties have the same result for all tensors that share it.

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
    """Returns the same as `described` without the extension, which takes four times as long."""
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
    """Returns the addresses of tensors, 0 for None."""
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


@functools.cache
def _native() -> tuple[Any, Any] | None:
    """Returns the C extension's function, and the torch interface that it reads tensors with; None without either."""
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
