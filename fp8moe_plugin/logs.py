"""Messages that are logged once per process, however often they apply."""

import functools
import logging

logger = logging.getLogger("fp8moe")


@functools.cache
def log_once(level: int, text: str) -> None:
    logger.log(level, "fp8moe: %s", text)
