"""Loads into a serving model: afterwards it serves only new weights, only old weights, or nothing."""

import functools
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8moe_plugin.errors import CheckpointError, Fp8MoeError
from fp8moe_plugin.formats.spec import SCALE
from fp8moe_plugin.layers.arrivals import Arrivals, check_scale_name
from fp8moe_plugin.layers.fallback import Fallback
from fp8moe_plugin.layers.recode import Halves
from fp8moe_plugin.layers.vllm import compat

logger = logging.getLogger("fp8moe")

Tensors = Iterable[tuple[str, torch.Tensor]]


@dataclass
class ModelState:
    """The loading state that all layers of a model share.

    vLLM loads weights in two ways. `reload_weights` reloads layer by layer, see `LayerLoading`. The model's own
    `load_weights` writes in place. An update may take many calls of it, and vLLM does not signal when the update is
    complete, so it is checked before the next step, see `prepare_step`.
    """

    scales: tuple[str, ...] = (SCALE,)  # the suffixes of scales' names; none for an unquantized checkpoint
    in_worker: bool = False  # whether this process is a worker that runs the model for an engine
    only_rank: bool = True  # whether no other process holds a part of the model
    engine: Any = None  # vLLM's configuration
    failure: str | None = None  # why the model must not be used any more
    reloading: set[str] = field(default_factory=set)  # layers whose reload has begun but not finished
    reloaded: bool = False  # whether a layer has received its tensors in the current reload
    without_tensors: list[str] = field(default_factory=list)  # layers that received none in the current reload
    arrivals: Arrivals = field(default_factory=Arrivals)  # tensors loaded in place since the last step
    halves: Halves = field(default_factory=Halves)  # of experts in MXFP4
    written: bool = False  # whether anything may have been written since the last step
    starting: set[str] = field(default_factory=set)  # layers that wait for their first weights
    started: set[str] = field(default_factory=set)  # layers that have them
    fallback: Fallback = field(default_factory=lambda: Fallback("vLLM"))
    calls: int = 0  # of `load_weights`, nested ones included, that have not returned

    def check_not_failed(self) -> None:
        """Raise `CheckpointError` if a load has failed."""
        if self.failure:
            raise CheckpointError(self.failure)

    def check_usable(self) -> None:
        """Raise `CheckpointError` if a load has failed, or a reload is unfinished."""
        self.check_not_failed()
        if self.reloading:
            raise CheckpointError(
                f"{min(self.reloading)}: the reload of its weights is unfinished. Restart the engine in a new process."
            )

    def prepare_step(self) -> None:
        """Check the tensors that were loaded in place since the last step, and derive MLA's tensors again.

        Raises:
            CheckpointError: the model must not be used.
        """
        self.check_usable()
        if not self.written:
            return
        try:
            self.halves.check()
            self.arrivals.check()
            compat.derive_mla_weights(self.engine)
        except Exception as error:
            raise self.fail(error) from error
        self.written = False

    def leave_layer(self, layer: str, part: str, refusal: str, method: Any) -> None:
        """Count a layer that vLLM's own method has taken; see `Fallback.note`."""
        self.fallback.note(layer, part, refusal, method)
        self.starting.add(layer)
        process = method.process_weights_after_loading

        @functools.wraps(process)
        def process_and_start(*args: Any, **kwargs: Any) -> None:
            process(*args, **kwargs)
            self.start_layer(layer)

        method.process_weights_after_loading = process_and_start

    def start_layer(self, layer: str) -> None:
        """Note that a layer has its first weights. After the last layer, log which layers are not ours."""
        if layer not in self.starting:
            return
        self.starting.remove(layer)
        self.started.add(layer)
        if not self.starting:
            self.fallback.announce(len(self.started - self.fallback.layers))

    def begin_layer(self, layer: str) -> None:
        """Note that vLLM begins to reload a layer."""
        if not self.reloading:
            self.reloaded, self.without_tensors = False, []
            compat.keep_mla_weights(self.engine)
        self.reloading.add(layer)
        self.halves.clear(f"{layer} ")

    def finish_layer(self, layer: str, got_tensors: bool) -> None:
        """Note that vLLM has reloaded a layer or, if no tensors arrived for it, restored it.

        Raises:
            CheckpointError: some layers got tensors and others did not. If none did, nothing was reloaded.
        """
        self.reloading.discard(layer)
        if got_tensors:
            self.reloaded = self.written = True
        else:
            self.without_tensors.append(layer)
        if self.reloaded and self.without_tensors:
            raise CheckpointError(
                f"{self.without_tensors[0]}: no tensor of this layer has arrived, but a reload must include every "
                "quantized layer."
            )
        if self.reloaded:
            self.arrivals.clear()  # all layers are reloaded, or the model fails

    def watch(self, module: torch.nn.Module) -> None:
        """Follow the calls of a module's `load_weights`, at startup and later."""
        load: Callable[..., Any] = module.load_weights  # type: ignore[assignment]
        serving = False

        @functools.wraps(load)
        def load_weights(weights: Tensors, *args: Any, **kwargs: Any) -> Any:
            nonlocal serving
            self.check_not_failed()
            serving = serving or _serves(module)
            self.calls += 1
            try:
                return load(self._arriving(weights, serving), *args, **kwargs)
            except BaseException as error:
                self.halves.clear()
                if not serving or self.calls > 1 or self.failure or self._has_changed_nothing(module):
                    raise
                raise self.fail(error) from error
            finally:
                self.calls -= 1

        module.load_weights = load_weights  # type: ignore[assignment]

    def _arriving(self, weights: Tensors, serving: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            check_scale_name(name, self.scales)
            yield name, tensor
            if serving and not self.reloading:  # the model requests the next tensor, so it has written this one
                self.written = True

    def _has_changed_nothing(self, module: torch.nn.Module) -> bool:
        """Undo a failed `load_weights` of the module if possible. Returns whether the model is unchanged.

        With several ranks it is not: other ranks may have loaded what this one refused.
        """
        if not self.only_rank:
            return False
        if compat.reload_began(module):
            return compat.undo_reload(module, self.engine)
        return not self.written

    @property
    def survives_error(self) -> bool:
        """Whether the model stays usable after an error in the load of a serving layer, or this is decided later."""
        decided_later = self.calls > 0  # by the caller of `load_weights`
        return decided_later or bool(self.failure) or (self.only_rank and not self.written and not self.reloading)

    def fail(self, cause: BaseException) -> BaseException:
        """Take the model out of service after a failed load, which left a mixture of old and new weights.

        vLLM reports an exception to the caller of the load, but keeps serving. Therefore worker processes exit, which
        ends the engine. An engine core that runs the model in its own process gets SIGTERM, and shuts down after it has
        reported the exception. In the user's own process, every later load and every step raises.

        Returns:
            The exception to raise: a `CheckpointError`, or `cause` if it ends the program.
        """
        why = str(cause) if isinstance(cause, Fp8MoeError) else f"{type(cause).__name__}: {cause}."
        self.failure = (
            f"{why} The failed reload left a mixture of old and new weights, which cannot be used. "
            "Restart the engine in a new process."
        )
        logger.critical("fp8moe: %s", self.failure)
        if not isinstance(cause, Exception):
            return cause
        if self.in_worker:
            os._exit(1)  # an orderly exit would close the communicators first, and wait for the other ranks
        if multiprocessing.current_process().name.startswith("EngineCore"):
            os.kill(os.getpid(), signal.SIGTERM)
        return CheckpointError(self.failure)


def _serves(module: torch.nn.Module) -> bool:
    """Returns whether the module has a layer with our method whose weights were all loaded once."""
    loadings = (getattr(layer, "fp8moe_loading", None) for layer in module.modules())
    return any(loading is not None and loading.serving for loading in loadings)
