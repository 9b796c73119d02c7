"""The class that is registered with vLLM."""

from typing import Any

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from fp8moe_plugin.layers import traits


class Entry(traits.Entry, QuantizationConfig):
    engine = "vLLM"

    @classmethod
    def config(cls) -> Any:
        from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig

        return Fp8MoeConfig
