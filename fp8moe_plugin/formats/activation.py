"""The activation between both GEMMs of an expert."""

from typing import NamedTuple


class Activation(NamedTuple):
    """`act(gate) * (up + beta)`, with `act(x) = x * sigmoid(alpha * x)` for "silu".

    `limit`: gate is clamped to at most this value, and up to its magnitude; None: neither is clamped.
    """

    kind: str = "silu"
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0


SILU = Activation()
