"""The experts of a layer on one rank, for any engine. They load their kernels and call the ops."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.layers.kernels import announce_layer, kernels_backend, prepare_kernels
from fp8moe_plugin.ops import torch_ops
from fp8moe_plugin.ops.push import run_push_moe
from fp8moe_plugin.ops.router_reference import with_shared_weights
from fp8moe_plugin.ops.window import Window
from fp8moe_plugin.plan.options import options_of
from fp8moe_plugin.plan.spec import Arrival, LayerSpec


class Experts:
    """Experts with their spec and their tensors."""

    def __init__(self, spec: LayerSpec, tensors: Mapping[str, Any], names: Iterable[str], gate: Any = None) -> None:
        """
        Args:
            tensors: a mapping such as a module's `_parameters`. Each call looks them up, so an engine may replace them.
            names: the names of w13, its scales, w2, its scales, and if the layer has them of both biases.
            gate: of the shared expert, a module whose `weight` is bfloat16 `[1, H]`; or None.
        """
        self.spec = spec
        self._tensors = tensors
        self._names = tuple(names)
        self._gate = gate
        self._no_biases = () if spec.bias else (None, None)
        self._options = options_of(spec).text

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """w13, its scales, w2, its scales and both biases or None: the ops' order."""
        return [*(self._tensors[name] for name in self._names), *self._no_biases]

    def prepare(self, prefix: str, arrivals: Iterable[Arrival], warmup: str) -> None:
        """Load the kernels that the layer may launch, and announce it.

        Args:
            warmup: the command that compiles them in advance.
        Raises:
            UnsupportedError: the kernels for this device cannot compute the layer.
            KernelNotPrecompiled, CompileError, LaunchError: see `prepare_kernels`.
        """
        weight = self._tensors[self._names[2]]
        backend = kernels_backend(weight)
        for arrival in arrivals:
            if refusal := backend.refusal(self.spec, arrival):
                raise UnsupportedError(
                    f"{prefix}: the model's experts have {refusal}, which the {backend.name} kernels do not support. "
                    "Serve the model without --quantization fp8moe."
                )
            kernels = backend.layer_kernels(self.spec, arrival)
            announce_layer(prefix, weight, arrival, prepare_kernels(kernels, weight, warmup))

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the weighted sum of each token's experts; see `ops.fused_moe`."""
        out = torch.empty_like(x, dtype=torch.bfloat16) if out is None else out
        if self._gate is not None:
            topk_weights = with_shared_weights(topk_weights, x, self._gate.weight)
        torch_ops.fused_moe(self._options, x, scale, *self.tensors, topk_weights, topk_ids, expert_map, out)
        return out

    def run_routed(
        self, x: torch.Tensor, logits: torch.Tensor, topk: int, renormalize: bool, padding: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the same sum for the experts that softmax top-k of these logits chooses; see `ops.routed_moe`."""
        out = torch.empty_like(x)
        shared_gate = None if self._gate is None else self._gate.weight
        torch_ops.routed_moe(self._options, topk, renormalize, x, *self.tensors, logits, padding, shared_gate, out)
        return out

    def run_pushed(
        self,
        window: Window,
        owners: torch.Tensor,
        rows: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the same sum with the experts of all ranks of a group; see `ops.push_moe`."""
        tensors = x, None, *self.tensors, topk_weights, topk_ids, expert_map, None
        return run_push_moe(options_of(self.spec), window, owners, rows, tensors)

    def run_batched(
        self,
        x: torch.Tensor,
        scale: torch.Tensor,
        counts: torch.Tensor,
        expected_m: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the experts' results for rows that arrive quantized and sorted; see `ops.batched_experts`."""
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) if out is None else out
        torch_ops.batched_experts(self._options, expected_m, x, scale, *self.tensors, counts, out)
        return out
