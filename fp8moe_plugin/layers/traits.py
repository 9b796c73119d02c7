"""The answers that do not depend on a checkpoint, shared by `Entry` and `Fp8MoeConfig`."""

from typing import Any

import torch

from fp8moe_plugin.settings import NAME


class Traits:
    """What an engine asks both of the registered class and of the config made from a checkpoint."""

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
