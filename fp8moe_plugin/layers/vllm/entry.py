"""The class that vLLM knows the quantization method by. It imports the method only once a model is served with it."""

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from fp8moe_plugin.layers.vllm.traits import Traits
from fp8moe_plugin.settings import NAME


class Entry(Traits, QuantizationConfig):
    """The class registered with vLLM. Never instantiated: both of its constructors return an `Fp8MoeConfig`."""

    def __new__(cls) -> Any:
        """vLLM calls this, without arguments, for a checkpoint that has no `quantization_config`."""
        from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig

        return Fp8MoeConfig.for_unquantized()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: object = None
    ) -> str | None:
        """Claim a checkpoint only if the user asked for this method; `from_config` decides whether it can be served."""
        return NAME if user_quant == NAME else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig

        return Fp8MoeConfig.from_config(config)

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        raise NotImplementedError("Entry is never instantiated; Fp8MoeConfig chooses the methods of the layers.")
