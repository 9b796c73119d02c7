"""Messages that are logged at most once per process."""

import functools
import logging

logger = logging.getLogger("fp8moe")


@functools.cache
def log_once(level: int, text: str) -> None:
    logger.log(level, "fp8moe: %s", text)
