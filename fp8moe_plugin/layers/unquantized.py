"""The layers that stay unquantized, and the quantization of an unquantized checkpoint's weights to block FP8.

Online quantization and `fp8moe-warmup convert` share this module, so they produce the same bytes.
"""

import functools
import logging
from collections.abc import Mapping, Sequence

import torch

from fp8moe_plugin.checkpoint.unquantized import FUSED, LAYER_NAME, incomplete_names, incomplete_text
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.patterns import PATTERN, matches
from fp8moe_plugin.layers.weights import per_block_cast_to_fp8

# Published block-FP8 checkpoints quantize the projections of attention, MLPs and experts, listed here by the last part
# of their names. Routers, the output head, embeddings, norms and vision towers stay unquantized.
# The last one is SGLang's name of fused_qkv_a_proj.
UNFUSED = {"o_proj", "q_b_proj", "kv_b_proj", "wq_b", "down_proj", "w1", "w2", "w3", "fused_qkv_a_proj_with_mqa"}
QUANTIZED = UNFUSED | {"experts"} | FUSED.keys() | {part for parts in FUSED.values() for part in parts}

logger = logging.getLogger("fp8moe")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Bounds the temporary memory of quantizing a weight; on a CPU, a chunk that fits the cache is fastest.
WEIGHTS_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 24}


def is_quantized(layer: str) -> bool:
    """Returns whether a layer gets FP8 weights, by its name (without `.weight`) in a checkpoint or in an engine."""
    match = LAYER_NAME.fullmatch(layer)
    return match is not None and match[2].rpartition(".")[2] in QUANTIZED


def matches_pattern(layer: str, names: Sequence[str], fused: Mapping[str, Sequence[str]]) -> bool:
    """Returns whether a checkpoint keeps an engine's layer unquantized by a pattern, an entry that begins with `re:`.

    Args:
        layer: its full name in the engine.
        names: the checkpoint's list of ignored layers: names and patterns.
        fused: the projections of each fused layer of the engine.
    Raises:
        UnsupportedError: only some projections of a fused layer match.
    """
    patterns = [name for name in names if name.startswith(PATTERN)]
    module, _, last = layer.rpartition(".")
    parts = [f"{module}.{part}" for part in fused.get(last, [last])]
    found = [bool(patterns) and matches(patterns, part) for part in parts]
    if any(found) and not all(found):
        raise UnsupportedError(
            f"The checkpoint keeps only a part of {layer} unquantized, but the engine fuses its parts. Correct ignore "
            "in quantization_config of its config.json so that all of them are unquantized, or none."
        )
    return all(found)


def announce_incomplete_names(names: Sequence[str]) -> None:
    """Warn of entries in a checkpoint's list of unquantized layers that have no effect, before weights are read."""
    if found := incomplete_names(names):
        logger.warning("fp8moe: %s", incomplete_text(found))


@functools.cache  # logs once for all layers that differ in their number only
def announce_unquantized(experts: str, engine: str) -> None:
    """Warn that these experts of an unquantized checkpoint run on the engine's kernels: their names are unknown."""
    logger.warning(
        "fp8moe does not quantize the experts %s, which run on %s's own kernels: it quantizes only the layers of a "
        "language model, named model.layers.N. Names do not matter in a checkpoint that is block FP8 already.",
        *(experts, engine),
    )


def quantize_weight(name: str, weight: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each 128x128 block of a weight with a scale of its own; every device produces the same bytes.

    Args:
        name: the weight's name, for messages.
        weight: bfloat16, float16 or float32 `[N, K]`; blocks at the right and bottom edges may be smaller.
        device: the device that computes and holds the result.
    Returns:
        e4m3 `[N, K]` and float32 scales `[ceil(N/128), ceil(K/128)]`, each its block's largest magnitude / 448.
    Raises:
        CheckpointError: the weight has another dtype or shape, or holds NaN or infinity.
    """
    if weight.dim() != 2 or 0 in weight.shape or weight.dtype not in DTYPES:
        raise CheckpointError(
            f"{name} is {weight.dtype} {list(weight.shape)}, but only bfloat16, float16 or float32 matrices can be "
            "quantized, one for each projection of each expert. Use a checkpoint that stores its weights that way."
        )
    at_once = WEIGHTS_AT_ONCE["cpu" if device.type == "cpu" else "cuda"]
    rows = max(at_once // weight.shape[1] // GROUP, 1) * GROUP
    try:
        parts = [per_block_cast_to_fp8(part.to(device)) for part in weight.split(rows)]
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    if len(parts) == 1:
        return parts[0]
    return torch.cat([q for q, _ in parts]), torch.cat([scales for _, scales in parts])
