"""What the kernels compute of each activation, and what they refuse."""

import math
import re

import pytest
import torch

from fp8moe_plugin.formats.activation import FLOAT32_MAX, FLOAT32_TINY, SILU, Activation, ActivationNumbers

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
        (Activation(limit=1e-46), "whose limit is no positive float32 number"),  # float32 rounds it to 0
        (Activation(limit=2.0**-127), "whose limit"),  # kernels flush it to 0
        (Activation(limit="7"), "with limit of type str, .* whose limit"),
        (Activation(limit=True), "with limit of type bool, .* whose limit"),
        (Activation(limit=10**5000), "with limit of type int, .* whose limit"),
        (Activation(limit=torch.tensor(7.0)), "with limit of type Tensor, .* whose limit"),
        (Activation(limit=[]), "with limit of type list, .* whose limit"),
        (Activation([]), r"another activation than silu, .* \(of type list\)"),
        (Activation(torch.tensor(7.0)), r"another activation than silu, .* \(of type Tensor\)"),
        (Activation(OAI, 7.0, "1"), "alpha of type str .* alpha or beta is no float32 number"),
        (Activation(OAI, 7.0, None), "alpha or beta"),
        (Activation(OAI, 7.0, 1.0, torch.tensor(0.0)), "beta of type Tensor, whose alpha or beta"),
        (Activation(beta=False), "alpha or beta"),
        (Activation(alpha=1.702), "neither alpha nor beta"),
        (Activation(STEP, 7.0, beta=1.0), "neither alpha nor beta"),
        (Activation(OAI, 7.0, math.nan), "alpha or beta"),
        (Activation(OAI, 7.0, 1.0, -math.inf), "alpha or beta"),
    ],
)
def test_another_activation_is_refused(activation: Activation, why: str) -> None:
    assert re.search(why, activation.refusal or "not refused")


def test_the_smallest_and_the_largest_limit_are_computed() -> None:
    assert Activation(limit=FLOAT32_TINY).refusal is None
    assert Activation(limit=FLOAT32_MAX).refusal is None
    info = torch.finfo(torch.float32)
    assert (info.tiny, info.max) == (FLOAT32_TINY, FLOAT32_MAX)
