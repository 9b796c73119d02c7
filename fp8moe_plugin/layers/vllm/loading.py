"""Checks of a layer's weights while they are loaded, both at startup and when a running model is reloaded."""

import functools
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NoReturn

import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.loading import check_loaded, check_tensor, holds_nan, shape_errors
from fp8moe_plugin.ops.checks import FP8, poison

logger = logging.getLogger("fp8moe")

Check = Callable[..., None]  # takes the arguments of a weight loader


@dataclass
class ModelState:
    """The loading state that all layers of a model share. Its worker calls `check_usable` before each step."""

    in_worker: bool = False  # whether this process is a worker that runs the model for an engine
    failure: str | None = None  # why the model must not be used any more
    reloading: set[str] = field(default_factory=set)  # layers whose reload has begun but not finished
    reloaded: bool = False  # whether a layer has received its tensors in the current reload
    without_tensors: list[str] = field(default_factory=list)  # layers that received none in the current reload

    def check_not_failed(self) -> None:
        """Raise `CheckpointError` if a reload has failed."""
        if self.failure:
            raise CheckpointError(self.failure)

    def check_usable(self) -> None:
        """Raise `CheckpointError` if a reload has failed or is unfinished."""
        self.check_not_failed()
        if self.reloading:
            raise CheckpointError(
                f"{min(self.reloading)}: the reload of its weights is unfinished. Restart the engine in a new process."
            )

    def begin_layer(self, layer: str) -> None:
        """Note that vLLM begins to reload a layer."""
        if not self.reloading:
            self.reloaded, self.without_tensors = False, []
        self.reloading.add(layer)

    def finish_layer(self, layer: str, got_tensors: bool) -> None:
        """Note that vLLM has reloaded a layer or, if no tensors arrived for it, restored it.

        Raises:
            CheckpointError: some layers got tensors and others did not. If none did, nothing was reloaded.
        """
        self.reloading.discard(layer)
        self.reloaded |= got_tensors
        if not got_tensors:
            self.without_tensors.append(layer)
        if self.reloaded and self.without_tensors:
            raise CheckpointError(
                f"{self.without_tensors[0]}: no tensor of this layer has arrived, but a reload must include every "
                "quantized layer."
            )

    def fail(self, cause: Exception) -> NoReturn:
        """Take the model out of service after a failed reload, which leaves old weights in some layers, new in others.

        vLLM reports an exception to the caller of the reload, but keeps serving. Therefore worker processes exit, which
        ends the engine, and an engine core that runs the model itself is told to shut down after it has reported the
        exception. In the user's own process, every later load and every step raises.

        Raises:
            CheckpointError: unless this process exits.
        """
        self.failure = (
            f"{cause} The failed reload left a mixture of old and new weights, which cannot be used. "
            "Restart the engine in a new process."
        )
        logger.critical("fp8moe: %s", self.failure)
        if self.in_worker:
            os._exit(1)  # an orderly exit would close the communicators first, and wait for the other ranks
        if multiprocessing.current_process().name.startswith("EngineCore"):
            os.kill(os.getpid(), signal.SIGTERM)
        raise CheckpointError(self.failure) from cause


class LayerLoading:
    """Follows the loading and reloading of one layer's parameters.

    To reload a layer, vLLM registers parameters on the meta device and buffers the tensors that arrive. It then
    registers uninitialized parameters, loads the tensors into them and calls `process_weights_after_loading`. Finally
    it copies the result into the original parameters and registers these again. If no tensor arrived, it only
    registers the original parameters again.
    """

    def __init__(self, prefix: str, model: ModelState) -> None:
        self.prefix = prefix
        self.model = model
        self.parameters: dict[str, torch.nn.Parameter] = {}  # the originals, which kernels and CUDA graphs always read
        self.check_reloadable: Callable[[], None] = lambda: None  # raises `CheckpointError`
        self.serving = False  # whether all weights were loaded once
        self.checked = False  # whether `check_reloadable` has passed in the current reload

    @property
    def reloading(self) -> bool:
        """Whether vLLM has begun to reload the layer and has not finished."""
        return self.prefix in self.model.reloading

    def register(self, layer: Any, parameters: dict[str, Any], check: Check) -> None:
        """Register the parameters of a new layer, filled with NaN by `poison` to detect missing tensors.

        Args:
            parameters: `torch.nn.Parameter`s with a `weight_loader`, a bound method of the layer, as vLLM sets it.
            check: called before each call of these loaders; raises `CheckpointError` for an unusable tensor.
        """
        self.parameters = parameters
        layer.fp8moe_loading = self
        layer.register_parameter = functools.partial(self._register, layer)
        for name, parameter in parameters.items():
            poison(parameter)
            parameter.weight_loader = MethodType(_checked(parameter.weight_loader.__func__, check), layer)
            layer.register_parameter(name, parameter)

    def _register(self, layer: Any, name: str, parameter: torch.nn.Parameter | None) -> None:
        torch.nn.Module.register_parameter(layer, name, parameter)
        if parameter is None or name not in self.parameters or not self.serving:
            return
        if parameter.is_meta:
            self.checked = False
            self.model.begin_layer(self.prefix)
        elif self.reloading and parameter is not self.parameters[name]:
            poison(parameter)
        elif self.reloading and name == list(self.parameters)[-1]:  # all originals are registered again
            with self.errors_fail_model():
                self.model.finish_layer(self.prefix, got_tensors=False)

    def check_reloadable_once(self) -> None:
        """Raise `CheckpointError` if the layer cannot be reloaded; checked only once per reload."""
        if self.serving and not (self.reloading and self.checked):
            self.check_reloadable()
            self.checked = True

    def finish(self, layer: Any) -> None:
        """Check the parameters after vLLM has loaded all tensors of the layer.

        Raises:
            CheckpointError: a tensor is missing or holds NaN.
        """
        with self.errors_fail_model():
            for name in self.parameters:
                check_loaded(self.prefix, name, getattr(layer, name))
            if self.reloading:
                self.model.finish_layer(self.prefix, got_tensors=True)
        if not self.serving:
            self.parameters = {name: getattr(layer, name) for name in self.parameters}
            self.serving = True

    @contextmanager
    def errors_fail_model(self) -> Iterator[None]:
        """Turn an exception in the block into `ModelState.fail` if the layer was serving, and let it pass otherwise."""
        self.model.check_not_failed()
        try:
            yield
        except Exception as error:
            if not self.serving:
                raise
            self.model.fail(error)

    def check_tensor(self, what: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        """Raise `CheckpointError` for a tensor that `parameter` cannot hold unchanged; `what` names it in messages."""
        check_tensor(what, parameter, tensor)
        if tensor.is_meta or parameter.is_meta:  # there are no values yet
            return
        # Otherwise `finish` checks the whole parameter.
        if parameter.dtype == FP8 and self.serving and not self.reloading and holds_nan(tensor):
            raise CheckpointError(f"{what} holds NaN, so it is damaged. Download the checkpoint again.")


def _checked(load: Callable[..., Any], check: Check) -> Callable[..., Any]:
    """A loader that calls `check` first. It keeps no reference to the layer, because vLLM keeps loaders longer."""

    @functools.wraps(load)
    def check_and_load(
        layer: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        loading = layer.fp8moe_loading
        with loading.errors_fail_model():
            loading.check_reloadable_once()
            check(layer, param, loaded_weight, *args, **kwargs)
            with shape_errors(loading.prefix, loaded_weight):
                return load(layer, param, loaded_weight, *args, **kwargs)

    return check_and_load
