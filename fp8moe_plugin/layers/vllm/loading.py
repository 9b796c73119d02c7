"""A layer's weights as they arrive: those that cannot serve are refused, at the start and when a model is reloaded."""

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

from fp8moe_plugin.checkpoint import headers
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.weights import check_scale_values
from fp8moe_plugin.ops.checks import FP8, poison

logger = logging.getLogger("fp8moe")

E4M3_NAN = 0x7F  # with the sign bit cleared
BYTES_AT_ONCE = 1 << 26  # of a weight: bounds the memory that looking at it takes
SCALE_DTYPES = tuple({"F32": torch.float32, "BF16": torch.bfloat16}[name] for name in headers.SCALE_DTYPES)

Check = Callable[..., None]  # takes the arguments of a weight loader


@dataclass
class ModelState:
    """Shared by all layers of a model. The worker calls `check_serves` before each step."""

    in_worker: bool = False  # this process is one of several that run the model for an engine
    failure: str | None = None  # why the model must not serve any more
    reloading: set[str] = field(default_factory=set)  # layers that wait for their tensors
    reloaded: bool = False  # a layer has got its tensors in the reload under way
    without_tensors: list[str] = field(default_factory=list)  # layers that got none

    def check(self) -> None:
        """Raise `CheckpointError` if a reload has failed."""
        if self.failure:
            raise CheckpointError(self.failure)

    def check_serves(self) -> None:
        """Raise `CheckpointError` if the model must not serve: a reload has failed, or never came to its end."""
        self.check()
        if self.reloading:
            raise CheckpointError(f"{min(self.reloading)}: a reload of its weights has not ended. Restart the engine.")

    def begin(self, layer: str) -> None:
        """vLLM begins to reload a layer."""
        if not self.reloading:
            self.reloaded, self.without_tensors = False, []
        self.reloading.add(layer)

    def finish(self, layer: str, got_tensors: bool) -> None:
        """vLLM has reloaded a layer, or given it back as it was, for want of tensors.

        Raises:
            CheckpointError: some layers got tensors and others got none. If no layer got any, nothing was reloaded.
        """
        self.reloading.discard(layer)
        self.reloaded |= got_tensors
        if not got_tensors:
            self.without_tensors.append(layer)
        if self.reloaded and self.without_tensors:
            raise CheckpointError(
                f"{self.without_tensors[0]}: no tensor of this layer has arrived, and a reload must bring every "
                "quantized layer."
            )

    def end(self, cause: Exception) -> NoReturn:
        """End an engine whose reload failed: some layers hold the old weights by now, others the new ones.

        vLLM reports an exception to whoever asked for the reload, and goes on serving. So worker processes end, which
        ends the engine, and an engine core that runs the model itself shuts down once it has reported the exception.
        In the user's own process every later load and every step raises.

        Raises:
            CheckpointError: unless this process ends.
        """
        self.failure = (
            f"{cause} This stopped a reload halfway: the model holds old and new weights and cannot serve. "
            "Restart the engine in a new process."
        )
        logger.critical("fp8moe: %s", self.failure)
        if self.in_worker:
            os._exit(1)  # an orderly exit would leave the communicators first, and wait for the other ranks there
        if multiprocessing.current_process().name.startswith("EngineCore"):
            os.kill(os.getpid(), signal.SIGTERM)
        raise CheckpointError(self.failure) from cause


