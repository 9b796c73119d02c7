"""The answers that do not depend on a checkpoint, shared by `Entry` and `Fp8MoeConfig`."""

import torch

from fp8moe_plugin.settings import NAME


class Traits:
    """What vLLM asks both of the registered class and of the config made from a checkpoint."""

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """No minimum here: `layers.machine.check_machine` explains why it refuses a GPU, and honours FP8MOE_BACKEND."""
        return 0
