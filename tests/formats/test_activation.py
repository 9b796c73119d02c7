"""What the kernels compute of each activation, and what they refuse."""

import math
import re

import pytest

from fp8moe_plugin.formats.activation import SILU, Activation, ActivationNumbers

OAI, STEP = "swigluoai_uninterleave", "swiglustep"


@pytest.mark.parametrize(
    ("activation", "numbers"),
    [
        (SILU, (math.inf, math.inf, math.inf, 1, 0)),
        (Activation(limit=10.0), (10, math.inf, 10, 1, 0)),
        (Activation(OAI, 7.0, 1.702, 1.0), (7, math.inf, 7, 1.702, 1)),
        (Activation(STEP, 7.0), (math.inf, 7, 7, 1, 0)),
    ],
)
def test_the_numbers_of_each_kind(activation: Activation, numbers: tuple[float, ...]) -> None:
    assert activation.refusal is None
    assert activation.numbers == ActivationNumbers(*numbers)
    assert activation.variant == (activation != SILU)


@pytest.mark.parametrize(
    ("activation", "why"),
    [
        (Activation("gelu"), r"another activation than silu, .* \(gelu\)"),
        (Activation("swigluoai", 7.0, 1.702, 1.0), r"another activation than silu, .* \(swigluoai\)"),
        (Activation(OAI, alpha=1.702, beta=1.0), "needs a limit"),
        (Activation(STEP), "needs a limit"),
        (Activation(limit=0.0), "whose limit"),
        (Activation(limit=-7.0), "whose limit"),
        (Activation(limit=math.nan), "whose limit"),
        (Activation(limit=math.inf), "whose limit"),
        (Activation(STEP, 1e39), "whose limit"),
        (Activation(alpha=1.702), "neither alpha nor beta"),
        (Activation(STEP, 7.0, beta=1.0), "neither alpha nor beta"),
        (Activation(OAI, 7.0, math.nan), "alpha or beta"),
        (Activation(OAI, 7.0, 1.0, -math.inf), "alpha or beta"),
    ],
)
def test_another_activation_is_refused(activation: Activation, why: str) -> None:
    assert re.search(why, activation.refusal or "not refused")
