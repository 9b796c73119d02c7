"""Notice tensors that a checkpoint lacks, which vLLM's loader does not for layers with a quantization method."""

import torch

from fp8moe_plugin.errors import CheckpointError

E4M3_NAN = 0x7F  # with the sign bit cleared
BYTES_AT_ONCE = 1 << 26  # of a weight: bounds the memory that looking at it takes


def check_loaded(layer: str, name: str, parameter: torch.Tensor) -> None:
    """Raise `CheckpointError` if an e4m3 or float32 parameter still holds NaN anywhere (or a scale infinity).

    Before anything was loaded into it, `checks.poison` has filled it with NaN.
    """
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
