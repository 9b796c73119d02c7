"""Engine-neutral layers; `layers.vllm` puts them under vLLM."""

from fp8moe_plugin.layers.fused_moe import FP8MoE
from fp8moe_plugin.layers.linear import FP8Linear

__all__ = ["FP8Linear", "FP8MoE"]
