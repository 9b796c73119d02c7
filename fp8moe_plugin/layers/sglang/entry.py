"""The class that is registered with SGLang."""

from typing import Any

from sglang.srt.layers.quantization.base_config import QuantizationConfig

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.layers import traits
from fp8moe_plugin.settings import settings


class Entry(traits.Entry, QuantizationConfig):
    engine = "SGLang"

    @classmethod
    def config(cls) -> Any:
        from fp8moe_plugin.layers.sglang.config import Fp8MoeConfig

        return Fp8MoeConfig

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns the config of a checkpoint: with FP8MOE_TAKE_FP8=1 SGLang's own, if it does not fit the command line.

        SGLang parses the command line after `override_quantization_method`.
        """
        try:
            return super().from_config(config)
        except UnsupportedError as error:
            if not settings().take_fp8:
                raise
            from sglang.srt.layers.quantization import get_quantization_config

            cls._leave(error)
            return get_quantization_config(config["quant_method"]).from_config(config)

    def get_scaled_act_names(self) -> list[str]:
        return []
