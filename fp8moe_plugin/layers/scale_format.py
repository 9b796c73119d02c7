"""State dicts that tell the format of activation scales, which decides a layer's results and is not in its weights."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from fp8moe_plugin.errors import CheckpointError

KEY = "ue8m0"
MARK_IT = " If the weights are of a ue8m0 layer all the same, set state_dict[{!r}] = torch.tensor(True) first."


class ScaleFormat(torch.nn.Module):
    """A layer with `ue8m0`; its state dict has the entry `ue8m0` if that is true, and no such entry otherwise.

    Loading a state dict of the other format raises `CheckpointError`, with `strict=False` too: the results would differ
    without notice. A state dict without the entry counts as `ue8m0=False`, also one that an earlier version saved.
    """

    ue8m0: bool

    def _save_to_state_dict(self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.ue8m0:
            destination[prefix + KEY] = torch.tensor(True, device="cpu")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + KEY
        saved = key in state_dict
        if saved != self.ue8m0 and any(prefix + name in state_dict for name in self._parameters):
            name = prefix.removesuffix(".") or type(self).__name__
            raise CheckpointError(
                f"{name} has ue8m0={self.ue8m0}, but the state dict was saved with ue8m0={saved}: its weights would "
                f"give other results here. Build the layer with from_fp8(.., ue8m0={saved})."
                + (MARK_IT.format(key) if self.ue8m0 else "")
            )
        others = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(others, prefix, *args)
