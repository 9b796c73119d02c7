"""What vLLM asks of a quantization method before it loads a model, answered without importing the method itself."""

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from fp8moe_plugin.settings import NAME


class Traits:
    """What vLLM asks of the registered class and of the config made from a checkpoint."""

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """None: `config.check_machine` refuses with a reason, and knows about FP8MOE_BACKEND."""
        return 0


class Entry(Traits, QuantizationConfig):
    """The class registered with vLLM. Both ways to make one give an `Fp8MoeConfig`; no `Entry` is ever built."""

    def __new__(cls) -> Any:
        """vLLM calls this, without arguments, for a checkpoint that has no `quantization_config`."""
        from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig

        return Fp8MoeConfig.for_unquantized()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: object = None
    ) -> str | None:
        """Take a checkpoint over only where the user asked for it; `from_config` judges whether it can be served."""
        return NAME if user_quant == NAME else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig

        return Fp8MoeConfig.from_config(config)

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        raise NotImplementedError("an Fp8MoeConfig serves the layers")
