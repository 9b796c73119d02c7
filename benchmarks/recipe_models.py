"""The models of docs/recipes: their checkpoints, and what was measured of each."""

from typing import NamedTuple

from benchmarks.tables import TABLES


class Measured(NamedTuple):
    """Rows of a file in benchmarks/results: an engine's steps, or a layer's."""

    result: str
    model: str
    what: str


class Recipe(NamedTuple):
    page: str
    title: str
    config: str  # a description in tests/checkpoint
    checkpoint: str  # on the hub
    family: str  # in docs/compatibility.md
    about: str
    measured: tuple[Measured, ...] = ()


H100_LAYER = "the experts of one layer, all on one H100"
QWEN35 = "an engine with all layers and random weights, on one H200"
V3_TP8 = (
    "an engine with 30 of the 61 layers, at the widths of one of 8 tensor-parallel GPUs, on one H200: half the model, "
)
V3_TP8 += "without the sums over GPUs"
# Of models whose quantization_config in tests/checkpoint/configs_2026 is reconstructed.
PARTLY_KNOWN = (
    "Which of its layers are unquantized was not read from the published file: bytes of weights may differ a little."
)
LAYERS = "models_layer-2026-11-26"
MORE_LAYERS = "models_layer-h100-2026-11-28"
(MXFP4_LAYERS,) = TABLES["mxfp4-layers"].names
MXFP4_LAYER = "the experts of one layer, kept in MXFP4, all on one H200"
RECIPES = (
    Recipe(
        "deepseek-v3", "DeepSeek-V3, V3.1 and R1", "DeepSeek-V3", "deepseek-ai/DeepSeek-V3", "DeepSeek-V3, R1, V3.1",
        "The commands are the same for `deepseek-ai/DeepSeek-V3.1` and `deepseek-ai/DeepSeek-R1`.",
        (Measured("engine_e2e-dsv3-tp8-2026-11-26", "dsv3-tp8", V3_TP8),),
    ),
    Recipe(
        "deepseek-v3.2", "DeepSeek-V3.2", "DeepSeek-V3.2-Exp", "deepseek-ai/DeepSeek-V3.2-Exp", "DeepSeek-V3.2",
        "DeepSeek-V3's shapes, with sparse attention; the plugin also computes the indexer's logits. The commands are "
        "the same for `deepseek-ai/DeepSeek-V3.2`.",
    ),
    Recipe(
        "deepseek-v4-flash", "DeepSeek-V4-Flash", "DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Flash",
        "DeepSeek-V4-Flash, V4-Pro",
        "The plugin keeps its experts in MXFP4, or re-encodes them to block FP8 (`FP8MOE_FP4_EXPERTS=fp8`).",
        (Measured(MXFP4_LAYERS, "V4-Flash EP1", MXFP4_LAYER),),
    ),
    Recipe(
        "deepseek-v4-pro", "DeepSeek-V4-Pro", "DeepSeek-V4-Pro", "deepseek-ai/DeepSeek-V4-Pro",
        "DeepSeek-V4-Flash, V4-Pro",
        "Its experts stay in MXFP4; re-encoded to block FP8 (`FP8MOE_FP4_EXPERTS=fp8`), they need 16 H200.",
        (Measured(MXFP4_LAYERS, "V4-Pro EP8", "the experts of one layer, kept in MXFP4, that one of 8 H200 holds"),),
    ),
    Recipe(
        "glm-5", "GLM-5, 5.1 and 5.2", "GLM-5.2-FP8", "zai-org/GLM-5.2-FP8", "GLM-5, 5.1, 5.2",
        "With DeepSeek's sparse attention.",
        (Measured(MORE_LAYERS, "GLM-5.2-FP8", H100_LAYER),),
    ),
    Recipe(
        "glm-5.3-flash", "GLM-5.3-Flash", "GLM-5.3-Flash", "zai-org/GLM-5.3-Flash", "GLM-5.3-Flash",
        f"Attention stays in BF16. {PARTLY_KNOWN}",
        (Measured(LAYERS, "GLM-5.3-Flash", H100_LAYER),),
    ),
    Recipe(
        "qwen3.5", "Qwen3.5-397B-A17B", "Qwen3.5-397B-A17B-FP8", "Qwen/Qwen3.5-397B-A17B-FP8", "Qwen3.5, Qwen3.6",
        f"Three of four layers have linear attention, which needs no KV cache. {PARTLY_KNOWN}",
    ),
    Recipe(
        "qwen3.6-35b", "Qwen3.5-35B-A3B and Qwen3.6-35B-A3B", "Qwen3.6-35B-A3B-FP8", "Qwen/Qwen3.6-35B-A3B-FP8",
        "Qwen3.5, Qwen3.6",
        f"The commands are the same for `Qwen/Qwen3.5-35B-A3B-FP8`. {PARTLY_KNOWN}",
        (Measured("engine_e2e-qwen3.5-2026-11-27", "qwen3.5", QWEN35), Measured(LAYERS, "Qwen3.6-35B-A3B", H100_LAYER)),
    ),
    Recipe(
        "qwen3-coder", "Qwen3-Coder-480B-A35B", "Qwen3-Coder-480B-A35B-Instruct-FP8",
        "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "Qwen3-MoE: 30B, 235B, Coder",
        "There is no shared expert.",
    ),
    Recipe(
        "minimax-m2", "MiniMax-M2 to M2.7", "MiniMax-M2.7", "MiniMaxAI/MiniMax-M2.7", "MiniMax-M2 to M2.7",
        "There is no shared expert.",
        (Measured(MORE_LAYERS, "MiniMax-M2.7", H100_LAYER),),
    ),
    Recipe(
        "gpt-oss", "gpt-oss-120b", "gpt-oss-120b", "openai/gpt-oss-120b", "gpt-oss-120b, gpt-oss-20b",
        "The plugin serves the experts, in MXFP4 or re-encoded to block FP8; the rest is BF16.",
        (Measured(MXFP4_LAYERS, "gpt-oss-120b", f"{MXFP4_LAYER}, without biases"),),
    ),
)  # fmt: skip
