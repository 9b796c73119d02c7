"""Registration with an engine. Each process of the engine calls it before it parses the command line."""

import importlib.util
import logging
from collections.abc import Callable

from fp8moe_plugin.settings import NAME

logger = logging.getLogger("fp8moe")


def register_safely(engine: str, package: str, register: Callable[[], None]) -> None:
    """Call `register` if the engine is installed.

    Never raises, because a broken plugin must not take down an engine that does not use it.

    Args:
        engine: its name in messages.
        package: the name of its Python package.
    """
    try:
        if importlib.util.find_spec(package) is None:
            logger.info("%s is not installed, so --quantization %s is not registered", engine, NAME)
        else:
            register()
    except Exception:
        logger.exception("--quantization %s is not available, because registering it with %s failed", NAME, engine)
