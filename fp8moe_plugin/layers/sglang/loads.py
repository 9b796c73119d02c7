"""The loading state of one model: the tensors that have arrived, their completeness, and failures of updates."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from fp8moe_plugin.errors import CheckpointError, Fp8MoeError
from fp8moe_plugin.formats.spec import SCALE, WEIGHT
from fp8moe_plugin.formats.weight_format import Role, WeightFormat
from fp8moe_plugin.layers.arrivals import Arrivals, check_scale_name
from fp8moe_plugin.layers.fallback import Fallback
from fp8moe_plugin.layers.loading import check_loaded, check_tensor, holds_nan
from fp8moe_plugin.layers.parameters import is_bias, role_of
from fp8moe_plugin.layers.recode import Halves
from fp8moe_plugin.layers.weights import check_scale_values
from fp8moe_plugin.ops.tables import forget_tables

Tensors = Iterable[tuple[str, torch.Tensor]]
# For MLA. SGLang fuses the two if both are in one call of a model's `load_weights`, and drops a single one.
FUSED_BY_THE_MODEL = ("q_a_proj", "kv_a_proj_with_mqa")


class Method(Protocol):
    """The quantization method of one of the model's layers."""

    prefix: str
    parameters: tuple[str, ...]  # the names of the layer's weights and scales


