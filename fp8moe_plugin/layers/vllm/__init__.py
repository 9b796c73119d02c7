"""The integration with vLLM: `--quantization fp8moe`."""

import logging

from fp8moe_plugin.layers.registration import register_safely
from fp8moe_plugin.settings import NAME

logger = logging.getLogger("fp8moe")


def register_quantization() -> None:
    """Register `--quantization fp8moe` with vLLM, if vLLM is installed.

    Called in every vLLM process, possibly more than once. It imports only modules that vLLM has already imported and
    touches no GPU. It never raises.
    """
    register_safely("vLLM", "vllm", _register)


def _register() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if NAME in QUANTIZATION_METHODS:
        return
    from fp8moe_plugin.layers.vllm.entry import Entry

    register_quantization_config(NAME)(Entry)
    _log_like_vllm()


def _log_like_vllm() -> None:
    """Make our logger a child of vLLM's, the only one vLLM configures; some versions do so only after this call."""
    logger.parent = logging.getLogger("vllm")
