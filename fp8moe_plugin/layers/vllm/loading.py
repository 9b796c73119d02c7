"""Notice tensors that a checkpoint lacks, which vLLM's loader does not for layers with a quantization method."""

import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.ops.checks import GROUP

E4M3_NAN = 0x7F  # with the sign bit cleared


def poison(parameter: torch.Tensor) -> None:
    """Fill an e4m3 or float32 parameter with NaN, for `check_loaded` to find what no tensor was loaded into."""
    if parameter.dtype == torch.float32:
        parameter.data.fill_(float("nan"))
    else:
        parameter.data.view(torch.uint8).fill_(E4M3_NAN)


def check_loaded(layer: str, name: str, parameter: torch.Tensor) -> None:
    """Raise `CheckpointError` if a poisoned parameter still holds NaN.

    Of a weight, every row and every column is looked at once in 128 elements: that takes no memory worth mentioning,
    and a missing tensor, or one with rows or columns missing, shows.
    """
    if parameter.dtype == torch.float32:
        looks = [~parameter.isfinite()]
    else:
        codes = parameter.data.view(torch.uint8)
        looks = [(part & 0x7F) == E4M3_NAN for part in (codes[..., ::GROUP], codes[..., ::GROUP, :])]
    bad = next((look for look in looks if look.any()), None)
    if bad is None:
        return
    where = "" if bad.dim() < 3 else f" of local expert {int(bad.flatten(1).any(1).nonzero()[0])}"
    raise CheckpointError(
        f"{layer}.{name}{where}: a tensor is missing from the checkpoint, or holds NaN. "
        "Check that every shard listed in model.safetensors.index.json is there and whole, and download it again."
    )
