"""The logits of a router, for steps of few tokens."""

from typing import NamedTuple

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.sm90.router import BLOCK_EXPERTS, BLOCK_TOKENS, STEP, router_gemm_launch
from fp8moe_plugin.ops import devices, router_reference, workspace
from fp8moe_plugin.ops.checks import CheckedOnce, check_multiple, check_tensor
from fp8moe_plugin.ops.devices import Device, prepares

MOST_TOKENS = 65535 * BLOCK_TOKENS  # a CUDA grid has at most 65535 blocks along y
MEASURED_UP_TO = 256  # tokens, docs/experiments/067-router-gemm.md


def router_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns `x @ weight.T` of unquantized operands, optimized for few tokens and the experts of one router.

    The weights are read again for each 16 tokens.

    Args:
        x: bfloat16 `[T, K]`, T at most 1,048,560 and K a multiple of 32.
        weight: bfloat16 `[E, K]`.
    Returns:
        bfloat16 `[T, E]`, summed in float32. A token's logits do not depend on the other tokens.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device, too many tokens, or a tensor that requires a gradient.
        UnsupportedError: Triton kernels serve this GPU.
    """
    facts, addresses = _check_call(x, weight)
    device = devices.sm90_device_of(x)
    if device is None:
        return router_reference.router_gemm(x, weight)
    logits = workspace.empty((facts.tokens, facts.experts), torch.bfloat16, x.device)
    if facts.tokens and facts.experts:
        prepared_router_gemm(device, *facts)((*addresses, logits.data_ptr()))
    return logits


def fastest_up_to(experts: int, multiprocessors: int) -> int:
    """Returns the largest number of tokens with at most one block per SM, up to what was measured against torch."""
    return min(multiprocessors // ceil_div(experts, BLOCK_EXPERTS) * BLOCK_TOKENS, MEASURED_UP_TO)


class RouterFacts(NamedTuple):
    """The sizes of a call of `router_gemm`."""

    tokens: int
    experts: int
    k: int


@CheckedOnce
def _check_call(x: torch.Tensor, weight: torch.Tensor) -> RouterFacts:
    """Raise `InvalidInputError` unless these are valid tensors for `router_gemm`."""
    check_tensor("x", x, dtype=torch.bfloat16, shape=(None, None))
    tokens, k = x.shape
    if tokens > MOST_TOKENS:
        raise InvalidInputError(f"x has {tokens} tokens, the kernel takes up to {MOST_TOKENS}. Call torch's linear.")
    check_multiple("x's last dimension", k, STEP)
    check_tensor("weight", weight, dtype=torch.bfloat16, shape=(None, k), device=x.device)
    return RouterFacts(tokens, len(weight), k)


@prepares("router_gemm")
def prepared_router_gemm(device: Device, tokens: int, experts: int, k: int) -> Prepared:
    """Returns a callable that launches `router_gemm`, given the addresses of x, weight and logits."""
    x, weight, logits = map(Slot, range(3))
    return device.prepare([router_gemm_launch(x, weight, logits, tokens, experts, k)])
