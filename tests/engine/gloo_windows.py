"""Windows (FP8MOE_EP=push) on CPUs: tokens and sums of the ranks go through gloo instead of other ranks' memory.

Importing this module patches the integration with vLLM, as a worker extension does (`worker_extension_cls`). All else
is what serves on GPUs: which steps take windows, how many, and that all ranks make the same calls in the same order.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fp8moe_plugin.layers.experts import Experts
from fp8moe_plugin.layers.vllm import push
from fp8moe_plugin.plan.keys import SM90


class GlooWindow(NamedTuple):
    """The sizes of a window of each rank of a group, which are its name, too."""

    group: dist.ProcessGroup
    rows: int
    sizes: tuple[int, ...]


def open_window(
    device_group: dist.ProcessGroup, group: dist.ProcessGroup, rows: int, *sizes: Any, **_: object
) -> GlooWindow:
    return GlooWindow(group, rows, sizes[:3])


def run_pushed(
    self: Experts,
    window: GlooWindow,
    owners: torch.Tensor,
    rows: int,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor,
) -> torch.Tensor:
    """Returns what `push_moe` does: the sum of the ranks' sums, in their order.

    Raises:
        RuntimeError: the ranks are in different calls, or `rows` is less than the tokens of one.
    """
    rank, group = dist.get_rank(window.group), window.group
    calls: list[Any] = [None] * group.size()
    dist.all_gather_object(calls, (window.rows, window.sizes, rows, x, topk_weights, topk_ids), group)
    sizes = {call[:3] for call in calls}
    tokens = [len(call[3]) for call in calls]
    if len(sizes) > 1 or not max(*tokens, 1) <= rows <= window.rows:
        raise RuntimeError(f"Ranks call windows of {sizes} with {tokens} tokens.")
    if not torch.equal(owners == rank, expert_map >= 0):
        raise RuntimeError("The owners of experts are not those of the expert map.")
    of_all = self.run(*(torch.cat(parts) for parts in list(zip(*calls, strict=True))[3:]), expert_map)
    sums: list[Any] = [None] * group.size()
    dist.all_gather_object(sums, list(of_all.split(tokens)), group)
    return torch.stack([of_rank[rank] for of_rank in sums]).float().sum(0).bfloat16()


push.backend_of = lambda _: SimpleNamespace(target=SM90, tuning=None)
push.window_refusal = lambda *_: None
push.open_group_window = open_window
Experts.run_pushed = run_pushed


class Windows:
    """Methods for `collective_rpc`."""

    def windows(self) -> list[tuple[int, ...]]:
        """Hidden size, experts per token and experts of the layers of each window."""
        return sorted(window.sizes for window in push._windows.values())
