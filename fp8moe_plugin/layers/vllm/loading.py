"""Checks of a layer's weights while they are loaded, both at startup and when a running model is reloaded."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.loading import as_kept, check_loaded, check_tensor, holds_nan, per_row, shape_errors
from fp8moe_plugin.layers.pack import Share
from fp8moe_plugin.layers.parameters import role_of, unset
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.model_state import ModelState
from fp8moe_plugin.ops.tables import forget_tables

# Takes the arguments of a weight loader. Returns the name of the projection for `Arrivals`, or None for a bias, and the
# tensor for the loader; None for a tensor of another rank.
Check = Callable[..., tuple[str | None, torch.Tensor] | None]


class Arriving(NamedTuple):
    """The tensors of an expert as vLLM's model passes them to a loader."""

    hidden: int
    intermediate: int  # channels in the tensors
    share: Share  # the part of them that belongs to this rank


class LayerLoading:
    """Follows the loading and reloading of one layer's parameters.

    To reload a layer, vLLM registers parameters on the meta device and buffers the tensors that arrive. It then
    registers uninitialized parameters, loads the tensors into them and calls `process_weights_after_loading`. Finally
    it copies the result into the original parameters and registers these again. If no tensor arrived, it only
    registers the original parameters again.
    """

    def __init__(self, prefix: str, model: ModelState, online: bool) -> None:
        self.prefix = prefix
        self.online = online  # whether the checkpoint is unquantized
        self.model = model
        self.parameters: dict[str, torch.nn.Parameter] = {}  # the originals, which kernels and CUDA graphs always read
        self.check_reloadable: Callable[[], None] = lambda: None  # raises `CheckpointError`
        self.serving = False  # whether all weights were loaded once
        self.checked = False  # whether `check_reloadable` has passed in the current reload
        self.arriving: Arriving | None = None  # of a layer of experts

    @property
    def reloading(self) -> bool:
        """Whether vLLM has begun to reload the layer and has not finished."""
        return self.prefix in self.model.reloading

    def register(self, layer: Any, parameters: dict[str, Any], check: Check) -> None:
        """Register the parameters of a new layer, filled with NaN by `unset` to detect missing tensors.

        Args:
            parameters: `torch.nn.Parameter`s with a `weight_loader`, a bound method of the layer, as vLLM sets it.
            check: called before each call of these loaders; raises `CheckpointError` for an unusable tensor.
        """
        self.parameters = parameters
        self.model.starting.add(self.prefix)
        layer.fp8moe_loading = self
        layer.register_parameter = functools.partial(self._register, layer)
        for name, parameter in parameters.items():
            unset(parameter)
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
            unset(parameter)
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
        forget_tables()
        with self.errors_fail_model():
            for name in self.parameters:
                check_loaded(self.prefix, name, getattr(layer, name))
            self.model.halves.check(f"{self.prefix} ")
            if self.reloading:
                self.model.finish_layer(self.prefix, got_tensors=True)
        if not self.serving:
            self.parameters = {name: getattr(layer, name) for name in self.parameters}
            self.serving = True
            self.model.start_layer(self.prefix)

    @contextmanager
    def errors_fail_model(self) -> Iterator[None]:
        """Take the model out of service after an exception in the block, unless the model survives the error."""
        self.model.check_not_failed()
        try:
            yield
        except Exception as error:
            if not self.serving or self.model.survives_error:
                raise
            raise self.model.fail(error) from error

    def kept(self, what: str, parameter: torch.Tensor, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns a tensor for the loader, except that its size is not checked.

        Unquantized weights are checked by `quantize_weight`.

        Args:
            what: names the tensor in messages.
            rows: output channels of the weight in the checkpoint.
        Raises:
            CheckpointError: `parameter` cannot hold the tensor unchanged.
        """
        if self.online:
            if role_of(parameter) is Role.SCALES:
                raise CheckpointError(
                    f"{what}: the model was loaded from an unquantized checkpoint, which has no scales. Load "
                    "unquantized weights."
                )
            return tensor
        tensor = per_row(parameter, tensor, rows)
        check_tensor(what, parameter, tensor)
        has_values = not (tensor.is_meta or parameter.is_meta)
        # Otherwise `finish` checks the whole parameter.
        if has_values and role_of(parameter) is Role.WEIGHT and self.in_place and holds_nan(tensor):
            raise CheckpointError(f"{what} holds NaN, so it is damaged. Download the checkpoint again.")
        return as_kept(parameter, tensor)

    @property
    def in_place(self) -> bool:
        """Whether loaders now write to the parameters that kernels read."""
        return self.serving and not self.reloading

    def note_arrival(self, projection: str, *roles: Role) -> None:
        """Note which tensors are loaded; see `Arrivals.note`."""
        if self.in_place:
            self.model.written = True
            self.model.arrivals.note(projection, *roles)


def _checked(load: Callable[..., Any], check: Check) -> Callable[..., Any]:
    """Returns a loader that calls `check` first. It does not reference the layer, because vLLM keeps loaders longer."""

    @functools.wraps(load)
    def check_and_load(
        layer: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        loading = layer.fp8moe_loading
        with loading.errors_fail_model():
            loading.check_reloadable_once()
            checked = check(layer, param, loaded_weight, *args, **kwargs)
            if checked is None:
                return False if kwargs.get("return_success") else None
            projection, loaded_weight = checked
            # vLLM checks the shape and then copies, or copies the parts of a fused tensor one after the other.
            in_parts = not (args or kwargs) and len(layer.logical_widths) > 1
            if in_parts and loading.in_place:
                loading.model.written = True
            with shape_errors(loading.prefix, loaded_weight):
                result = load(layer, param, loaded_weight, *args, **kwargs)
            if projection and not loading.online:  # an online loader notes its quantized tensors
                loading.note_arrival(projection, role_of(param))
            return result

    return check_and_load


def check_experts_not_moved(prefix: str, eplb_state: Any, slots: int) -> None:
    """Raise `CheckpointError` if load balancing has moved experts: vLLM would reload weights into the wrong slots."""
    if compat.experts_have_moved(eplb_state, slots):
        raise CheckpointError(
            f"{prefix}: expert load balancing has moved experts, but vLLM would load weights into their original "
            "places. To be able to reload weights, restart without --enable-eplb."
        )
