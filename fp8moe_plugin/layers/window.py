"""Windows of the ranks of an expert-parallel group on one host, in torch's symmetric memory. Multicast is not used."""

import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fp8moe_plugin.layers.all_to_all import place_refusal
from fp8moe_plugin.layers.nvlink import has_nvlinks
from fp8moe_plugin.ops.window import Window, open_window
from fp8moe_plugin.plan.gpu_tuning import GpuTuning
from fp8moe_plugin.plan.sm90.push import push_refusal, window_layout
from fp8moe_plugin.settings import BATCH_INVARIANT, batch_invariant, variable_set

logger = logging.getLogger("fp8moe")
PATIENCE_S = 600  # as NCCL; longer than one rank compiles or loads while the others wait
CLOCK_HZ = 2e9  # of a multiprocessor at most
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # read by torch in each rendezvous


def window_refusal(group: dist.ProcessGroup, hidden: int, device: torch.device, tuning: GpuTuning) -> str | None:
    """Returns why the ranks of this group cannot store into each other's memory, or None if they can.

    Every rank calls it, and gets the same answer.

    Args:
        group: of the CPU (gloo).
        tuning: of this rank's plans, which decide the format of tokens.
    """
    if refusal := push_refusal(group.size(), hidden):
        return refusal
    properties = torch.cuda.get_device_properties(device)
    gpu, multiprocessors = str(properties.uuid), properties.multi_processor_count
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), gpu), group)
    found: list[Any] = [None] * group.size()
    reached = has_nvlinks(gpu, {other for _, other in places} - {gpu})
    dist.all_gather_object(found, (reached, (tuning, batch_invariant(), multiprocessors)), group)
    reaches, deciding = zip(*found, strict=True)
    if len(set(deciding)) > 1:
        return f"a group whose ranks differ in {BATCH_INVARIANT}, FP8MOE_TUNING or GPUs, and would choose other formats"
    return place_refusal(places, reaches)


def open_group_window(
    group: dist.ProcessGroup,
    cpu_group: dist.ProcessGroup,
    rows: int,
    hidden: int,
    topk: int,
    experts: int,
    device: torch.device,
    patience_s: int = PATIENCE_S,
) -> Window:
    """Returns this rank's window. Every rank of the group calls it, after `window_refusal` has returned None.

    Args:
        group, cpu_group: the same ranks by NCCL and by gloo.
        rows, hidden, topk, experts: see `Window`.
        patience_s: how long a kernel waits for another rank, at `CLOCK_HZ`; longer at a lower clock.
    """
    import torch.distributed._symmetric_memory as symmetric_memory  # needs a torch with CUDA

    nbytes = window_layout(group.size(), rows, hidden, topk, experts).nbytes
    memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    # torch would bind the memory to a multicast object as well, which fails on some GPUs that announce it.
    with variable_set(NO_MULTICAST, "1"):
        shared = symmetric_memory.rendezvous(memory, group).buffer_ptrs
    addresses = window_addresses(memory, shared, group.rank(), cpu_group)
    lost = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    patience = int(patience_s * CLOCK_HZ)
    window = open_window(memory, addresses, group.rank(), rows, hidden, topk, experts, lost, patience)
    torch.cuda.synchronize(device)
    dist.barrier(cpu_group)
    threading.Thread(target=_watch, args=(lost, patience_s), name="fp8moe-window", daemon=True).start()
    return window


def window_addresses(memory: torch.Tensor, shared: Sequence[int], rank: int, cpu_group: dist.ProcessGroup) -> list[int]:
    """Returns the address of each rank's window, as this rank sees it.

    Args:
        memory: this rank's.
        shared: addresses of the allocations that have the windows: torch may cut several tensors from one.
    """
    offsets: list[Any] = [None] * len(shared)
    dist.all_gather_object(offsets, memory.data_ptr() - shared[rank], cpu_group)
    return [base + offset for base, offset in zip(shared, offsets, strict=True)]


def _watch(lost: torch.Tensor, patience_s: int) -> None:
    """Log which rank kernels have waited for in vain: the engine only gets a CUDA error, which does not name it."""
    # torch's item() releases the GIL. Where a daemon thread takes it again at exit, Python ends the thread, and inside
    # C++ that aborts the process.
    word = lost.numpy()
    while not (number := int(word[0])):
        time.sleep(0.1)
    logger.error(
        "fp8moe: rank %d of the expert-parallel group has not called a layer for %d s, so this rank's GPU stops with "
        "an error. Look for the first error in that rank's log. FP8MOE_EP=engine leaves the all-to-all to the engine.",
        number - 1,
        patience_s,
    )
