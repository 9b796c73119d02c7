"""The way into vLLM: `--quantization fp8moe`."""

import importlib.util
import logging

from fp8moe_plugin.settings import NAME

logger = logging.getLogger("fp8moe")


def register_quantization() -> None:
    """Make `--quantization fp8moe` known to the vLLM of this process, if there is one.

    Called in every vLLM process and more than once. Loads nothing but what vLLM has loaded already, touches no GPU,
    and never raises: a plugin that fails must not take down an engine that does not use it.
    """
    try:
        if importlib.util.find_spec("vllm") is None:
            logger.info("vLLM is not installed: nothing to register --quantization %s with", NAME)
        else:
            _register()
    except Exception:
        logger.exception("--quantization %s is not available: registering it with vLLM failed", NAME)


def _register() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if NAME in QUANTIZATION_METHODS:
        return
    from fp8moe_plugin.layers.vllm.entry import Entry

    register_quantization_config(NAME)(Entry)
    _log_like_vllm()


def _log_like_vllm() -> None:
    """Put our logger below vLLM's, which vLLM sets up for itself alone, in some versions after this call."""
    logger.parent = logging.getLogger("vllm")
