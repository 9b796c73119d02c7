"""The shape of a mixture-of-experts layer, as its plan sees it."""

from typing import NamedTuple

from fp8moe_plugin.checkpoint.shapes import Experts


class MoeShape(NamedTuple):
    """A layer on one rank. A NamedTuple, as every call of the layer makes one and hashes it."""

    topk: int
    hidden: int
    intermediate: int  # on this rank
    local_experts: int
    global_experts: int  # over all ranks

    @classmethod
    def of(cls, local: Experts, global_experts: int) -> "MoeShape":
        """The shape of a layer whose part on one rank is `local`."""
        return cls(local.topk, local.hidden, local.intermediate, local.experts, global_experts)
