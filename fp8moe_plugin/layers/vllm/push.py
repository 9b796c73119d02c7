"""Expert parallelism under vLLM with tokens and results that the ranks store into each other's memory.

It takes the place of vLLM's dispatch and combine in steps whose tokens fit the window; longer steps keep them.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_ep_group

from fp8moe_plugin.layers.all_to_all import NO_ALL_GATHER, NO_KERNELS, WEIGHTED_TOKENS, vllm_keeps_its_own, windows
from fp8moe_plugin.layers.experts import Experts
from fp8moe_plugin.layers.vllm.gather import most_tokens
from fp8moe_plugin.layers.window import open_group_window, window_refusal
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops.devices import backend_of
from fp8moe_plugin.ops.window import Window
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.settings import settings


class PushedExperts:
    """The experts of a layer on all ranks of a group, for the tokens of this rank."""

    def __init__(self, experts: Experts, window: Window, owners: torch.Tensor) -> None:
        self._experts, self._window, self._owners = experts, window, owners

    def fits(self, tokens: int) -> bool:
        """Returns whether the windows have room for this step; the same on all ranks. `tokens`: of this rank."""
        return most_tokens(tokens) <= self._window.rows

    def run(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor
    ) -> torch.Tensor:
        """Returns the results of this rank's tokens, in a step that fits."""
        rows = max(most_tokens(len(x)), 1)
        return self._experts.run_pushed(self._window, self._owners, rows, x, topk_weights, topk_ids, expert_map)


def pushed_experts(layer: Any, moe: Any, experts: Experts, engine: Any) -> PushedExperts | None:
    """Returns the experts with their all-to-all; None, and a line in the log, where vLLM's own has to do it.

    Every rank calls it for each layer, in the same order.

    Args:
        engine: vLLM's configuration.
    """
    if settings().ep != "push":
        return None
    if refusal := _refusal(layer, moe, experts, engine):
        log_once(logging.WARNING, vllm_keeps_its_own(refusal))
        return None
    shape, expert_map = experts.spec.shape, layer.expert_map
    window = _window(shape.hidden, shape.topk, shape.global_experts, expert_map.device, engine)
    return PushedExperts(experts, window, _owners(expert_map))


def _refusal(layer: Any, moe: Any, experts: Experts, engine: Any) -> str | None:
    parallel = moe.moe_parallel_config
    if not parallel.use_ag_rs_all2all_kernels:
        return NO_ALL_GATHER
    if parallel.ep_size != parallel.dp_size * parallel.sp_size:
        return "a group of which several ranks have the same tokens"
    if engine.parallel_config.enable_elastic_ep:
        return "elastic expert parallelism, whose ranks change"
    if engine.model_config.enable_sleep_mode:
        return "sleep mode, which discards the table of the experts' ranks and cannot free the windows"
    if layer.apply_router_weight_on_input:
        return WEIGHTED_TOKENS
    backend = backend_of(layer.expert_map)
    if backend is None or backend.target != SM90:
        return NO_KERNELS
    log_once(logging.INFO, "FP8MOE_EP=push: waiting for all ranks. If no other line follows, one has not set it")
    group = get_ep_group()
    return window_refusal(group.cpu_group, experts.spec.shape.hidden, layer.expert_map.device, backend.tuning)


# By group: another engine of the process has another one. Calls of layers of equal sizes follow each other in a stream.
_windows: dict[tuple[dist.ProcessGroup, int, int, int], Window] = {}


def _window(hidden: int, topk: int, experts: int, device: torch.device, engine: Any) -> Window:
    """Returns this process's window for layers of these sizes."""
    group = get_ep_group()
    sizes = hidden, topk, experts
    at = group.device_group, *sizes
    if at not in _windows:
        split = engine.parallel_config.tensor_parallel_size  # ranks that share the tokens of a data-parallel rank
        size = windows(group.world_size, engine.scheduler_config.max_num_batched_tokens, split, *sizes)
        ranks = group.device_group, group.cpu_group
        _windows[at] = open_group_window(*ranks, size.rows, *sizes, device)
        log_once(logging.INFO, f"FP8MOE_EP=push: {size}")
    return _windows[at]


def _owners(expert_map: torch.Tensor) -> torch.Tensor:
    """Returns int32 `[global experts]`, the rank that has each expert."""
    group = get_ep_group()
    maps: list[Any] = [None] * group.world_size
    dist.all_gather_object(maps, expert_map.cpu() >= 0, group.cpu_group)
    return torch.stack(maps).int().argmax(0).int().to(expert_map.device)
