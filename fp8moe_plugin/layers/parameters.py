"""The parameters of quantized layers, which carry their format and role: a scale is not recognized by its dtype."""

from typing import TypeVar

import torch

from fp8moe_plugin.formats.spec import SCALE, WEIGHT
from fp8moe_plugin.formats.weight_format import Role, TensorFormat, WeightFormat
from fp8moe_plugin.ops.checks import poison, torch_dtype

# vLLM copies these attributes to the parameters of a reload.
FORMAT, ROLE, STORED = "fp8moe_format", "fp8moe_role", "fp8moe_stored"

Tensor = TypeVar("Tensor", bound=torch.Tensor)


def marked(tensor: Tensor, weights: WeightFormat, role: Role, stored: WeightFormat | None = None) -> Tensor:
    """Sets the format and the role of a tensor, and its format in the checkpoint if that differs; returns it."""
    setattr(tensor, FORMAT, weights)
    setattr(tensor, ROLE, role)
    setattr(tensor, STORED, stored or weights)
    return tensor


def unset(parameter: Tensor) -> Tensor:
    """Fill a parameter with NaN, so that a tensor that does not arrive is noticed; returns it.

    Integers have no NaN, but their scales do. They become zeros, because kernels run on them if an engine loads no
    weights (`--load-format dummy`), and not every byte is a valid exponent.
    """
    if parameter.is_floating_point():
        poison(parameter)
    else:
        parameter.data.zero_()
    return parameter


def format_of(parameter: torch.Tensor) -> WeightFormat:
    found: WeightFormat = getattr(parameter, FORMAT)
    return found


def role_of(parameter: torch.Tensor) -> Role:
    found: Role = getattr(parameter, ROLE)
    return found


def stored_format(parameter: torch.Tensor) -> WeightFormat:
    """Returns the format in the checkpoint."""
    found: WeightFormat = getattr(parameter, STORED)
    return found


def tensor_format(parameter: torch.Tensor) -> TensorFormat:
    return format_of(parameter).tensor(role_of(parameter))


def stored_tensor_format(parameter: torch.Tensor) -> TensorFormat:
    return stored_format(parameter).tensor(role_of(parameter))


def empty_tensor(weights: WeightFormat, role: Role, n: int, k: int, *experts: int) -> torch.Tensor:
    """Returns an uninitialized tensor for a weight `[*experts, n, k]`, or for its scales."""
    tensor = weights.tensor(role)
    return marked(torch.empty(*experts, *tensor.shape(n, k), dtype=torch_dtype(tensor.dtype)), weights, role)


def empty_pair(weights: WeightFormat, n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uninitialized tensors for a weight `[n, k]` and its scales on a device."""
    with device:
        return empty_tensor(weights, Role.WEIGHT, n, k), empty_tensor(weights, Role.SCALES, n, k)


def expert_tensors(
    weights: WeightFormat, experts: int, hidden: int, intermediate: int, scale: str = SCALE
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a rank's experts, uninitialized: weights and scales of w13 and of w2.

    Args:
        intermediate: channels on this rank, whole blocks.
        scale: the suffix of scales' names.
    """
    return {
        f"{name}_{suffix}": empty_tensor(weights, role, n, k, experts)
        for name, n, k in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate))
        for role, suffix in ((Role.WEIGHT, WEIGHT), (Role.SCALES, scale))
    }


def bias_tensors(experts: int, hidden: int, intermediate: int) -> dict[str, torch.Tensor]:
    """Returns both biases of a rank's experts, uninitialized; `intermediate`: channels on this rank."""
    return {
        f"{name}_bias": torch.empty(experts, rows, dtype=torch.float32)
        for name, rows in (("w13", 2 * intermediate), ("w2", hidden))
    }


def is_bias(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter of experts is a bias, the only one without a format and a role."""
    return not hasattr(parameter, ROLE)


def rank_bias(bias: torch.Tensor, own: torch.Tensor, shard_id: str, rank: int) -> torch.Tensor:
    """Returns a rank's part of the bias of w1, w2 or w3 of an expert: of w2's, all on the first rank, else zeros.

    Args:
        own: the part of the parameter, to whose size the bias is zero-padded.
    """
    if shard_id == "w2":
        part = bias if rank == 0 else torch.zeros_like(bias)
    else:
        part = bias[rank * len(own) : (rank + 1) * len(own)]
    return torch.nn.functional.pad(part, (0, len(own) - len(part)))
