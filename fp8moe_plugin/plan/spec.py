"""The description of a mixture-of-experts layer: everything that its plans depend on, except the number of tokens."""

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple

from fp8moe_plugin.checkpoint.placement import kind_refusal
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import FORMATS
from fp8moe_plugin.formats.weight_format import WeightFormat


class MoeShape(NamedTuple):
    """The sizes of a layer on one rank."""

    topk: int  # experts per token, including a shared expert
    hidden: int
    intermediate: int  # on this rank
    local_experts: int
    global_experts: int  # over all ranks

    @classmethod
    def of(cls, local: Experts, global_experts: int) -> "MoeShape":
        """Returns the shape of a layer from the sizes of its part on one rank."""
        return cls(local.topk, local.hidden, local.intermediate, local.experts, global_experts)

    @classmethod
    def of_w13(
        cls, weights: WeightFormat, w13: Sequence[int], hidden: int, topk: int, global_experts: int | None = None
    ) -> "MoeShape":
        """Returns the shape of a layer whose w13, in this format, is a tensor of shape `w13`.

        Args:
            global_experts: None: the local ones are all experts.
        """
        experts, gate_up, _ = weights.weight.channels(w13)
        return cls(topk, hidden, gate_up // 2, experts, experts if global_experts is None else global_experts)

    def with_shared_expert(self) -> "MoeShape":
        """Returns the shape with one more expert, which processes every token."""
        more = {name: getattr(self, name) + 1 for name in ("topk", "local_experts", "global_experts")}
        return self._replace(**more)


class LayerSpec(NamedTuple):
    """A layer. A NamedTuple, because every call of the layer hashes one."""

    shape: MoeShape
    weights: WeightFormat = FP8_BLOCK
    ue8m0: bool = False  # scales of activations are powers of two
    activation: Activation = SILU
    bias: bool = False  # both GEMMs add a bias, float32 [experts, rows of weights]
    shared_expert: bool = False  # every token also has the last expert, which has no column in the ids
    shared_gate: bool = False  # its weight is the last column of the router's weights; without a gate it is 1
    routed_scale: float = 1.0  # multiplies the router's weights
    further_steps: tuple[int, int] = (0, 0)  # of w13 and w2, see ops/mxfp4.py
    batch_invariant: bool = False  # a token's bits do not depend on the other tokens or their number
    quantized: bool = False  # tokens arrive in e4m3, with scales: Arrival.QUANTIZED

    @property
    def weight_columns(self) -> int:
        """The number of columns of the router's weights."""
        return self.shape.topk - (self.shared_expert and not self.shared_gate)

    def with_shared_expert(self, routed_scale: float) -> "LayerSpec":
        """Returns the spec with one more expert, which processes every token.

        Args:
            routed_scale: multiplies the router's weights.
        """
        return self._replace(shape=self.shape.with_shared_expert(), shared_expert=True, routed_scale=routed_scale)


def layer_refusal(spec: LayerSpec, formats: tuple[WeightFormat, ...] = FORMATS) -> str | None:
    """Returns the property of a layer that no kernel supports, or None. `formats`: those of a backend with fewer."""
    return kind_refusal(spec.weights, spec.activation, formats)


class Arrival(StrEnum):
    """How the rows of tokens arrive at the experts. The values name the layout in the log and the metrics."""

    STANDARD = "contiguous"  # bfloat16 tokens in any order, with the ids of their experts
    QUANTIZED = "quantized"  # the same in e4m3 with scales, quantized before an all-to-all
    PUSHED = "pushed"  # stored by other ranks, as the kernels of the step take them
    BATCHED = "masked"  # quantized by an all-to-all, and sorted by expert into `[E, max_m]` rows


class Output(IntEnum):
    """How a dense GEMM writes its result."""

    BF16 = 0  # staged in shared memory, stored by TMA
    BF16_DIRECT = 1  # from registers, with an optional addend
    F32_DIRECT = 2  # float32 from registers, with an optional addend


class GroupedBy(StrEnum):
    """The tensor that assigns the rows of a grouped GEMM to groups."""

    INDICES = "indices"  # int32 [rows], the group of each row
    COUNTS = "counts"  # int32 [groups], the number of valid rows of each group of [groups, max_m]
    ENDS = "ends"  # int32 [groups], the end of each group's rows


class Grouping(NamedTuple):
    """The layout of a grouped GEMM's rows."""

    kind: GroupedBy
    alignment: int = 1  # for ENDS: a group begins at a multiple of it
