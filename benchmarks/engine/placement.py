"""A vLLM worker extension that reports windows, and where expert load balancing has placed the experts.

The environment variable `START_PLACED`, a JSON list with the expert in each place, decides where experts are loaded in
the model's only mixture-of-experts layer.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

START_PLACED = "ENGINE_SPLITS_START_PLACED"

if START_PLACED in os.environ:
    from vllm.distributed.eplb.eplb_state import EplbState

    placed = json.loads(os.environ[START_PLACED])
    # vLLM loads and routes by this map until it moves experts.
    EplbState.build_initial_global_physical_to_logical_map = staticmethod(lambda *_, **__: list(placed))


class Placement:
    """Methods for `collective_rpc`, which calls them on each rank."""

    model_runner: Any

    def stop_moving(self) -> list[int]:
        """Stop the balancing, and return the expert in each place, rank by rank."""
        self.model_runner.eep_eplb_suppressed = True
        return self.experts_in_places()

    def experts_in_places(self) -> list[int]:
        (state,) = self.model_runner.eplb_state.model_states.values()
        (layer,) = state.physical_to_logical_map.tolist()
        return layer

    def windows(self) -> list[list[int]]:
        """Hidden size, experts per token and experts of the layers of each window (`FP8MOE_EP=push`)."""
        from fp8moe_plugin.layers.vllm.push import _windows

        return sorted([window.hidden, window.topk, window.experts] for window in _windows.values())

    def misplaced(self) -> list[str]:
        """Tensors on this rank that differ from those of the expert that should be in their place, byte for byte."""
        from vllm.distributed import get_ep_group

        runner = self.model_runner
        (layer,) = (m for m in runner.model.named_modules() if hasattr(m[1], "w13_weight"))
        name, experts = layer
        places = experts.w13_weight.shape[0]
        first = get_ep_group().rank_in_group * places
        here = self.experts_in_places()[first : first + places]
        with CheckpointExperts(Path(runner.model_config.model), name.removesuffix(".routed_experts")) as checkpoint:
            return [
                f"{kind} of expert {expert} in place {first + place}"
                for place, expert in enumerate(here)
                for kind, wanted in checkpoint.tensors(expert)
                if not torch.equal(_bytes(getattr(experts, kind)[place]), _bytes(wanted))
            ]


class CheckpointExperts:
    """The experts' tensors of an FP8 checkpoint, stacked as vLLM does."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.prefix = prefix
        self.files: dict[str, Any] = {}
        for path in folder.glob("*.safetensors"):
            file = safe_open(path, framework="pt")
            self.files |= dict.fromkeys(file.keys(), file)

    def __enter__(self) -> "CheckpointExperts":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.clear()

    def tensors(self, expert: int) -> Iterator[tuple[str, torch.Tensor]]:
        for kind in ("weight", "weight_scale_inv"):
            gate, up, down = (self._tensor(f"{expert}.{part}_proj.{kind}") for part in ("gate", "up", "down"))
            yield f"w13_{kind}", torch.cat((gate, up))
            yield f"w2_{kind}", down

    def _tensor(self, name: str) -> torch.Tensor:
        full = f"{self.prefix}.{name}"
        tensor: torch.Tensor = self.files[full].get_tensor(full)
        return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.cpu().contiguous().view(torch.uint8)
