"""The tensors of gpt-oss's experts: engines pass those of all experts at once, cut for the rank in groups of a scale.

Gate and up rows alternate in w13. The parts are loaded expert by expert, by the loaders of experts in MXFP4, and
zero-padded to whole scale blocks.
"""

import torch

from fp8moe_plugin.checkpoint.gpt_oss import rank_channels
from fp8moe_plugin.checkpoint.shapes import local_intermediate
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.pack import Share

SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}  # by the beginning of a parameter's name; their rows alternate
Part = tuple[int, str, torch.Tensor]  # local expert; "w1", "w2" or "w3"; its tensor


def split(what: str, parameter: str, tensor: torch.Tensor, experts: int) -> list[Part]:
    """Returns the tensors of each projection and expert.

    Args:
        what: the tensor's name in messages.
        parameter: that of its parameter.
        experts: on this rank.
    Raises:
        CheckpointError: it does not hold so many experts. The shape of each part is not checked.
    """
    shards = SHARDS[parameter.partition("_")[0]]
    if tensor.dim() < 2 or len(tensor) != experts or tensor.shape[1] % len(shards):
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but must be that of {experts} experts"
            f"{' with alternating gate and up rows' if len(shards) > 1 else ''}. Check that config.json belongs to the "
            "weights."
        )
    return [
        (expert, shard, of_expert[row :: len(shards)])
        for expert, of_expert in enumerate(tensor)
        for row, shard in enumerate(shards)
    ]


def share_of(intermediate: int, ranks: int, rank: int) -> tuple[int, Share]:
    """Returns the channels in a rank's tensors, and the share for loaders, which take all of them and pad.

    Args:
        intermediate: channels on all ranks.
    """
    return rank_channels(intermediate, ranks, rank), Share(local_intermediate(intermediate, ranks), 1, 0)


def copy_part(own: torch.Tensor, shard_id: str, tensor: torch.Tensor) -> None:
    """Copy a tensor of w1, w2 or w3 to an expert's part of a parameter, zero-padded to its size."""
    own = own if shard_id == "w2" else own.chunk(2)[shard_id == "w3"]
    missing = (size - given for size, given in zip(own.shape[::-1], tensor.shape[::-1], strict=True))
    padding = [side for size in missing for side in (0, size)]
    values = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # e4m3 has no padding in torch
    own.copy_(torch.nn.functional.pad(values, padding).view(tensor.dtype))
