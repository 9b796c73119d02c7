"""Checks of the tensors that an engine loads into the parameters of a layer."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.parameters import role_of, stored_format, stored_tensor_format
from fp8moe_plugin.layers.weights import check_scale_values
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops.checks import torch_dtype

# A byte is NaN if all these bits are set.
NAN_BITS = {torch.float8_e4m3fn: 0x7F, torch.float8_e8m0fnu: 0xFF}
CHUNK_BYTES = 1 << 26  # bounds the temporary memory of checking a weight


def announce_input_scales(spec: QuantSpec) -> None:
    """Log that the static scales of activations in a checkpoint have no effect, if it has some."""
    if spec.input_scales:
        log_once(
            logging.INFO,
            "static input scales of the checkpoint are not used: activations are quantized at run time, with a scale "
            "for each token and 128 channels",
        )


def per_row(parameter: torch.Tensor, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns scales as one for each row, if the format has these and the checkpoint has one for the whole weight.

    Args:
        rows: output channels of the weight in the checkpoint.
    """
    scales = stored_tensor_format(parameter).block == FP8_CHANNEL.scales.block
    return tensor.reshape(1, 1).expand(rows, 1) if scales and tensor.numel() == 1 else tensor


def check_tensor(what: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Raise `CheckpointError` for a tensor that `parameter` cannot hold unchanged; `what` names it in messages.

    Values of weights are not checked here; `check_loaded` checks the whole parameter. Those of MXFP4's exponents are
    checked once their codes have arrived, too (`check_exponents` in recode.py).
    """
    weights, role = stored_format(parameter), role_of(parameter)
    wanted = [torch_dtype(name) for name in weights.tensor(role).accepted]
    if tensor.dtype not in wanted:
        raise CheckpointError(
            f"{what} has dtype {tensor.dtype}, but a {weights.name} checkpoint has {' or '.join(map(str, wanted))}. "
            "If this layer stays unquantized, its full name must be in the quantization_config's list of unquantized "
            "layers (ignored_layers, or modules_to_not_convert if that is missing; with compressed-tensors ignore), in "
            "config.json or in what overrides it, such as hf_overrides. Else download the checkpoint again, or serve "
            "the unquantized one: --quantization fp8moe quantizes it."
        )
    if tensor.dim() < 2:
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but must be a matrix: either a weight, or one scale for each "
            f"of its {weights.scales.part}s. Use a {weights.name} checkpoint."
        )
    if role is Role.SCALES and weights is not MXFP4 and not (tensor.is_meta or parameter.is_meta):
        check_scale_values(f"the scales {what}", as_kept(parameter, tensor))


def rows_of_shard(layer: Any, widths: list[int], shard: Any) -> int:
    """Returns the output channels of a dense layer's tensor in the checkpoint.

    Args:
        layer: the engine's layer.
        widths: channels of each projection of the layer, on all ranks.
        shard: the projection's index, or "q", "k" or "v"; a tuple of these; None: all projections.
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
    """Raise `CheckpointError` if a dense tensor does not have the size that config.json implies.

    Engines would load a part of a larger tensor.

    Args:
        smaller: do not check for smaller tensors, which the engine refuses.
    """
    wanted = stored_tensor_format(parameter).shape(rows, inputs)
    larger = any(size > most for size, most in zip(tensor.shape[-2:], wanted, strict=True))
    if larger or (not smaller and list(tensor.shape) != wanted):
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but must have {wanted} for {rows} output and {inputs} input "
            "channels. Check that config.json belongs to the weights."
        )


def as_kept(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a checked tensor in the dtype of its format, because some engines' loaders copy bytes.

    vLLM's DeepSeek-V4 passes the bits of E8M0 scales of experts as integers, of experts in block FP8, too.
    """
    dtype = torch_dtype(stored_tensor_format(parameter).dtype)
    if dtype == torch.float32 and tensor.dtype == torch.uint8:
        tensor = tensor.view(torch.float8_e8m0fnu)
    if tensor.dtype == dtype or (dtype.is_floating_point and tensor.dtype.is_floating_point):
        return tensor.to(dtype)
    return tensor.view(dtype)  # integers stand for the bits of a format


def check_expert_shape(
    what: str, parameter: torch.Tensor, tensor: torch.Tensor, shard_id: str, hidden: int, intermediate: int
) -> None:
    """Raise `CheckpointError` unless w1, w2 or w3 of an expert has the shape that config.json implies."""
    sizes = (hidden, intermediate) if shard_id == "w2" else (intermediate, hidden)
    wanted = stored_tensor_format(parameter).shape(*sizes)
    if list(tensor.shape[-2:]) != wanted:
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but must have {wanted} for {intermediate} "
            "intermediate channels. Check that config.json belongs to the weights."
        )


@contextmanager
def shape_errors(prefix: str, tensor: torch.Tensor) -> Iterator[None]:
    """Convert the exceptions of an engine's loader about a tensor of a wrong shape to `CheckpointError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{prefix}: a tensor of shape {list(tensor.shape)} does not fit the "
            f"layer: {error or type(error).__name__}. Check that config.json belongs to the weights."
        ) from error


def check_loaded(layer: str, name: str, parameter: torch.Tensor) -> None:
    """Raise `CheckpointError` if a parameter holds NaN (or a float32 one, infinity).

    `unset` filled it with NaN before loading, so NaN also means that a tensor did not arrive.
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
    """Returns whether a tensor holds NaN, or a float32 tensor infinity."""
    bits = NAN_BITS.get(parameter.dtype)
    if bits is None:
        return parameter.is_floating_point() and not bool(parameter.isfinite().all())
    parts = parameter.data.view(torch.uint8).flatten().split(CHUNK_BYTES)
    return any(bool(((part & bits) == bits).any()) for part in parts)


def checked_bias(what: str, parameter: torch.Tensor, tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Returns a bias in float32.

    Args:
        shape: that of the bias in the checkpoint, such as the rows of one projection.
    Raises:
        CheckpointError: it has another shape, is not a float, or holds NaN or infinity.
    """
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)} and dtype {tensor.dtype}, but must be a float for each of "
            f"{shape[-1]} channels. Check that config.json belongs to the weights."
        )
    if not (tensor.is_meta or parameter.is_meta) and not tensor.isfinite().all():
        raise CheckpointError(f"{what} holds NaN or infinity, so it is damaged. Download the checkpoint again.")
    return tensor.float()
