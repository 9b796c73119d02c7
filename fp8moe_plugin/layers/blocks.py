"""Loading of experts and MLPs whose channels do not divide into whole scale blocks: the last ranks are zero-padded.

`shapes.local_intermediate` gives the number of channels on a rank. The engines' loaders split tensors into equal parts,
so the loaders here first pad the checkpoint's tensor to whole blocks for every rank.
"""

import functools
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from fp8moe_plugin.checkpoint.shapes import (
    is_down,
    is_gate_up,
    local_intermediate,
    padding_share,
)
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import WHOLE_ROW, ceil_div
from fp8moe_plugin.layers.parameters import tensor_format
from fp8moe_plugin.settings import NAME

logger = logging.getLogger("fp8moe")


@functools.cache  # logs once for all layers
def announce_padding(what: str, intermediate: int, ranks: int, whole_experts: str = "") -> None:
    """Log what padding to whole scale blocks costs when `ranks` ranks share the channels of an expert or an MLP.

    Args:
        what: "expert" or "MLP".
        whole_experts: the engine's option that gives each rank whole experts.
    """
    cost, whole = padding_share(intermediate, ranks), padding_share(intermediate, 1)
    logger.warning(
        "fp8moe pads the %d intermediate channels of an %s to whole scale blocks of %d (%d-way split): a rank holds %d "
        "channels instead of %g, which takes %.1f%% more memory and compute.%s",
        *(intermediate, what, GROUP, ranks, local_intermediate(intermediate, ranks), intermediate / ranks, 100 * cost),
        f" With {whole_experts} it would be {whole:.1%}." if whole_experts and whole < cost else "",
    )


def whole_blocks(
    prefix: str, layer: Any, rank: int, ranks: int, inputs: int, outputs: list[int], loader: MethodType
) -> tuple[int, list[int], MethodType]:
    """Returns this rank's input channels, output channels and loader of a layer.

    The channels between gate_up_proj and down_proj of an MLP, recognized by name, are padded to whole blocks. If only
    one of the two is quantized, their channels differ and the first step fails with an error.

    Args:
        layer: a linear layer of an engine, whose `weight_loader_v2` splits tensors by `output_sizes`.
        inputs, outputs, loader: the engine's own, returned unchanged unless padding is needed.
    """
    if is_gate_up(prefix) and outputs == outputs[:1] * 2 and outputs[0] % GROUP:
        width = outputs[0] * ranks
        part = local_intermediate(width, ranks)
        announce_padding("MLP", width, ranks)
        layer.output_sizes = [part * ranks] * 2  # the engine's loader divides these among the ranks
        return inputs, [part] * 2, MethodType(_padding_loader(prefix, -2, width, rank, ranks), layer)
    if is_down(prefix) and inputs % GROUP:
        width = inputs * ranks
        load = _padding_loader(prefix, -1, width, rank, ranks)
        return local_intermediate(width, ranks), outputs, MethodType(load, layer)
    return inputs, outputs, loader


def _padding_loader(prefix: str, dim: int, width: int, rank: int, ranks: int) -> Callable[..., None]:
    """Returns a `weight_loader` for one half of an MLP of `width` channels. It pads, then calls the engine's loader.

    It raises `CheckpointError`, see `padded_to_blocks`.
    """

    def pad_and_load(
        layer: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        padded = padded_to_blocks(prefix, param, loaded_weight, dim, width, ranks, rank)
        layer.weight_loader_v2(param, padded, *args, **kwargs)

    return pad_and_load


def unsupported_shape(prefix: str, refusal: str, ranks_option: str | None) -> UnsupportedError:
    """Returns the exception for a rank's part of a dense layer that is not supported.

    Args:
        ranks_option: the engine's option for the number of ranks; None if the layer is not supported with any.
    """
    listed = "a block-FP8 checkpoint that keeps the layer in BF16 and lists it in modules_to_not_convert"
    advice = f"Use a smaller {ranks_option}, or {listed}" if ranks_option else f"Serve it without --quantization {NAME}"
    return UnsupportedError(f"{prefix} {refusal}. {advice}.")


def padded_to_blocks(
    what: str, param: torch.Tensor, tensor: torch.Tensor, dim: int, intermediate: int, ranks: int, rank: int
) -> torch.Tensor:
    """Returns a checkpoint's tensor, zero-padded so that equal parts for the ranks are whole scale blocks.

    The parts of other ranks are zero, too: reading them from the file would be wasted work.

    Args:
        what: the tensor's name in the message.
        param: the parameter that it is loaded into.
        dim: -1 or -2, the dimension of the intermediate channels.
    Raises:
        CheckpointError: the size along `dim` is not the one that config.json implies.
    """
    unit = tensor_format(param).block[dim]  # channels for each element
    if unit == WHOLE_ROW:  # ranks share the rows, but not these channels
        return tensor
    wanted = ceil_div(intermediate, unit)
    if tensor.shape[dim] != wanted:
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but dimension {dim} must be {wanted} for {intermediate} "
            "intermediate channels. Check that config.json belongs to the weights."
        )
    part = local_intermediate(intermediate, ranks) // unit
    start, end = (min(at * part, wanted) for at in (rank, rank + 1))
    padding = (0, 0) * (-1 - dim) + (start, ranks * part - end)
    here = tensor.narrow(dim, start, end - start)
    # As bytes, because E8M0 has no zero to pad with; the weights that such scales belong to are zero.
    values = here.view(torch.uint8) if here.element_size() == 1 else here
    return torch.nn.functional.pad(values, padding).view(tensor.dtype)
