"""Ranks share the channels within an expert or an MLP in whole scale blocks; the last ranks' may be zeros.

`shapes.local_intermediate` says how many; here is how they are loaded where vLLM's equal parts are no whole blocks.
"""

import functools
import logging
from typing import Any

import torch

from fp8moe_plugin.checkpoint.shapes import GROUP, ceil_div, local_intermediate, padding_share
from fp8moe_plugin.errors import CheckpointError

logger = logging.getLogger("fp8moe")


@functools.cache  # one line is enough
def announce_padding(what: str, intermediate: int, ranks: int) -> None:
    """Say what it costs that `ranks` ranks hold whole blocks of the channels of `what`: "expert" or "MLP"."""
    cost, whole = padding_share(intermediate, ranks), padding_share(intermediate, 1)
    logger.warning(
        "fp8moe holds the %d intermediate channels of an %s in whole scale blocks of %d: a rank's share of 1/%d is "
        "%d channels instead of %g, so that it takes %.1f%% more memory and work.%s",
        *(intermediate, what, GROUP, ranks, local_intermediate(intermediate, ranks), intermediate / ranks, 100 * cost),
        f" With --enable-expert-parallel it is {whole:.1%}." if what == "expert" and whole < cost else "",
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
    """vLLM's `weight_loader` of a layer of experts whose scale blocks its ranks cannot share equally.

    Args:
        loaded_weight: e4m3 weights or float32 scales of all channels of w1, w2 or w3.
    Raises:
        CheckpointError: of `extended`.
    """
    moe, dim = layer.moe_config, -1 if shard_id == "w2" else -2
    what = f"{weight_name} ({shard_id} of expert {expert_id})"
    whole = extended(what, param, loaded_weight, dim, moe.intermediate_size, moe.tp_size, moe.tp_rank)
    return layer.weight_loader(param, whole, weight_name, shard_id, expert_id, return_success=return_success)


load_experts.supports_moe_loading = True  # type: ignore[attr-defined]  # some models of vLLM look for it


def load_gate_up(
    layer: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: int | None = None
) -> None:
    """The same for `gate_up_proj` of an MLP, whose `output_sizes` are already those of whole blocks."""
    sizes = layer.output_size // 2, layer.tp_size, layer.tp_rank
    layer.weight_loader_v2(param, extended(layer.prefix, param, loaded_weight, -2, *sizes), loaded_shard_id)


def load_down(layer: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """The same for its `down_proj`."""
    sizes = layer.input_size, layer.tp_size, layer.tp_rank
    layer.weight_loader_v2(param, extended(layer.prefix, param, loaded_weight, -1, *sizes))


def extended(
    what: str, param: torch.Tensor, tensor: torch.Tensor, dim: int, intermediate: int, ranks: int, rank: int
) -> torch.Tensor:
    """A checkpoint's tensor, extended to whole scale blocks for every rank: vLLM cuts it into equal parts, one a rank.

    Of other ranks' parts there is nothing in it but zeros: what no one looks at is not read from the file.

    Args:
        what: the tensor's name, for the message.
        param: what it is loaded into: weights e4m3, or scales float32.
        dim: -1 or -2, along which are the intermediate channels.
    Raises:
        CheckpointError: the tensor has not as many of them, or of their scale blocks, as config.json says.
    """
    unit = GROUP if param.dtype == torch.float32 else 1  # channels of an element
    wanted = ceil_div(intermediate, unit)
    if tensor.shape[dim] != wanted:
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, {intermediate} intermediate channels make {wanted}. "
            "Check that config.json belongs to the weights."
        )
    part = local_intermediate(intermediate, ranks) // unit
    start, end = (min(at * part, wanted) for at in (rank, rank + 1))
    around = (start, ranks * part - end)
    return torch.nn.functional.pad(tensor.narrow(dim, start, end - start), (0, 0) * (-1 - dim) + around)
