"""The activation between both GEMMs of an expert."""

import math
from typing import NamedTuple

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.quoting import shown_text

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126  # the smallest normal number; kernels may read smaller ones as 0


def is_number(value: object) -> bool:
    """Whether a value is an int or a float that is finite in float32. A bool is not, nor is a tensor."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= FLOAT32_MAX


def shown_number(value: object) -> str:
    """Returns what should be a number for a message. Of a tensor, whose value needs a sync, or a huge int, the type."""
    plain = value is None or isinstance(value, float) or is_number(value)
    return str(value) if plain else f"of type {type(value).__name__}"


class ActivationNumbers(NamedTuple):
    """What the kernels know of an activation: the fields of `Activation` in csrc/epilogue/activation.cuh, in its order.

    It is `min(act(min(gate, gate_limit)), activated_limit) * (min(max(up, -up_limit), up_limit) + beta)`, with
    `act(x) = x * sigmoid(alpha * x)`.
    """

    gate_limit: float = math.inf
    activated_limit: float = math.inf
    up_limit: float = math.inf
    alpha: float = 1.0
    beta: float = 0.0


class Kind(NamedTuple):
    """What a kind of activation makes of limit, alpha and beta."""

    limited: tuple[str, ...]  # the numbers that are its limit
    needs_limit: bool = False
    has_alpha: bool = False  # and beta; vLLM ignores them in the other kinds


# By the names of vLLM's MoEActivation. Its "swigluoai" is not among them: in its weights, gate and up rows alternate.
KINDS = {
    "silu": Kind(("gate_limit", "up_limit")),  # without a limit, or as DeepSeek-V4 and GLM-5.3-Flash with one
    "swigluoai_uninterleave": Kind(("gate_limit", "up_limit"), needs_limit=True, has_alpha=True),  # MiniMax-M3
    "swiglustep": Kind(("activated_limit", "up_limit"), needs_limit=True),  # Step-3.5; vLLM's limit is always 7
}


class Activation(NamedTuple):
    """A gated activation, one of `KINDS`."""

    kind: str = "silu"
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def refusal(self) -> str | None:
        """The property that no kernel supports, or None."""
        if not isinstance(self.kind, str) or (kind := KINDS.get(self.kind)) is None:
            name = shown_text(self.kind) if isinstance(self.kind, str) else shown_number(self.kind)
            return f"another activation than {', '.join(KINDS)} ({name})"
        limit, alpha, beta = map(shown_number, self[1:])
        given = f"the activation {self.kind} with limit {limit}, alpha {alpha} and beta {beta}"
        if self.limit is None and kind.needs_limit:
            return f"{given}, which needs a limit"
        if not (self.limit is None or (is_number(self.limit) and self.limit >= FLOAT32_TINY)):
            return f"{given}, whose limit is no positive float32 number"
        if not (is_number(self.alpha) and is_number(self.beta)):
            return f"{given}, whose alpha or beta is no float32 number"
        if not kind.has_alpha and (self.alpha, self.beta) != (SILU.alpha, SILU.beta):
            return f"{given}, which has neither alpha nor beta"
        return None

    @property
    def numbers(self) -> ActivationNumbers:
        """The numbers of an activation that is not refused."""
        limit = math.inf if self.limit is None else self.limit
        limits = dict.fromkeys(KINDS[self.kind].limited, limit)
        return ActivationNumbers(**limits, alpha=self.alpha, beta=self.beta)

    @property
    def variant(self) -> int:
        """The kernels' variant that computes it, a macro: 0 for `silu(gate) * up`, 1 for what takes its numbers."""
        return int(self.numbers != ActivationNumbers())


def check_activation(activation: Activation) -> None:
    """Raise `InvalidInputError` unless the kind, known or not, is a str and the other fields are numbers."""
    kind, limit, alpha, beta = activation
    if not (isinstance(kind, str) and (limit is None or is_number(limit)) and is_number(alpha) and is_number(beta)):
        raise InvalidInputError(f"activation is {activation.refusal}. Pass a name and Python numbers.")


SILU = Activation()
VARIANTS = SILU, Activation(limit=1.0)  # an activation for each variant of the kernels
