"""The layers of a model that run on the engine's own kernels, because ours do not support their shape or format."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.layers import metrics
from fp8moe_plugin.layers.blocks import unsupported_shape
from fp8moe_plugin.logs import log_once

BACKEND = "engine"  # in the metrics
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a layer, in its name
logger = logging.getLogger("fp8moe")


@dataclass
class Fallback:
    """The names of these layers."""

    engine: str
    layers: set[str] = field(default_factory=set)

    def note(self, layer: str, part: str, refusal: str, method: object) -> None:
        """Count a layer, and log the first one of its kind.

        Args:
            layer: its name in the engine.
            part: "dense" or "experts", the layout in the metrics.
            refusal: why the kernels do not support it.
            method: the engine's own method, which has taken the layer.
        """
        self.layers.add(layer)
        log_once(
            logging.WARNING,
            f"{_kind(layer)} runs on {self.engine}'s own {type(method).__name__}: {refusal} "
            "(FP8MOE_FALLBACK=forbid: refuse such a model)",
        )
        metrics.count_layer(layer, BACKEND, part)

    def take_dense(
        self, layer: Any, prefix: str, refusal: str, ranks_option: str | None, make: Callable[[], Any]
    ) -> Any:
        """Make the engine's own method that of a new dense layer, and return it.

        Args:
            refusal: why the kernels do not support the layer.
            ranks_option: see `unsupported_shape`.
            make: returns the engine's method, which has created the weights of the layer.
        Raises:
            UnsupportedError: the engine's method does not support the layer either.
        """
        try:
            method = make()
        except Exception as error:  # of any class: engines assert, raise, or have no kernel for this machine
            why = f"{refusal}, and {self.engine}'s own method cannot take it ({type(error).__name__}: {error})"
            raise unsupported_shape(prefix, why, ranks_option) from error
        layer.quant_method = method
        return method

    def announce(self, ours: int) -> None:
        """Log and export the number of layers of each kind, if there are any. Their weights have been loaded.

        Args:
            ours: the number of layers that run on our kernels.
        """
        if self.layers:
            kinds = Counter(_kind(layer) for layer in self.layers)
            named = ", ".join(f"{kind} ({number})" for kind, number in sorted(kinds.items()))
            logger.warning(
                "fp8moe: %d layers run on the plugin's kernels, %d on %s's own: %s",
                *(ours, len(self.layers), self.engine, named),
            )
            metrics.export()


@contextmanager
def refused_by_both(engine: str, refused: Callable[[str], UnsupportedError]) -> Iterator[None]:
    """Raise `UnsupportedError` if the engine's own method of experts raises within the context.

    Args:
        refused: returns this error, with an addition to its reason.
    """
    try:
        yield
    except Exception as error:  # of any class: engines assert, raise, or have no kernel for this machine
        more = f", and {engine}'s own method cannot take them ({type(error).__name__}: {error})"
        raise refused(more) from error


def _kind(layer: str) -> str:
    return NUMBER.sub("N", layer)
