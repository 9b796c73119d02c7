"""Loading of experts and MLPs whose channels do not divide into whole scale blocks: the last ranks are zero-padded.

`shapes.local_intermediate` gives the number of channels on a rank. vLLM's loaders split tensors into equal parts, so
the loaders here first pad the checkpoint's tensor to whole blocks for every rank.
"""

import functools
import logging
from typing import Any

import torch

from fp8moe_plugin.checkpoint.shapes import GROUP, ceil_div, local_intermediate, padding_share
from fp8moe_plugin.errors import CheckpointError

logger = logging.getLogger("fp8moe")


@functools.cache  # logs once for all layers
def announce_padding(what: str, intermediate: int, ranks: int) -> None:
    """Log what padding to whole scale blocks costs when `ranks` ranks share the channels of an "expert" or "MLP"."""
    cost, whole = padding_share(intermediate, ranks), padding_share(intermediate, 1)
    logger.warning(
        "fp8moe pads the %d intermediate channels of an %s to whole scale blocks of %d (%d-way split): a rank holds %d "
        "channels instead of %g, which takes %.1f%% more memory and compute.%s",
        *(intermediate, what, GROUP, ranks, local_intermediate(intermediate, ranks), intermediate / ranks, 100 * cost),
        f" With --enable-expert-parallel it would be {whole:.1%}." if what == "expert" and whole < cost else "",
    )


def load_experts(
    layer: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """A `weight_loader` for experts whose scale blocks cannot be split equally over the ranks: pads, then calls vLLM's.

    Args:
        loaded_weight: e4m3 weights or float32 scales of all channels of w1, w2 or w3.
    Raises:
        CheckpointError: see `padded_to_blocks`.
    """
    moe, dim = layer.moe_config, -1 if shard_id == "w2" else -2
    what = f"{weight_name} ({shard_id} of expert {expert_id})"
    padded = padded_to_blocks(what, param, loaded_weight, dim, moe.intermediate_size, moe.tp_size, moe.tp_rank)
    return layer.weight_loader(param, padded, weight_name, shard_id, expert_id, return_success=return_success)


load_experts.supports_moe_loading = True  # type: ignore[attr-defined]  # some of vLLM's models check for it


def load_gate_up(
    layer: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: int | None = None
) -> None:
    """The same for the `gate_up_proj` of an MLP, whose `output_sizes` are already rounded up to whole blocks."""
    sizes = layer.output_size // 2, layer.tp_size, layer.tp_rank
    layer.weight_loader_v2(param, padded_to_blocks(layer.prefix, param, loaded_weight, -2, *sizes), loaded_shard_id)


def load_down(layer: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """The same for the `down_proj` of an MLP."""
    sizes = layer.input_size, layer.tp_size, layer.tp_rank
    layer.weight_loader_v2(param, padded_to_blocks(layer.prefix, param, loaded_weight, -1, *sizes))


def padded_to_blocks(
    what: str, param: torch.Tensor, tensor: torch.Tensor, dim: int, intermediate: int, ranks: int, rank: int
) -> torch.Tensor:
    """A checkpoint's tensor, zero-padded so that equal parts for the ranks are whole scale blocks.

    The parts of other ranks are zero in it, too, because reading them from the file would be wasted work.

    Args:
        what: the tensor's name, for the message.
        param: the parameter it is loaded into: e4m3 weights or float32 scales.
        dim: -1 or -2, the dimension of the intermediate channels.
    Raises:
        CheckpointError: the size along `dim` is not the one that config.json implies.
    """
    unit = GROUP if param.dtype == torch.float32 else 1  # channels per element
    wanted = ceil_div(intermediate, unit)
    if tensor.shape[dim] != wanted:
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but dimension {dim} must be {wanted} for {intermediate} "
            "intermediate channels. Check that config.json belongs to the weights."
        )
    part = local_intermediate(intermediate, ranks) // unit
    start, end = (min(at * part, wanted) for at in (rank, rank + 1))
    padding = (start, ranks * part - end)
    return torch.nn.functional.pad(tensor.narrow(dim, start, end - start), (0, 0) * (-1 - dim) + padding)