class Loads:
    """The loading state that all layers of a model share."""

    def __init__(self, scale: str | None, own_scale: str = SCALE) -> None:
        """
        Args:
            scale: the suffix of scales' names in the checkpoint; None if it has no scales.
            own_scale: that of the names of their parameters.
        """
        self.scale, self.own_scale = scale, own_scale
        self.fallback = Fallback("SGLang")
        self.arrivals = Arrivals()
        self.halves = Halves()  # of experts in MXFP4
        self.changed: dict[str, tuple[Method, Any]] = {}  # layers that have received tensors since their last check
        self.empty = True  # no tensor has arrived yet
        self.serving = False  # whether the model was loaded completely once
        self.written = False  # whether parameters may have changed since the model was last complete
        self.error: Exception | None = None  # why the current update has failed
        self.failure: str | None = None  # why the model must not be used any more

    def check_tensor(self, what: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        """Raise `CheckpointError` for a tensor that `parameter` cannot hold unchanged; `what` names it in messages.

        While the model serves, tensors on the parameter's device are also checked for NaN before they are written. For
        tensors on the host that would take too long. `check_layer` checks all parameters.
        """
        check_tensor(what, parameter, tensor)
        is_weight = role_of(parameter) is Role.WEIGHT
        if self.serving and is_weight and tensor.device == parameter.device and holds_nan(tensor):
            raise CheckpointError(f"{what} holds NaN, so it is damaged. Pass other weights.")

    def note(self, method: Method, layer: Any, projection: str, *roles: Role) -> None:
        """Note that a tensor is written; see `Arrivals.note`."""
        self.empty, self.written = False, True
        self.changed[method.prefix] = method, layer
        self.arrivals.note(projection, *roles)

    def check_layer(self, method: Method, layer: Any) -> None:
        """Check a layer's parameters once its tensors have arrived.

        Does nothing if no layer of the model has received a tensor: some load formats copy whole parameters after
        SGLang has called `process_weights_after_loading`. `finish_load` then checks them.

        Raises:
            CheckpointError: a tensor is missing or damaged.
        """
        forget_tables()
        if self.empty:
            return
        try:
            for name in method.parameters:
                parameter = getattr(layer, name)
                check_loaded(method.prefix, name, parameter)
                if not is_bias(parameter) and role_of(parameter) is Role.SCALES:
                    check_scale_values(f"the scales {method.prefix}.{name}", parameter)
        except CheckpointError as error:
            self.error = error
            raise
        self.changed.pop(method.prefix, None)

    def finish(self) -> None:
        """Check the tensors that have arrived since the last call, so that the model can be used.

        Raises:
            CheckpointError: a tensor is missing or damaged, or a weight has arrived without its scales.
        """
        for method, layer in list(self.changed.values()):
            self.check_layer(method, layer)
        self.halves.check()
        self.arrivals.check()
        self.written = False

    def finish_load(self, model: torch.nn.Module) -> None:
        """Check all layers of a model that was loaded for the first time, with any load format."""
        if self.empty:
            self.empty = False
            self.changed = {layer.quant_method.prefix: (layer.quant_method, layer) for layer in layers_of(model, self)}
        self.finish()
        self.serving = True
        self.fallback.announce(sum(1 for _ in layers_of(model, self)))

    def check_usable(self) -> None:
        """Raise `CheckpointError` unless the weights are complete. Called before each step."""
        if not self.failure and self.written:
            try:
                self.finish()
            except CheckpointError as error:
                self.fail(str(error))
        if self.failure:
            raise CheckpointError(self.failure)

    def fail(self, reason: str) -> str:
        """Take the model out of service after an update that wrote only some of its tensors. Returns the message."""
        self.failure = (
            f"{reason} The update has failed after it had written some tensors. A mixture of old and new weights "
            "cannot be used, so the engine ends at its next step. Restart it."
        )
        return self.failure

    def follow(self, model: Any) -> None:
        """Follow the tensors that are passed to the model's `load_weights`.

        Its errors, and those of the iterator of tensors, become `CheckpointError`s that name the last tensor.
        """
        load = model.load_weights

        @functools.wraps(load)
        def load_weights(weights: Tensors, *args: Any, **kwargs: Any) -> Any:
            if self.error:  # after an error, SGLang loads the same weights again
                raise self.error
            alone: set[str] = set()
            last = ["the first tensor"]
            try:
                config = getattr(model, "config", None)
                loaded = load(self._followed(weights, alone, last, config), *args, **kwargs)
                check_fused(model, alone)
            except Exception as error:
                self.halves.clear()
                self.error = error if isinstance(error, Fp8MoeError) else unexpected(last[0], error)
                raise self.error from error
            return loaded

        model.load_weights, model.fp8moe_loads = load_weights, self

    def _followed(
        self, weights: Tensors, alone: set[str], last: list[str], config: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            check_scale_name(name, (self.scale,) if self.scale else ())
            last[0] = f"{name} ({tensor.dtype} {list(tensor.shape)})"
            other = counterpart(name)
            if other in alone:
                alone.discard(other)
            elif other:
                alone.add(name)
            if other and tensor.numel() == 1 and self.own_scale != SCALE:
                tensor = scale_to_fuse(getattr(config, "text_config", config), name, tensor)
            module, _, kind = name.rpartition(".")
            yield f"{module}.{self.own_scale}" if kind == self.scale else name, tensor
            self.written = True  # the model is done with this tensor

    def check_direct(self, model: torch.nn.Module, tensors: Tensors) -> None:
        """Check tensors that are about to be copied unchanged into the model's parameters of these names.

        Raises:
            CheckpointError: a parameter of our layers cannot hold its tensor. No tensor is copied yet.
        """
        served = set(layers_of(model, self))
        of_name = {
            f"{prefix}.{own}": (layer, own)
            for prefix, layer in model.named_modules()
            if layer in served
            for own in layer.quant_method.parameters
        }
        found = [(name, *of_name[name], tensor) for name, tensor in tensors if name in of_name]
        for name, layer, own, tensor in found:
            parameter = getattr(layer, own)
            if not is_bias(parameter):
                self.check_tensor(name, parameter, tensor)
            if tensor.shape != parameter.shape:
                raise CheckpointError(
                    f"{name} has shape {list(tensor.shape)}, but the parameter has {list(parameter.shape)}. Pass what "
                    "this rank holds of it."
                )
        self.written = True
        for name, layer, own, _ in found:
            if is_bias(getattr(layer, own)):
                continue
            projection = name.removesuffix(self.own_scale.removeprefix(WEIGHT))
            self.note(layer.quant_method, layer, projection, role_of(getattr(layer, own)))


def layers_of(model: torch.nn.Module, loads: Loads) -> Iterator[Any]:
    """Yields the layers of a model that the plugin serves."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(method, "parameters") and method.quant_config.loads is loads:
            yield layer


def scale_parameter(weights: WeightFormat) -> str:
    """Returns the suffix of the names of scales' parameters. SGLang also reads them, under the names of its own."""
    return SCALE if weights.weight_block else weights.scale_names[0]


def counterpart(name: str) -> str | None:
    """Returns the name of the tensor that SGLang fuses with this one while it loads a model of MLA."""
    first, second = (f".{part}." for part in FUSED_BY_THE_MODEL)
    if first in name:
        return name.replace(first, second)
    return name.replace(second, first) if second in name else None


def scale_to_fuse(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns one scale of a weight that SGLang fuses with another for MLA as one for each of its rows.

    SGLang would take that of `q_a_proj` for both weights, as it may for input scales, which are not used.
    """
    if name.endswith(".input_scale"):
        return tensor.reshape(())
    q_a_proj, _ = FUSED_BY_THE_MODEL
    rows = config.q_lora_rank if f".{q_a_proj}." in name else config.kv_lora_rank + config.qk_rope_head_dim
    return tensor.reshape(1, 1).expand(rows, 1)


def check_fused(model: torch.nn.Module, alone: set[str]) -> None:
    """Raise `CheckpointError` if SGLang has dropped a tensor because its counterpart was not in the same call."""
    if alone and any(name.endswith(".fused_qkv_a_proj_with_mqa") for name, _ in model.named_modules()):
        name = min(alone)
        raise CheckpointError(
            f"{name} arrived without {counterpart(name)}, and SGLang loads only both together. Pass both in one call, "
            "and check that the checkpoint is complete."
        )


def unexpected(last: str, error: Exception) -> CheckpointError:
    """Returns the `CheckpointError` for an error of another library, at the tensor `last` or after it."""
    return CheckpointError(
        f"Loading the weights failed at {last}, or at a tensor before it: {reason(error)}. Check that every file of "
        "the checkpoint is complete, and that config.json belongs to it."
    )


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, Fp8MoeError) else f"{type(error).__name__}: {error}"
