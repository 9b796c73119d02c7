"""Operands of kernels, as addresses: creating a tensor costs the host as much as a launch.

An op that prepares launches once and runs them often passes slots (`jit.launch.Slot`) instead of addresses.
"""

from typing import Any, NamedTuple, TypeVar

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit.launch import Address, Argument, Slot
from fp8moe_plugin.plan.scratch import scale_pitch
from fp8moe_plugin.plan.spec import LayerSpec

Scratch = TypeVar("Scratch", bound=tuple[Any, ...])  # the offsets of an op's pieces of scratch memory


class Extent(NamedTuple):
    """The columns and the pitch of a matrix in memory, in elements.

    TMA reads zeros from `columns` to the end of the last K block.
    """

    columns: int
    pitch: int  # from row to row, a multiple of 16


class Rows(NamedTuple):
    """e4m3 `[rows, k]` and its scales."""

    values: Address
    rows: int
    k: int  # a multiple of 128
    scales: Address
    scale_group: int  # stride of the scales from group to group, in elements
    scale_k_block: int  # stride of the scales from K block to K block, in elements
    extent: Extent | None = None  # None: the rows are contiguous
    scale_row: int = 1  # stride of the scales from row to row, in elements

    @classmethod
    def k_major(cls, values: Address, scales: Address, rows: int, k: int) -> "Rows":
        """Returns rows with K-major scales, in the layout of `empty_scales`."""
        return cls(values, rows, k, scales, 0, scale_pitch(rows))

    @classmethod
    def row_major(cls, values: Address, scales: Address, rows: int, k: int) -> "Rows":
        """Returns rows with row-major scales, contiguous `[rows, k / 128]`, for a GEMM that gathers its rows."""
        return cls(values, rows, k, scales, 0, 1, scale_row=k // GROUP)

    @property
    def is_row_major(self) -> bool:
        """True of `row_major`, False of `k_major`, whose pitch is a multiple of four."""
        return self.scale_k_block == 1


class Weights(NamedTuple):
    """Weights `[experts, n, k]` in a format, and their scales; a dense weight is one expert."""

    values: Address
    experts: int
    n: int
    k: int  # a multiple of 128
    scales: Address
    extent: Extent | None = None  # None: contiguous
    format: WeightFormat = FP8_BLOCK
    further_steps: int = 0  # see ops/mxfp4.py
    bias: Address = 0  # of experts float32 [experts, n], of a dense layer bfloat16 [n]; 0: none

    @classmethod
    def of_experts(
        cls,
        spec: LayerSpec,
        w13: Address,
        w13_scale: Address,
        w2: Address,
        w2_scale: Address,
        w13_bias: Address,
        w2_bias: Address,
    ) -> "tuple[Weights, Weights]":
        """Returns w13 and w2 of a layer; the biases are not used unless it has them."""
        _, hidden, intermediate, experts, _ = spec.shape
        steps13, steps2 = spec.further_steps
        bias13, bias2 = (w13_bias, w2_bias) if spec.bias else (0, 0)
        return (
            cls(w13, experts, 2 * intermediate, hidden, w13_scale, None, spec.weights, steps13, bias13),
            cls(w2, experts, hidden, intermediate, w2_scale, None, spec.weights, steps2, bias2),
        )

    def nbytes(self, channels: int) -> int:
        """Returns the bytes of consecutive channels of a row."""
        return self.format.weight.nbytes(1, channels)


class Ids(NamedTuple):
    """The experts that a router chose for each token of a step, and their mapping to the experts of this rank."""

    ids: Address  # int32 or int64 [tokens, topk], without a column for a shared expert
    ids_64: bool
    expert_map: Address  # int32 [global experts]: the local expert, or -1; 0: ids are local
    tokens: int
    spec: LayerSpec

    @property
    def pairs(self) -> int:
        """The number of (token, expert) pairs, including the pairs of a shared expert."""
        return self.tokens * self.spec.shape.topk

    @property
    def routed_experts(self) -> int:
        """The number of valid ids."""
        return self.spec.shape.global_experts - self.spec.shared_expert

    def arguments(self) -> dict[str, Argument]:
        """Returns the arguments from which a kernel finds the experts of tokens."""
        shape = self.spec.shape
        return {
            "ids": self.ids,
            "expert_map": self.expert_map,
            "ids_64": int(self.ids_64),
            "shared_expert": int(self.spec.shared_expert),
            "topk": shape.topk,
            "routed_experts": self.routed_experts,
            "num_experts": shape.local_experts,
        }


class LayerAddresses(NamedTuple):
    """The addresses of the tensors of a call of `fused_moe`, and of its scratch; 0 for what a call does without."""

    hidden_states: Address
    hidden_scale: Address
    w13: Address
    w13_scale: Address
    w2: Address
    w2_scale: Address
    w13_bias: Address
    w2_bias: Address
    topk_weights: Address
    topk_ids: Address
    expert_map: Address
    out: Address
    scratch: Address

    def weights(self, spec: LayerSpec) -> tuple[Weights, Weights]:
        """Returns w13 and w2."""
        _, _, *layer, _, _, _, _, _ = self
        return Weights.of_experts(spec, *layer)


LAYER_SLOTS = LayerAddresses(*map(Slot, range(len(LayerAddresses._fields))))


def placed(layout: Scratch, scratch: Address) -> Scratch:
    """Returns the addresses of the pieces of a scratch layout that begins at `scratch`."""
    return type(layout)(*(scratch + offset for offset in layout))
