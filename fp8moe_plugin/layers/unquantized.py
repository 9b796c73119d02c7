"""An unquantized checkpoint as block FP8: which of its weights are quantized, and how.

Loading such a checkpoint and `python -m warmup convert` both ask here, so that they make the same bytes.
"""

import torch

from fp8moe_plugin.checkpoint.model import FUSED, LAYER_NAME
from fp8moe_plugin.checkpoint.shapes import GROUP
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.weights import per_block_cast_to_fp8

# The layers that published block-FP8 checkpoints quantize, by the last part of their names: projections in attention,
# in dense layers and in experts. All else stays: routers, the output head, embeddings, norms, towers for images.
ALONE = {"o_proj", "q_b_proj", "kv_b_proj", "wq_b", "down_proj", "w1", "w2", "w3"}
QUANTIZED = ALONE | {"experts"} | FUSED.keys() | {part for parts in FUSED.values() for part in parts}

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Bounds the memory that quantizing takes beside a weight and its result; on a CPU, what its cache holds is fastest.
WEIGHTS_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 24}


def is_quantized(layer: str) -> bool:
    """Whether a layer, by its name in a checkpoint or in vLLM without `.weight`, gets FP8 weights."""
    match = LAYER_NAME.fullmatch(layer)
    return match is not None and match[2].rpartition(".")[2] in QUANTIZED


def quantize_weight(name: str, weight: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each 128x128 block of a weight by its own largest magnitude; the same bytes on any device.

    Args:
        name: of the weight, for messages.
        weight: bfloat16, float16 or float32 `[N, K]`; blocks at the right and lower edges may be smaller.
        device: where to compute, and where the result is.
    Returns:
        e4m3 `[N, K]` and float32 scales `[ceil(N/128), ceil(K/128)]`; a scale is its block's largest magnitude / 448.
    Raises:
        CheckpointError: the weight is none of this, or holds NaN or infinity.
    """
    if weight.dim() != 2 or 0 in weight.shape or weight.dtype not in DTYPES:
        raise CheckpointError(
            f"{name} is {weight.dtype} {list(weight.shape)}; what is quantized are matrices of bfloat16, float16 or "
            "float32, each projection of each expert by itself. Use a checkpoint that stores its weights so."
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
