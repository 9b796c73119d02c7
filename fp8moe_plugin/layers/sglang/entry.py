"""The class that is registered with SGLang."""

from typing import Any

from sglang.srt.layers.quantization.base_config import QuantizationConfig

from fp8moe_plugin.layers import traits


class Entry(traits.Entry, QuantizationConfig):
    @classmethod
    def config(cls) -> Any:
        from fp8moe_plugin.layers.sglang.config import Fp8MoeConfig

        return Fp8MoeConfig

    def get_scaled_act_names(self) -> list[str]:
        return []
