"""The shapes of a checkpoint's layers, whole and on one rank. Pure Python, used by the layers and by warmup."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fp8moe_plugin.checkpoint.cache import Indexer, KvCache
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.weight_format import WeightFormat, ceil_div

MAX_LOCAL_EXPERTS = 1024  # on one rank: the routing kernel uses one thread per expert
# Architectures that vLLM serves with `DeepseekV2MLP` as their shared expert; with `DeepseekV4MLP`, whose SwiGLU has the
# limit of the routed experts; or with `Qwen2MoeMLP`, which has a gate.
MERGING = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
MERGING_LIMITED = ("DeepseekV4ForCausalLM",)
MERGING_GATED = (
    "Qwen2MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
SHARED_EXPERTS = (".shared_experts", ".shared_expert")  # in vLLM's blocks
N_MULTIPLE = 8  # output channels must be a multiple of it: the GEMMs store 16 bytes of bfloat16 at a time


class Split(StrEnum):
    """The dimension along which tensor parallelism splits a dense layer."""

    NONE = "none"
    OUTPUTS = "outputs"
    INPUTS = "inputs"


@dataclass(frozen=True)
class Dense:
    """Dense layers of one kind, fused as in vLLM: `outputs` has the output channels of each projection.

    A rank holds at least `smallest` outputs of a projection, because key/value heads are replicated, not split.
    """

    name: str
    layers: int
    inputs: int
    outputs: tuple[int, ...]
    split: Split
    smallest: int = 0
    groups: int = 1  # of a batched product: ranks share whole groups
    mtp: int = field(default=0, compare=False)  # of `layers`, those for multi-token prediction


@dataclass(frozen=True)
class Experts:
    """The routed experts of `layers` identical layers.

    w13 is `[experts, 2 * intermediate, hidden]`, w2 `[experts, hidden, intermediate]`.
    """

    layers: int
    experts: int
    topk: int
    hidden: int
    intermediate: int
    mtp: int = field(default=0, compare=False)  # of `layers`, those for multi-token prediction


def experts_bytes(experts: Experts, weights: WeightFormat) -> int:
    """Returns the bytes of the experts of all layers in this format."""
    n, k = experts.intermediate, experts.hidden
    return experts.layers * experts.experts * (2 * weights.nbytes(n, k) + weights.nbytes(k, n))


@dataclass(frozen=True)
class Replicated:
    """Weights other than dense layers that every rank holds as a whole."""

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: str  # its name in safetensors
    mtp: int = 0  # of `layers`, those for multi-token prediction


@dataclass(frozen=True)
class Model:
    """A checkpoint's model: the layers that the plugin serves, and the properties that their splits depend on."""

    architecture: str
    experts: Experts
    dense: tuple[Dense, ...]
    heads: int
    kv_heads: int  # equal to `heads` for MLA, whose cache has no heads
    vocab: int
    ue8m0: bool  # whether activation scales are powers of two
    quantized: bool  # false if the checkpoint is not FP8 and is quantized while it is loaded
    indexer: Indexer | None = None
    weights: WeightFormat = FP8_BLOCK  # of the quantized experts
    dense_weights: WeightFormat = FP8_BLOCK  # of the quantized dense layers
    dense_bias: bool = False  # whether some of them have a bias
    activations: tuple[Activation, ...] = (SILU,)  # of the quantized experts; that of most layers first
    gpt_oss: bool = False  # experts have biases, and their hidden size is padded to whole scale blocks
    # Memory depends on these fields, but no kernel and no split does.
    cache: KvCache | None = field(default=None, compare=False)
    plain: tuple[Dense, ...] = field(default=(), compare=False)  # dense layers that the checkpoint keeps unquantized
    plain_experts: Experts | None = field(default=None, compare=False)  # experts that it keeps unquantized
    replicated: tuple[Replicated, ...] = field(default=(), compare=False)
    router: str = field(default="mlp.gate", compare=False)  # its name in vLLM
    streams: int = field(default=1, compare=False)  # hidden states of a token between layers: hyper-connections
    mtp_layers: int = field(default=0, compare=False)
    context: int | None = field(default=None, compare=False)  # the largest number of tokens of a sequence
    recoded_from: WeightFormat | None = field(default=None, compare=False)  # experts, if re-encoded when loaded
    unknown_format: bool = field(default=False, compare=False)  # whether that needs weights that are not at hand
    unknown_family: str | None = field(default=None, compare=False)  # the quoted model type if it is not known
    incomplete_names: tuple[str, ...] = field(default=(), compare=False)  # ineffective entries of the unquantized list
    remote_code: bool = field(default=False, compare=False)  # whether the checkpoint comes with code of its own


