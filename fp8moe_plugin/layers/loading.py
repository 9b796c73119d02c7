"""Parameters of a layer: their layout, and checks of the tensors that an engine loads into them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp8moe_plugin.checkpoint.shapes import GROUP, ceil_div
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.dtypes import DTYPES
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import SCALE
from fp8moe_plugin.layers.weights import check_scale_values
from fp8moe_plugin.ops.checks import FP8

E4M3_NAN = 0x7F  # with the sign bit cleared
CHUNK_BYTES = 1 << 26  # bounds the temporary memory of checking a weight
SCALE_DTYPES = tuple(getattr(torch, DTYPES[name].torch) for name in FP8_BLOCK.scales.accepted)


def expert_tensors(experts: int, hidden: int, intermediate: int, scale: str = SCALE) -> dict[str, torch.Tensor]:
    """The parameters of a rank's experts, uninitialized: e4m3 `[E, N, K]` and a float32 scale per block of it.

    Args:
        intermediate: channels on this rank, whole blocks.
        scale: what the names of scales end with.
    """
    found = {}
    for name, n, k in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
        found[f"{name}_weight"] = torch.empty(experts, n, k, dtype=FP8)
        found[f"{name}_{scale}"] = torch.empty(experts, n // GROUP, k // GROUP, dtype=torch.float32)
    return found


def check_tensor(what: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Raise `CheckpointError` for a tensor that `parameter` cannot hold unchanged; `what` names it in messages.

    Values of weights are not checked here; `check_loaded` checks the whole parameter.
    """
    wanted = (FP8,) if parameter.dtype == FP8 else SCALE_DTYPES
    if tensor.dtype not in wanted:
        raise CheckpointError(
            f"{what} has dtype {tensor.dtype}, but a block-FP8 checkpoint has {' or '.join(map(str, wanted))}. "
            "If it keeps this layer unquantized, the layer's full name belongs into modules_to_not_convert of its "
            "config.json. Else download the checkpoint again, or serve the unquantized one: --quantization fp8moe "
            "quantizes it."
        )
    if tensor.dim() < 2:
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but must be a matrix: either a weight, or one scale for each "
            "of its 128x128 blocks. Use a block-FP8 checkpoint."
        )
    if parameter.dtype != FP8 and not (tensor.is_meta or parameter.is_meta):
        check_scale_values(f"the scales {what}", in_float32(parameter, tensor))


def rows_of_shard(layer: Any, widths: list[int], shard: Any) -> int:
    """Output channels of a dense layer's tensor in the checkpoint.

    Args:
        layer: the engine's.
        widths: channels of each of the layer's projections, of all ranks.
        shard: the projection's index, or "q", "k" or "v"; a tuple of these; None: all of them.
    """
    if hasattr(layer, "total_num_kv_heads"):
        # The widths count a head once for each rank that holds it; the checkpoint has it once.
        heads = layer.total_num_kv_heads
        widths = [widths[0], heads * layer.head_size, heads * layer.v_head_size]
    if shard is None:
        return sum(widths)
    shards = shard if isinstance(shard, tuple) else (shard,)
    return sum(widths["qkv".index(each) if isinstance(each, str) else each] for each in shards)


def check_size(
    what: str, parameter: torch.Tensor, tensor: torch.Tensor, rows: int, inputs: int, *, smaller: bool = False
) -> None:
    """Raise `CheckpointError` for a dense tensor of another size than config.json implies: engines load a part of it.

    Args:
        smaller: pass smaller tensors, which the engine refuses itself.
    """
    unit = 1 if parameter.dtype == FP8 else GROUP  # channels per element, in both dimensions
    wanted = [ceil_div(rows, unit), ceil_div(inputs, unit)]
    larger = any(size > most for size, most in zip(tensor.shape[-2:], wanted, strict=True))
    if larger or (not smaller and list(tensor.shape) != wanted):
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but must have {wanted} for {rows} output and {inputs} input "
            "channels. Check that config.json belongs to the weights."
        )


def in_float32(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A checked tensor for an engine's loader: scales in float32, because some loaders copy the bytes of E8M0."""
    return tensor.float() if parameter.dtype == torch.float32 else tensor


def check_expert_shape(
    what: str, parameter: torch.Tensor, tensor: torch.Tensor, shard_id: str, hidden: int, intermediate: int
) -> None:
    """Raise `CheckpointError` unless w1, w2 or w3 of an expert has the shape that config.json implies."""
    unit = 1 if parameter.dtype == FP8 else GROUP  # channels per element, in both dimensions
    sizes = [ceil_div(size, unit) for size in (intermediate, hidden)]
    wanted = sizes[::-1] if shard_id == "w2" else sizes
    if list(tensor.shape[-2:]) != wanted:
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but must have {wanted} for {intermediate} "
            "intermediate channels. Check that config.json belongs to the weights."
        )


@contextmanager
def shape_errors(prefix: str, tensor: torch.Tensor) -> Iterator[None]:
    """Turn the exceptions of an engine's loader about a tensor of a wrong shape into `CheckpointError`."""
    try:
        yield
    except (AssertionError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{prefix}: a tensor of shape {list(tensor.shape)} does not fit the "
            f"layer: {error or type(error).__name__}. Check that config.json belongs to the weights."
        ) from error


def check_loaded(layer: str, name: str, parameter: torch.Tensor) -> None:
    """Raise `CheckpointError` if a parameter holds NaN (or a float32 one, infinity).

    `checks.poison` filled it with NaN before loading, so NaN also means that a tensor did not arrive.
    """
    if not holds_nan(parameter):
        return
    where = ""
    if parameter.dim() == 3:
        where = f" of local expert {next(e for e, part in enumerate(parameter) if holds_nan(part))}"
    raise CheckpointError(
        f"{layer}.{name}{where}: a tensor is missing from the checkpoint, or holds NaN. Check that every file in "
        "model.safetensors.index.json is present and complete, or download the checkpoint again."
    )


def holds_nan(parameter: torch.Tensor) -> bool:
    if parameter.dtype == torch.float32:
        return not bool(parameter.isfinite().all())
    parts = parameter.data.view(torch.uint8).flatten().split(CHUNK_BYTES)
    return any(bool(((part & 0x7F) == E4M3_NAN).any()) for part in parts)
