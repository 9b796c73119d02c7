"""Whether NVLink connects GPUs, by NVML: unlike CUDA, it also reports on GPUs that CUDA_VISIBLE_DEVICES hides."""

import ctypes
import logging
from collections.abc import Iterable

from fp8moe_plugin.logs import log_once

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = P2P_STATUS_OK = 0
P2P_CAPS_INDEX_NVLINK = 2


def has_nvlinks(gpu: str, others: Iterable[str]) -> bool:
    """Returns whether NVLink connects a GPU with each of the others; False, and a line in the log, without NVML.

    Args:
        gpu, others: UUIDs as torch writes them, without "GPU-".
    """
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return _unknown(str(error))
    if status := nvml.nvmlInit_v2():
        return _unknown(f"nvmlInit returns {status}")
    try:
        return all(_has_nvlink(nvml, gpu, other) for other in others)
    finally:
        nvml.nvmlShutdown()


def _has_nvlink(nvml: ctypes.CDLL, gpu: str, other: str) -> bool:
    devices, status = (ctypes.c_void_p(), ctypes.c_void_p()), ctypes.c_int()
    for uuid, device in zip((gpu, other), devices, strict=True):
        if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(device)) != SUCCESS:
            return False
    found = nvml.nvmlDeviceGetP2PStatus(*devices, P2P_CAPS_INDEX_NVLINK, ctypes.byref(status))
    return found == SUCCESS and status.value == P2P_STATUS_OK


def _unknown(why: str) -> bool:
    log_once(
        logging.WARNING,
        f"NVML does not say whether NVLink connects the GPUs ({why}). In a container, add `utility` to "
        "NVIDIA_DRIVER_CAPABILITIES.",
    )
    return False
