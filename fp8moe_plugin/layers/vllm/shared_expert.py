"""A shared expert as wide as the routed ones, computed as one more expert by the same kernels.

vLLM's models make the shared expert, an MLP of two dense layers, just before the routed experts; its runner calls the
MLP on a second stream and adds the result. Here the experts' tensors get one more slot. The experts' parameters are
views of the slots before it, and those of the MLP become views of it. So each weight exists once, and loading,
reloading and sleep mode see the parameters that they would see anyway.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fp8moe_plugin.checkpoint.shapes import MAX_LOCAL_EXPERTS
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.layers.experts import Experts
from fp8moe_plugin.layers.parameters import expert_tensors, format_of
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.plan.spec import LayerSpec
from fp8moe_plugin.settings import settings

GATE_UP, DOWN = ".shared_experts.gate_up_proj", ".shared_experts.down_proj"
MLPS = ("DeepseekV2MLP", "DeepseekV4MLP")  # of vLLM's modules, those that are known to compute the same as an expert
ALIGNMENT = 16  # bytes; the alignment of each tensor of a dense layer


class Mlp(NamedTuple):
    """The dense layers of a shared expert, both with our method."""

    gate_up: Any
    down: Any

    def tensors(self) -> tuple[torch.nn.Parameter, ...]:
        """Returns the tensors in the order of the experts' tensors: w13, its scales, w2, its scales."""
        return *_parameters(self.gate_up), *_parameters(self.down)

    def fits(self, moe: Any, spec: LayerSpec, experts: int, hidden: int, intermediate: int) -> bool:
        """Returns whether the shared expert can be computed as one more routed expert.

        Args:
            moe: vLLM's configuration of the layer.
            spec: the spec of its routed experts.
            experts: the number of routed experts on this rank.
            hidden, intermediate: sizes of an expert on this rank.
        """
        ranks = moe.moe_parallel_config
        if ranks.use_ep or ranks.enable_eplb or ranks.dp_size > 1 or ranks.is_sequence_parallel or ranks.pcp_size > 1:
            return False
        if experts + 1 > MAX_LOCAL_EXPERTS or self.down.reduce_results or self.gate_up.gather_output:
            return False
        if spec.bias or any(not hasattr(layer, "fp8moe_loading") for layer in self):  # on vLLM's own method
            return False
        if any(layer.tp_size != moe.tp_size or layer.bias is not None for layer in self):
            return False
        if spec.activation != Activation(limit=spec.activation.limit):  # `merge` compares the limit
            _announce_other_activation()
            return False
        if any(format_of(tensor) != spec.weights for tensor in self.tensors()):
            log_once(logging.INFO, f"shared experts are not merged: the routed ones are {spec.weights.name}")
            return False
        with torch.device("meta"):
            slots = expert_tensors(spec.weights, 1, hidden, intermediate).values()
        aligned = not any(slot.nbytes % ALIGNMENT for slot in slots)
        pairs = list(zip(self.tensors(), slots, strict=True))
        return aligned and all(own.shape == slot.shape[1:] and own.dtype == slot.dtype for own, slot in pairs)


def _announce_other_activation() -> None:
    log_once(logging.INFO, "shared experts are not merged: their activation may differ from that of the others")


def _parameters(layer: Any) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    return layer.weight, getattr(layer, layer.quant_method.scale)


@dataclass
class DenseLayers:
    """The dense layers of the latest shared expert by prefix, kept until the routed experts are created."""

    layers: dict[str, Any] = field(default_factory=dict)

    def note(self, prefix: str, layer: Any) -> None:
        """Keep a dense layer if it belongs to a shared expert that may be merged."""
        if prefix.endswith((GATE_UP, DOWN)) and settings().merge_shared_expert and compat.can_merge_parameters():
            mlp, _, _ = prefix.rpartition(".")
            self.layers = {name: part for name, part in self.layers.items() if name.startswith(f"{mlp}.")}
            self.layers[prefix] = layer

    def take(self, experts: str) -> Mlp | None:
        """Returns the dense layers next to the experts with this prefix, and forgets them."""
        block = experts.removesuffix(".experts")
        gate_up, down = (self.layers.pop(block + name, None) for name in (GATE_UP, DOWN))
        return None if gate_up is None or down is None else Mlp(gate_up, down)


class SharedExpert:
    """The shared expert of a layer whose experts' tensors have a slot for it."""

    def __init__(self, mlp: Mlp, tensors: list[torch.Tensor]) -> None:
        """Move the MLP's parameters to the last slot.

        Args:
            tensors: w13, its scales, w2, its scales, each with one more expert than the layer has.
        """
        self.tensors = tensors
        self.experts: Experts | None = None  # set by `merge`; includes the shared expert
        self._mlp = mlp
        for parameter, slot in zip(mlp.tensors(), self._slots(), strict=True):
            slot.copy_(parameter.data)
            parameter.data = slot
        compat.mark_compiled_code("fp8moe_shared_expert")

    def _slots(self) -> list[torch.Tensor]:
        return [tensor[-1] for tensor in self.tensors]

    def merge(self, experts: Any, spec: LayerSpec) -> bool:
        """Compute the shared expert with the routed experts, and not in vLLM's runner. Returns false if that is unsafe.

        Called once, when all weights are loaded.

        Args:
            experts: the `RoutedExperts`.
            spec: the spec of the routed experts.
        """
        runner = compat.runner_of(experts)
        mlp = compat.shared_mlp(runner)
        if type(mlp).__name__ not in MLPS or experts.apply_router_weight_on_input:
            return False
        if spec.activation != Activation(limit=getattr(mlp.act_fn, "swiglu_limit", None)):
            _announce_other_activation()
            return False
        if (mlp.gate_up_proj, mlp.down_proj) != self._mlp:
            return False
        shown = *(getattr(experts, name) for name in experts.quant_method.loading.parameters), *self._mlp.tensors()
        if [parameter.data_ptr() for parameter in shown] != [t.data_ptr() for t in (*self.tensors, *self._slots())]:
            return False
        named = dict(zip(experts.quant_method.loading.parameters, self.tensors, strict=True))
        self.experts = Experts(spec.with_shared_expert(compat.take_shared_expert(runner)), named, named)
        log_once(
            logging.INFO, "shared experts are computed as one more expert (FP8MOE_MERGE_SHARED_EXPERT=0: separately)"
        )
        return True
