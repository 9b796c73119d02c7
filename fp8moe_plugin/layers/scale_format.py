"""State dicts that record the format of activation scales, which affects results but is not visible in the weights."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.weights import check_scale_values

KEY = "ue8m0"
SCALE = "_scale"  # appended to the weight's name
OVERRIDE = " If the weights do come from a ue8m0 layer, set state_dict[{!r}] = torch.tensor(True) before loading."


class ScaleFormat(torch.nn.Module):
    """A layer with an attribute `ue8m0`. Its state dict has an entry `ue8m0` only if that is true.

    Loading a state dict of the other format raises `CheckpointError`, even with `strict=False`: otherwise the results
    would change silently. A state dict without the entry, which includes those of earlier versions, has `ue8m0=False`.
    """

    ue8m0: bool

    def _save_to_state_dict(self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.ue8m0:
            destination[prefix + KEY] = torch.tensor(True, device="cpu")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + KEY
        saved = bool(state_dict.get(key, False))
        if saved != self.ue8m0 and any(prefix + name in state_dict for name in self._parameters):
            name = prefix.removesuffix(".") or type(self).__name__
            raise CheckpointError(
                f"{name} has ue8m0={self.ue8m0}, but the state dict was saved with ue8m0={saved}: with these weights, "
                f"the layer would compute different results. Build the layer with from_fp8(.., ue8m0={saved})."
                + (OVERRIDE.format(key) if self.ue8m0 else "")
            )
        others = {name: value for name, value in state_dict.items() if name != key}
        self._check_tensors({n: others[prefix + n] for n in self._parameters if prefix + n in others}, prefix)
        super()._load_from_state_dict(others, prefix, *args)

    def _check_tensors(self, tensors: dict[str, torch.Tensor], prefix: str) -> None:
        """Raise `CheckpointError` for dtypes torch would convert silently, missing partners and invalid scales."""
        for name, tensor in tensors.items():
            dtype = self.get_parameter(name).dtype
            if tensor.dtype != dtype:
                raise CheckpointError(
                    f"{prefix}{name} is {tensor.dtype} in the state dict, but {dtype} in the layer. Build the layer "
                    "from these weights with from_fp8 or from_bf16."
                )
            partner = name.removesuffix(SCALE) if name.endswith(SCALE) else name + SCALE
            if partner in self._parameters and partner not in tensors:
                raise CheckpointError(
                    f"The state dict has {prefix}{name}, but not {prefix}{partner}. Both must be loaded together."
                )
            if name.endswith(SCALE):
                check_scale_values(f"the scales {prefix}{name}", tensor)
