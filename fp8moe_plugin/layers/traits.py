"""The properties of the quantization method that engines query before they read a checkpoint."""

from typing import Any

import torch

from fp8moe_plugin.settings import NAME


class Traits:
    """The properties that an engine queries from the registered class and from the config of a checkpoint."""

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: object = None
    ) -> str | None:
        """Claim a checkpoint only if the user asked for this method; `from_config` decides whether it can be served."""
        return NAME if user_quant == NAME else None

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """No minimum here: `layers.machine.check_machine` explains why it refuses a GPU, and honours FP8MOE_BACKEND."""
        return 0


class Entry(Traits):
    """The class that is registered with an engine. It imports the method only when a model is served with it.

    Never instantiated: both constructors return an `Fp8MoeConfig`.
    """

    @classmethod
    def config(cls) -> Any:
        """Returns the engine's `Fp8MoeConfig`, imported only now."""
        raise NotImplementedError

    def __new__(cls) -> Any:
        """Engines call this, without arguments, for a checkpoint that has no `quantization_config`."""
        return cls.config().for_unquantized()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls.config().from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        raise NotImplementedError("Entry is never instantiated; Fp8MoeConfig chooses the methods of the layers.")
