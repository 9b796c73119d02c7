"""Who computes a layer: our kernels, the engine's own, or neither. The warm-up and the engines decide it here."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from fp8moe_plugin.checkpoint.shapes import begins_within_block, dense_refusal, experts_refusal, too_many_experts
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, FP8_BLOCK_32, GROUP
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.spec import FORMATS
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.settings import settings

# Architectures whose classes in vLLM compute the scales of a rank's part of fused projections themselves (MiMo-V2.5).
SPLITTING_SCALES = ("MiMoV2ForCausalLM", "MiMoV2MTPModel")
NOT_DENSE: tuple[WeightFormat, ...] = (PACKED_MXFP4, FP8_BLOCK_32)  # formats in which kernels compute no dense layers


class Server(Enum):
    OURS = 0
    ENGINE = 1
    NONE = 2


class Placement(NamedTuple):
    """Who computes a layer, and why it is not us."""

    server: Server
    why: str = ""


OURS = Placement(Server.OURS)


class Engine(NamedTuple):
    """What matters of an engine, and of the layers that it would take."""

    name: str  # vLLM or SGLang
    quantized: bool  # whether its own method loads scales of 128x128 blocks
    architecture: str = ""
    refusal: str | None = None  # why its own method cannot take experts


class DensePart(NamedTuple):
    """A rank's part of a dense layer."""

    inputs: int
    outputs: Sequence[int]  # of each fused projection
    all_inputs: int  # on all ranks
    split: bool  # whether ranks share the outputs
    padded: bool = False  # half of an MLP, with more channels than the engine's own
    kind: str | None = None  # a property that no kernel supports


class ExpertsPart(NamedTuple):
    """A rank's part of the experts of a layer."""

    hidden: int
    intermediate: int  # on all ranks
    ranks: int  # that share each expert
    local_experts: int
    kind: str | None = None  # see `kind_refusal`


def dense_kind_refusal(weights: WeightFormat, kernels: str = "") -> str | None:
    """Returns why kernels of a backend do not compute dense layers in a format, or None if they do."""
    if weights not in NOT_DENSE:
        return None
    return f"is {weights.name}, which the {kernels}kernels do not compute in dense layers"


def kind_refusal(
    weights: WeightFormat, activation: Activation, formats: Sequence[WeightFormat] = FORMATS
) -> str | None:
    """Returns the property of experts that no kernel supports, or None. `formats`: those that have kernels."""
    return f"weights in the format {weights.name}" if weights not in formats else activation.refusal


def sglang_experts(stored: WeightFormat | None) -> Engine:
    """Returns SGLang, which is to take experts.

    Args:
        stored: their format in the checkpoint; None if they are unquantized.
    """
    refusal = None if stored in (None, FP8_BLOCK) else f"fp8moe does not set up SGLang's own method for {stored.name}"
    return Engine("SGLang", stored is FP8_BLOCK, refusal=refusal)


def fallback_allowed() -> bool:
    """Returns whether the engine may take layers that our kernels do not support."""
    return settings().fallback == "allow"


def place_dense(part: DensePart, weights: WeightFormat, engine: Engine) -> Placement:
    """Returns who computes a dense layer."""
    why = part.kind or dense_refusal(part.inputs, part.outputs, part.split, weights)
    if why is None:
        return OURS
    if part.padded or not fallback_allowed():  # the halves of an MLP are padded both or neither
        return Placement(Server.NONE, why)
    shared = begins_within_block(part.inputs, part.outputs, part.all_inputs, part.split, weights)
    fused, rows = len(part.outputs) > 1, weights.scales.block[0]
    splits = fused and engine.name == "vLLM" and engine.architecture in SPLITTING_SCALES
    if engine.quantized and shared and not splits:
        return Placement(Server.NONE, f"{why}, and {engine.name}'s own loader would copy the scales of other blocks")
    if engine.quantized and engine.name == "SGLang" and fused and any(size % rows for size in part.outputs):
        return Placement(Server.NONE, f"{why}, and SGLang's own method cannot take it")
    return Placement(Server.ENGINE, why)


def place_experts(part: ExpertsPart, engine: Engine) -> Placement:
    """Returns who computes the experts of a layer."""
    if part.intermediate % part.ranks:  # asserted by the engines, although our parts may differ
        why = f"{part.ranks} ranks cannot share {part.intermediate} intermediate channels equally"
        return Placement(Server.NONE, why)
    kind = part.kind and f"the model's experts have {part.kind}, which the kernels do not support"
    why = kind or experts_refusal(part.hidden) or too_many_experts(part.local_experts) or ""
    if not why:
        return OURS
    if not fallback_allowed():
        return Placement(Server.NONE, why)
    if engine.refusal:
        return Placement(Server.NONE, f"{why}, and {engine.refusal}")
    width = part.intermediate // part.ranks
    if engine.quantized and width % GROUP:
        more = f"{engine.name}'s own method needs whole scale blocks, but a rank has {width} intermediate channels"
        return Placement(Server.NONE, f"{why}, and {more}")
    return Placement(Server.ENGINE, why)
