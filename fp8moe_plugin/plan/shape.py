"""The shape of a mixture-of-experts layer on one rank: all that its plan depends on, except the number of tokens."""

from typing import NamedTuple

from fp8moe_plugin.checkpoint.shapes import Experts


class MoeShape(NamedTuple):
    """A layer on one rank. A NamedTuple, because every call of the layer creates and hashes one."""

    topk: int
    hidden: int
    intermediate: int  # on this rank
    local_experts: int
    global_experts: int  # over all ranks

    @classmethod
    def of(cls, local: Experts, global_experts: int) -> "MoeShape":
        """The shape of a layer, given its part on one rank."""
        return cls(local.topk, local.hidden, local.intermediate, local.experts, global_experts)

    def with_shared_expert(self) -> "MoeShape":
        """The shape with one more expert, which every token has."""
        more = {name: getattr(self, name) + 1 for name in ("topk", "local_experts", "global_experts")}
        return self._replace(**more)
