"""The conformance table: weight format x activation x bias, for test_conformance.py of the backends and both engines.

A new format or activation is one entry more. Cells move to `COMPUTED` when kernels compute them.
"""

import functools
import itertools
import math
from typing import NamedTuple

import torch

from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.spec import SCALE, QuantSpec
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.ops.reference import dequantize_blocks
from tests import helpers as h
from tests.formats import fp4
from tests.layers.experts import EXPERTS, HIDDEN, TOPK, Checkpoint, make_checkpoint, make_rows, with_biases

INTERMEDIATE, TOKENS = fp4.WIDTH, 9


class Cell(NamedTuple):
    weights: WeightFormat
    activation: Activation
    bias: bool

    @property
    def changed(self) -> dict[str, object]:
        """The fields of the activation that are not those of SiLU."""
        return {name: value for name, value in self.activation._asdict().items() if value != getattr(SILU, name)}

    @property
    def refusal(self) -> str:
        """The part of the message that says what no kernel computes."""
        if self.weights not in VALUES:
            return f"weights in the format {self.weights.name}"
        assert self.activation.refusal
        return self.activation.refusal

    @property
    def quant(self) -> QuantSpec:
        """The quantization of a checkpoint of such layers."""
        return QuantSpec(self.weights, scale=FP8_CHANNEL.scale_names[0] if self.weights == FP8_CHANNEL else SCALE)

    def __str__(self) -> str:
        activation = [f"{name}={value}" for name, value in self.changed.items()] or ["silu"]
        return " ".join([self.weights.name, *activation, *(["bias"] if self.bias else [])])


CLAMPED = Activation(limit=3.0)  # as in DeepSeek-V4 and GLM-5.3-Flash, where it is 10
OAI = Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)  # MiniMax-M3
STEP = Activation("swiglustep", 7.0)  # Step-3.5
ACTIVATIONS = (
    SILU,
    Activation("gelu"),
    Activation(alpha=1.702),
    Activation(beta=1.0),
    Activation("swigluoai", 7.0, 1.702, 1.0),  # gpt-oss: gate and up rows of its weights alternate
    CLAMPED,
    OAI,
    STEP,
)
CHECKPOINTS = {
    FP8_BLOCK: make_checkpoint(INTERMEDIATE),
    FP8_CHANNEL: make_rows(INTERMEDIATE),
    fp4.FP4: fp4.CHECKPOINT,
}
CELLS = [Cell(*cell) for cell in itertools.product(CHECKPOINTS, ACTIVATIONS, (False, True))]
VALUES = {  # of the formats that are computed
    FP8_BLOCK: dequantize_blocks,
    FP8_CHANNEL: functools.partial(dequantize_blocks, weights=FP8_CHANNEL),
}
COMPUTED = [Cell(*cell) for cell in itertools.product(VALUES, (SILU, CLAMPED, OAI, STEP), (False, True))]
REFUSED = [cell for cell in CELLS if cell not in COMPUTED]


class Call(NamedTuple):
    """A call of a layer, and its result in float64 on dequantized weights."""

    checkpoint: Checkpoint
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    expected: torch.Tensor


def make_call(cell: Cell) -> Call:
    checkpoint, gen = CHECKPOINTS[cell.weights], h.seeded(0, torch.device("cpu"))
    x = 4 * h.random_tokens(gen, TOKENS, HIDDEN)  # so that gates and up projections exceed the limits
    weights, ids = h.random_routing(gen, "distinct", TOKENS, TOPK, EXPERTS)
    biases = with_biases({}, INTERMEDIATE)
    checkpoint = checkpoint | (biases if cell.bias else {})
    expected = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for expert in range(EXPERTS):
        w1, w3, w2 = (
            VALUES[cell.weights](checkpoint[f"{name}_weight"][expert], checkpoint[f"{name}_{cell.quant.scale}"][expert])
            for name in ("w1", "w3", "w2")
        )
        b1, b3, b2 = (cell.bias * biases[f"{name}_bias"][expert].double() for name in ("w1", "w3", "w2"))
        inner = activated(x.double() @ w1.double().T + b1, x.double() @ w3.double().T + b3, cell.activation)
        expected += (weights.double() * (ids == expert)).sum(1, keepdim=True) * (inner @ w2.double().T + b2)
    return Call(checkpoint, x, weights, ids, expected)


def activated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    limit = math.inf if activation.limit is None else activation.limit
    if activation.kind == "swiglustep":
        return (gate * gate.sigmoid()).clamp(max=limit) * up.clamp(-limit, limit)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def assert_computed(found: torch.Tensor, call: Call) -> None:
    """As close as the rounding of FP8 allows."""
    assert found.dtype == torch.bfloat16
    assert h.relative_l2(found, call.expected) < 0.06
