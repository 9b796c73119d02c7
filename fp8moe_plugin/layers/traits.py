"""The properties of the quantization method that engines query before they read a checkpoint."""

import logging
from typing import Any

import torch

from fp8moe_plugin.errors import Fp8MoeError, UnsupportedError
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.settings import NAME, settings

logger = logging.getLogger("fp8moe")


class Traits:
    """The properties that an engine queries from the registered class and from the config of a checkpoint."""

    @classmethod
    def get_name(cls) -> str:
        return NAME

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

    engine: str  # its name in messages

    @classmethod
    def config(cls) -> Any:
        """Returns the engine's `Fp8MoeConfig`, imported only now."""
        raise NotImplementedError

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim a checkpoint if the user asked for this method: `from_config` decides whether it can be served.

        With FP8MOE_TAKE_FP8=1, also if the user asked for no method or for the checkpoint's own, and it can be served.
        """
        if user_quant == NAME:
            return NAME
        own = user_quant in (None, hf_quant_cfg.get("quant_method"))
        return NAME if own and cls._takes(hf_quant_cfg, hf_config) else None

    @classmethod
    def _takes(cls, checkpoint: dict[str, Any], hf_config: Any) -> bool:
        """Returns whether FP8MOE_TAKE_FP8=1 is set and the checkpoint can be served. Never raises."""
        try:
            if not settings().take_fp8:
                return False
            if cls.config().check(checkpoint, hf_config).gpt_oss:
                raise UnsupportedError(
                    f"The experts of gpt-oss cannot be left to {cls.engine} later, whatever its options are. Add "
                    f"--quantization {NAME}."
                )
        except Fp8MoeError as error:
            cls._leave(error)
            return False
        except Exception:  # without the variable, the engine would start
            logger.exception("FP8MOE_TAKE_FP8: the checkpoint stays with %s's own method", cls.engine)
            return False
        log_once(
            logging.INFO, f"FP8MOE_TAKE_FP8: the checkpoint is served as {cls.engine} would with --quantization {NAME}"
        )
        return True

    @classmethod
    def _leave(cls, error: Fp8MoeError) -> None:
        """Log why a checkpoint stays with the engine."""
        log_once(logging.WARNING, f"FP8MOE_TAKE_FP8: the checkpoint stays with {cls.engine}'s own method. {error}")

    def __new__(cls) -> Any:
        """Engines call this, without arguments, for a checkpoint that has no `quantization_config`."""
        return cls.config().for_unquantized()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls.config().from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        raise NotImplementedError("Entry is never instantiated; Fp8MoeConfig chooses the methods of the layers.")
