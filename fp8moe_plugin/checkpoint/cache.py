"""What a model's attention caches for each token."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KvCache:
    """The cache of attention for each token and layer: keys and values of `kv_heads` heads, or one vector (MLA)."""

    layers: int  # without layers for multi-token prediction
    mla: bool
    elements: int  # of a head's key and value, or of MLA's vector
    growing: int | None = None  # the number of `layers` that keep all tokens; others keep a window or a state
    token_bytes: float | None = None  # in all layers, where an entry is of several tokens (DeepSeek-V4)
    entry_tokens: int | None = None  # the fewest of an entry, where a prefill gathers the entries of a sequence
    fp8: bool = False  # whether the checkpoint asks for elements of 8 bits
    sequence_bytes: int = 0  # of a sequence of any length, in all layers: windows and states


@dataclass(frozen=True)
class Indexer:
    """The indexer of sparse attention, which selects tokens: `heads` queries of `dim` channels, one key per token."""

    heads: int
    dim: int
    layers: int | None = field(default=None, compare=False)  # number of layers with one of their own; None: all
