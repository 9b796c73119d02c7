"""What vLLM's loader does not do: notice tensors that a checkpoint lacks, and share experts in whole scale blocks."""

from typing import Any

import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.shapes import GROUP, ceil_div, local_intermediate

E4M3_NAN = 0x7F  # with the sign bit cleared
BYTES_AT_ONCE = 1 << 26  # of a weight: bounds the memory that looking at it takes


def poison(parameter: torch.Tensor) -> None:
    """Fill an e4m3 or float32 parameter with NaN, for `check_loaded` to find what no tensor was loaded into."""
    if parameter.dtype == torch.float32:
        parameter.data.fill_(float("nan"))
    else:
        parameter.data.view(torch.uint8).fill_(E4M3_NAN)


def check_loaded(layer: str, name: str, parameter: torch.Tensor) -> None:
    """Raise `CheckpointError` if a poisoned parameter still holds NaN anywhere (or a scale infinity)."""
    if not holds_nan(parameter):
        return
    where = ""
    if parameter.dim() == 3:
        where = f" of local expert {next(e for e, part in enumerate(parameter) if holds_nan(part))}"
    raise CheckpointError(
        f"{layer}.{name}{where}: a tensor is missing from the checkpoint, or holds NaN. "
        "Check that every shard listed in model.safetensors.index.json is there and whole, and download it again."
    )


def holds_nan(parameter: torch.Tensor) -> bool:
    if parameter.dtype == torch.float32:
        return not bool(parameter.isfinite().all())
    parts = parameter.data.view(torch.uint8).flatten().split(BYTES_AT_ONCE)
    return any(bool(((part & 0x7F) == E4M3_NAN).any()) for part in parts)


def load_whole_blocks(
    layer: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """vLLM's `weight_loader` of a layer of experts, where their scale blocks cannot be shared equally.

    vLLM cuts a tensor into equal parts, one a rank: here it gets one that reaches beyond the checkpoint's, so that the
    parts are `local_intermediate` channels.

    Args:
        loaded_weight: e4m3 weights or float32 scales of the whole of w1, w2 or w3, of one expert `[N, K]` or of all.
    Raises:
        CheckpointError: the tensor has not as many intermediate channels, or scale blocks of them, as config.json says.
    """
    moe = layer.moe_config
    unit = GROUP if "scale" in weight_name else 1  # channels of an element
    channels = -1 if shard_id == "w2" else -2  # the dimension
    wanted = ceil_div(moe.intermediate_size, unit)
    if loaded_weight.shape[channels] != wanted:
        raise CheckpointError(
            f"{weight_name} {shard_id} of expert {expert_id} has shape {list(loaded_weight.shape)}, an intermediate "
            f"size of {moe.intermediate_size} makes {wanted}. Check that config.json belongs to the weights."
        )
    part = local_intermediate(moe.intermediate_size, moe.tp_size) // unit
    extended = extend(loaded_weight, channels, moe.tp_rank * part, part, moe.tp_size * part)
    return layer.weight_loader(param, extended, weight_name, shard_id, expert_id, return_success=return_success)


load_whole_blocks.supports_moe_loading = True  # type: ignore[attr-defined]  # some models of vLLM look for it


def extend(tensor: torch.Tensor, dim: int, start: int, part: int, total: int) -> torch.Tensor:
    """`total` elements along `dim` (-1 or -2), of which `part` from `start` on are as in `tensor` where it has them.

    All others are zero: what no one looks at is not read from the file.
    """
    start, end = (min(at, tensor.shape[dim]) for at in (start, start + part))
    around = (start, total - end)
    return torch.nn.functional.pad(tensor.narrow(dim, start, end - start), (0, 0) * (-1 - dim) + around)