def merges_shared_expert(model: Model, parallel: Parallel) -> bool:
    """Returns whether vLLM computes the shared expert as one more expert, see `layers/vllm/shared_expert.py`.

    One of `MERGING_GATED` only where our router chooses the experts.
    """
    gate_ups = tuple(f"{mlp}.gate_up_proj" for mlp in SHARED_EXPERTS)
    widths = [layer.outputs[0] for layer in model.dense if layer.name.endswith(gate_ups)]
    apart = parallel.sglang or parallel.ep > 1 or parallel.dp > 1
    if model.architecture not in MERGING + MERGING_LIMITED + MERGING_GATED or not model.experts.layers:
        return False
    limit = model.activations[0].limit if model.architecture in MERGING_LIMITED else None
    if apart or model.weights != model.dense_weights or model.activations != (Activation(limit=limit),):
        return False
    return widths == [model.experts.intermediate]


def too_many_experts(local_experts: int) -> str | None:
    """Returns why the kernels cannot serve this many experts on one rank, or None if they can."""
    if local_experts <= MAX_LOCAL_EXPERTS:
        return None
    return f"a rank has {local_experts} experts, but the routing kernel supports at most {MAX_LOCAL_EXPERTS}"


def experts_refusal(hidden: int) -> str | None:
    """Returns why the kernels cannot serve experts of this hidden size, or None if they can."""
    if hidden % GROUP:
        return f"hidden size {hidden} is not a multiple of {GROUP}, the size of a scale block"
    return None


def padded_hidden(hidden: int) -> int:
    """Returns the hidden size of gpt-oss's experts in whole scale blocks, to which engines pad the tokens."""
    return ceil_div(hidden, GROUP) * GROUP


def local_intermediate(intermediate: int, ranks: int) -> int:
    """Returns the intermediate channels per rank if `ranks` ranks share an expert or MLP: whole scale blocks.

    Rank r holds the channels from `r * local_intermediate` on. No block is split, so each keeps the checkpoint's scale,
    and activations are quantized in the same groups as on one rank. The last ranks are zero-padded.
    """
    return ceil_div(intermediate, ranks * GROUP) * GROUP


def is_gate_up(name: str) -> bool:
    """Returns whether a dense layer is the first half of an MLP, by its name in vLLM.

    Its output channels may be padded, because only the second half (`is_down`) depends on their distribution.
    """
    return name.rpartition(".")[2] == "gate_up_proj"


def is_down(name: str) -> bool:
    """Returns whether a dense layer is the second half of an MLP, by its name in vLLM."""
    return name.rpartition(".")[2] == "down_proj"


def padding_share(intermediate: int, ranks: int) -> float:
    """Returns the padding in `local_intermediate`, relative to an equal share of the channels."""
    return local_intermediate(intermediate, ranks) * ranks / intermediate - 1


def dense_refusal(inputs: int, outputs: Sequence[int], split: bool, weights: WeightFormat) -> str | None:
    """Returns why the kernels cannot serve a rank's part of a dense layer, or None if they can.

    The part must consist of whole scale blocks.

    Args:
        inputs: input channels on this rank.
        outputs: output channels of each fused projection on this rank.
        split: whether the outputs are split over ranks. If not, the last projection may end within a block.
    """
    rows, sizes = weights.scales.block[0], outputs if split else outputs[:-1]
    for what, size, block in [("input", inputs, GROUP), *(("output", size, rows) for size in sizes)]:
        if size % block:
            return f"has {size} {what} channels on this rank, not a multiple of the scale block of {block}"
    if sum(outputs) % N_MULTIPLE:
        return f"has {sum(outputs)} output channels, but the kernels need a multiple of {N_MULTIPLE}"
    return None


def begins_within_block(
    inputs: int, outputs: Sequence[int], all_inputs: int, split: bool, weights: WeightFormat
) -> bool:
    """Returns whether a part of a dense layer on some rank begins within a scale block, which it shares with another.

    Args:
        inputs, outputs, split: as for `dense_refusal`.
        all_inputs: input channels on all ranks.
    """
    if not weights.weight_block:
        return False
    (rows, columns), sizes = weights.scales.block, outputs if split else outputs[:-1]
    return any(size % rows for size in sizes) or bool(inputs != all_inputs and inputs % columns)


def rank_dense(layer: Dense, parallel: Parallel) -> Dense:
    """Returns one rank's part of a kind of dense layer."""
    part = _rank_dense(layer, parallel.dense_ranks(layer.name))
    return replace(part, layers=ceil_div(layer.layers, parallel.pp))


def _rank_dense(layer: Dense, tp: int) -> Dense:
    match layer.split:
        case Split.OUTPUTS if is_gate_up(layer.name):
            return replace(layer, outputs=tuple(local_intermediate(width, tp) for width in layer.outputs))
        case Split.OUTPUTS:
            return replace(layer, outputs=tuple(max(width // tp, layer.smallest) for width in layer.outputs))
        case Split.INPUTS if is_down(layer.name):
            return replace(layer, inputs=local_intermediate(layer.inputs, tp))
        case Split.INPUTS:
            return replace(layer, inputs=layer.inputs // tp)
        case Split.NONE:
            return layer
