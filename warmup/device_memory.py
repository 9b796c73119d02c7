"""The free memory of this machine, and the memory that engines need, for `compare`."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model
from warmup import diagnosis, memory
from warmup.explain import scratch_bytes
from warmup.target import GIB

USED = 0.95  # of the free memory
CACHE_MARGIN = 1.25  # factor for pages of layers of several kinds


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a GPU, or of a machine without one, in bytes."""

    total: int
    free: int

    def holds(self, needs: Iterable[int]) -> bool:
        return sum(needs) <= USED * self.free

    def share(self, need: int) -> float:
        """Returns the share of the total memory for an engine. vLLM checks that this share is free."""
        return round(min(need, USED * self.free) / self.total, 3)


def cache_bytes(model: Model, parallel: Parallel, tokens: int, sequences: int) -> int:
    """Returns the bytes of a KV cache for `tokens` tokens of `sequences` sequences."""
    of_tokens = tokens * memory.cache_bytes(model, parallel, fp8=False)
    return round(CACHE_MARGIN * (of_tokens + sequences * memory.sequence_bytes(model, parallel)))


def engine_bytes(model: Model, parallel: Parallel, tokens: int, quantized: bool, cache: int) -> int:
    """Returns the bytes for an engine on each GPU: weights in FP8 or BF16, a step of `tokens` tokens, and `cache`."""
    loaded = memory.without_mtp(model)
    shapes = memory.weight_shapes(loaded, parallel)
    in_bf16 = sum(2 * shape.layers * int(np.prod(shape.shape, dtype=int)) for shape in shapes)
    weights = sum(shape.bytes for shape in shapes) if quantized else in_bf16
    scratch = scratch_bytes(loaded, parallel, tokens)
    return weights + memory.step_bytes(loaded, parallel, tokens, scratch) + cache


def gpu_memory(count: int) -> DeviceMemory:
    """Returns the memory of the fullest of the first `count` GPUs, which must exist."""
    return min((_gpu_memory(ordinal) for ordinal in range(count)), key=lambda gpu: gpu.free)


def _gpu_memory(ordinal: int) -> DeviceMemory:
    from cuda.bindings import driver

    _, device = driver.cuDeviceGet(ordinal)
    _, context = driver.cuDevicePrimaryCtxRetain(device)
    try:
        driver.cuCtxPushCurrent(context)
        status, free, total = driver.cuMemGetInfo()
        driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(device)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the memory of GPU {ordinal} is unknown: {status.name}")
    return DeviceMemory(total=total, free=free)


def machine_memory() -> DeviceMemory:
    """Returns the memory of a machine without a GPU; 1 GiB if Linux does not report it."""
    machine = diagnosis.machine()
    return DeviceMemory(total=machine.memory_bytes or GIB, free=machine.available_bytes or GIB)
