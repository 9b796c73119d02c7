"""The activation between both GEMMs of an expert."""

import math
from typing import NamedTuple

FLOAT32_MAX = (2 - 2**-23) * 2.0**127


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
        if (kind := KINDS.get(self.kind)) is None:
            return f"another activation than {', '.join(KINDS)} ({self.kind})"
        given = f"the activation {self.kind} with limit {self.limit}, alpha {self.alpha} and beta {self.beta}"
        if self.limit is None and kind.needs_limit:
            return f"{given}, which needs a limit"
        if not (self.limit is None or 0 < self.limit <= FLOAT32_MAX):
            return f"{given}, whose limit is no positive float32 number"
        if not kind.has_alpha and (self.alpha, self.beta) != (SILU.alpha, SILU.beta):
            return f"{given}, which has neither alpha nor beta"
        if not (abs(self.alpha) <= FLOAT32_MAX and abs(self.beta) <= FLOAT32_MAX):
            return f"{given}, whose alpha or beta is no float32 number"
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


SILU = Activation()
VARIANTS = SILU, Activation(limit=1.0)  # an activation for each variant of the kernels