class LayerLoading:
    """Watches what is loaded into the parameters of one layer.

    To reload a layer, vLLM registers parameters on the meta device and buffers the tensors that arrive. It then
    registers parameters with uninitialized memory, loads the tensors into them and has the layer processed. At last it
    copies the result into the parameters that served before, and registers these again. If no tensor arrived, it goes
    straight to the last step.
    """

    def __init__(self, prefix: str, model: ModelState) -> None:
        self.prefix = prefix
        self.model = model
        self.parameters: dict[str, torch.nn.Parameter] = {}  # what kernels and CUDA graphs read, after a reload too
        self.check_reloadable: Callable[[], None] = lambda: None  # raises `CheckpointError`
        self.serving = False
        self.checked = False  # by `check_reloadable`, in the reload under way

    @property
    def reloading(self) -> bool:
        """Whether vLLM has begun to reload the layer, and not ended."""
        return self.prefix in self.model.reloading

    def register(self, layer: Any, parameters: dict[str, Any], check: Check) -> None:
        """Register the parameters of a new layer, poisoned.

        Args:
            parameters: `torch.nn.Parameter`s, each with its `weight_loader` as vLLM sets it, a method of the layer.
            check: called before each call of these loaders; raises `CheckpointError` for a tensor that cannot serve.
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
            self.model.begin(self.prefix)
        elif self.reloading and parameter is not self.parameters[name]:
            poison(parameter)
        elif self.reloading and name == list(self.parameters)[-1]:  # with which the layer is whole again
            with self.refusing():
                self.model.finish(self.prefix, got_tensors=False)

    def check_once(self) -> None:
        """Raise `CheckpointError` if the layer cannot be loaded again; looked at once a reload."""
        if self.serving and not (self.reloading and self.checked):
            self.check_reloadable()
            self.checked = True

    def finish(self, layer: Any) -> None:
        """Call when all tensors of the layer have arrived.

        Raises:
            CheckpointError: one is missing or holds NaN.
        """
        with self.refusing():
            for name in self.parameters:
                check_loaded(self.prefix, name, getattr(layer, name))
            if self.reloading:
                self.model.finish(self.prefix, got_tensors=True)
        if not self.serving:
            self.parameters = {name: getattr(layer, name) for name in self.parameters}
            self.serving = True

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """What fails inside ends an engine that serves: see `ModelState.end`."""
        self.model.check()
        try:
            yield
        except Exception as error:
            if not self.serving:
                raise
            self.model.end(error)

    def check(self, what: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        """Raise `CheckpointError` for a tensor that `parameter` cannot take as it is."""
        wanted = (FP8,) if parameter.dtype == FP8 else SCALE_DTYPES
        if tensor.dtype not in wanted:
            raise CheckpointError(
                f"{what} has dtype {tensor.dtype}, a block-FP8 checkpoint holds {' or '.join(map(str, wanted))} there. "
                "Download the checkpoint again, or serve the unquantized one: --quantization fp8moe quantizes it."
            )
        if tensor.dim() < 2:
            raise CheckpointError(
                f"{what} has shape {list(tensor.shape)}, but must be a matrix: a weight, or one scale for each of "
                "its 128x128 blocks. Use a block-FP8 checkpoint."
            )
        if tensor.is_meta or parameter.is_meta:  # vLLM only counts what arrives
            return
        if parameter.dtype != FP8:
            check_scale_values(f"the scales {what}", tensor)
        elif self.serving and not self.reloading and holds_nan(tensor):  # else `finish` looks at all at once
            raise CheckpointError(f"{what} holds NaN: it is damaged.")


def _checked(load: Callable[..., Any], check: Check) -> Callable[..., Any]:
    """A loader that checks first. It gets what it needs from the layer: vLLM keeps loaders longer than layers."""

    @functools.wraps(load)
    def check_and_load(
        layer: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        loading = layer.fp8moe_loading
        with loading.refusing():
            loading.check_once()
            check(layer, param, loaded_weight, *args, **kwargs)
            try:
                return load(layer, param, loaded_weight, *args, **kwargs)
            except (AssertionError, IndexError, RuntimeError) as error:  # vLLM cuts and copies what does not fit
                raise CheckpointError(
                    f"{loading.prefix}: a tensor of shape {list(loaded_weight.shape)} does not fit the "
                    f"layer: {error or type(error).__name__}. Check that config.json belongs to the weights."
                ) from error

    return check_and_load


def check_loaded(layer: str, name: str, parameter: torch.Tensor) -> None:
    """Raise `CheckpointError` if an e4m3 or float32 parameter still holds NaN anywhere (or a scale infinity).

    Before anything was loaded into it, `checks.poison` has filled it with NaN.
    """
    if not holds_nan(parameter):
        return
    where = ""
    if parameter.dim() == 3:
        where = f" of local expert {next(e for e, part in enumerate(parameter) if holds_nan(part))}"
    raise CheckpointError(
        f"{layer}.{name}{where}: a tensor is missing from the checkpoint, or holds NaN. "
        "Check that every shard listed in model.safetensors.index.json is there and whole, and download it again."
    )


def holds_nan(parameter: torch.Tensor) -> bool:
    if parameter.dtype == torch.float32:
        return not bool(parameter.isfinite().all())
    parts = parameter.data.view(torch.uint8).flatten().split(BYTES_AT_ONCE)
    return any(bool(((part & 0x7F) == E4M3_NAN).any()) for part in parts)
