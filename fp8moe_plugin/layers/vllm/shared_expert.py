"""A shared expert as wide as the routed ones, computed as one more expert by the same kernels.

vLLM's models make the shared expert, an MLP of two dense layers, just before the routed experts; its runner calls the
MLP on a second stream and adds the result. Here the experts' tensors get one more slot. The experts' parameters are
views of the slots before it, and those of the MLP become views of it. So each weight exists once, and loading,
reloading and sleep mode see the parameters that they would see anyway.

A gate makes the weight of a shared expert differ by token. `choose_experts` computes it, so such a shared expert is
merged only where our router chooses the other experts.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from fp8moe_plugin.checkpoint.shapes import MAX_LOCAL_EXPERTS, SHARED_EXPERTS
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.layers.experts import Experts
from fp8moe_plugin.layers.parameters import expert_tensors, format_of
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops.checks import is_aligned_contiguous
from fp8moe_plugin.plan.spec import LayerSpec
from fp8moe_plugin.settings import settings

GATE_UP, DOWN = ".gate_up_proj", ".down_proj"
# Of vLLM's modules, those that are known to compute the same as an expert, except for a gate.
MLPS = ("DeepseekV2MLP", "DeepseekV4MLP", "Qwen2MoeMLP")
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
        mlp, _, _ = prefix.rpartition(".")
        is_part = mlp.endswith(SHARED_EXPERTS) and prefix.endswith((GATE_UP, DOWN))
        if is_part and settings().merge_shared_expert and compat.can_merge_parameters():
            self.layers = {name: part for name, part in self.layers.items() if name.startswith(f"{mlp}.")}
            self.layers[prefix] = layer

    def take(self, experts: str) -> Mlp | None:
        """Returns the dense layers next to the experts with this prefix, and forgets them."""
        block = experts.removesuffix(".experts")
        for mlp in SHARED_EXPERTS:
            gate_up, down = (self.layers.pop(block + mlp + name, None) for name in (GATE_UP, DOWN))
            if gate_up is not None and down is not None:
                return Mlp(gate_up, down)
        return None


class SharedExpert:
    """The shared expert of a layer whose experts' tensors have a slot for it."""

    def __init__(self, mlp: Mlp, tensors: list[torch.Tensor]) -> None:
        """Move the MLP's parameters to the last slot.

        Args:
            tensors: w13, its scales, w2, its scales, each with one more expert than the layer has.
        """
        self.tensors = tensors
        self._mlp = mlp
        for parameter, slot in zip(mlp.tensors(), self._slots(), strict=True):
            slot.copy_(parameter.data)
            parameter.data = slot

    def _slots(self) -> list[torch.Tensor]:
        return [tensor[-1] for tensor in self.tensors]

    def merge(self, experts: Any, spec: LayerSpec, our_router: bool) -> Experts | None:
        """Take the shared expert out of vLLM's runner. Returns the experts including it, or None if that is unsafe.

        Called once, when all weights are loaded.

        Args:
            experts: the `RoutedExperts`.
            spec: the spec of the routed experts.
            our_router: whether our kernel chooses the experts.
        """
        runner = compat.runner_of(experts)
        mlp = compat.shared_mlp(runner)
        if type(mlp).__name__ not in MLPS or experts.apply_router_weight_on_input:
            return None
        if spec.activation != Activation(limit=getattr(mlp.act_fn, "swiglu_limit", None)):
            _announce_other_activation()
            return None
        if (mlp.gate_up_proj, mlp.down_proj) != self._mlp:
            return None
        shown = *(getattr(experts, name) for name in experts.quant_method.loading.parameters), *self._mlp.tensors()
        if [parameter.data_ptr() for parameter in shown] != [t.data_ptr() for t in (*self.tensors, *self._slots())]:
            return None
        gate = getattr(mlp, "expert_gate", None)
        if gate is not None and (refusal := _gate_refusal(gate, runner, our_router)):
            log_once(logging.INFO, f"shared experts with a gate are not merged: {refusal}")
            return None
        named = dict(zip(experts.quant_method.loading.parameters, self.tensors, strict=True))
        spec = spec.with_shared_expert(compat.take_shared_expert(runner))
        compat.mark_compiled_code("fp8moe_shared_expert")
        log_once(
            logging.INFO, "shared experts are computed as one more expert (FP8MOE_MERGE_SHARED_EXPERT=0: separately)"
        )
        return Experts(spec, named, named, gate)


def _gate_refusal(gate: Any, runner: Any, our_router: bool) -> str | None:
    """Returns why `choose_experts` cannot compute the weights of a shared expert with this gate, or None."""
    if not our_router:
        return "the other experts are chosen by vLLM's router"
    if runner.routed_scaling_factor != 1.0:
        return "the weights of the other experts have a factor"
    weight, plain = gate.weight, type(getattr(gate, "quant_method", None)) is UnquantizedLinearMethod
    if not plain or getattr(gate, "bias", None) is not None:
        return "the gate is no plain product"
    if weight.dtype != torch.bfloat16 or len(weight) != 1 or not is_aligned_contiguous(weight):
        return "the gate has another dtype or layout"
    return None
