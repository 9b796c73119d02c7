"""The class that SGLang knows the quantization method by. It imports the method only once a model is served with it."""

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizationConfig

from fp8moe_plugin.layers.traits import Traits


class Entry(Traits, QuantizationConfig):
    """The class registered with SGLang. Never instantiated: both of its constructors return an `Fp8MoeConfig`."""

    def __new__(cls) -> Any:
        """SGLang calls this, without arguments, for a checkpoint that has no `quantization_config`."""
        from fp8moe_plugin.layers.sglang.config import Fp8MoeConfig

        return Fp8MoeConfig.for_unquantized()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from fp8moe_plugin.layers.sglang.config import Fp8MoeConfig

        return Fp8MoeConfig.from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        raise NotImplementedError("Entry is never instantiated; Fp8MoeConfig chooses the methods of the layers.")

    def get_scaled_act_names(self) -> list[str]:
        return []
