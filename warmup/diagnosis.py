"""The facts that `doctor` collects, as fields of the report: enough for a support ticket without further questions."""

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fp8moe_plugin.jit.bundle import Bundle
from fp8moe_plugin.launches.backends import choose_backend
from fp8moe_plugin.quoting import shown_text
from fp8moe_plugin.settings import Settings, settings

# Other variables that affect the plugin or the warm-up, but no variable that holds a secret, such as HF_TOKEN.
VARIABLES = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_CACHE_ROOT",
    "XDG_CACHE_HOME",
    "HOME",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)
DRIVER_FILE = Path("/proc/driver/nvidia/version")
MEMORY_FILE = Path("/proc/meminfo")


class Fact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Gpu(Fact):
    ordinal: int
    name: str
    compute_capability: str  # such as "9.0"
    memory_bytes: int
    served: bool  # by a backend of ours
    backend: str  # the one that FP8MOE_BACKEND selects for it
    refusal: str | None  # the requirement of the backend that this GPU does not meet
    peers: list[int] = []  # GPUs into whose memory it can store
    nvlinks: list[int] = []  # those of them that NVLink connects it with

    def reaches(self, gpus: list["Gpu"]) -> bool:
        """Returns whether this GPU can store and add to the memory of others, as FP8MOE_EP=push needs."""
        return all(gpu.ordinal in self.nvlinks for gpu in gpus if gpu.ordinal != self.ordinal)


class Driver(Fact):
    version: str | None  # of the kernel module, such as "580.95.05"
    cuda: str  # the newest CUDA that it supports, such as "13.0"


class Machine(Fact):
    system: str
    cpus: int  # that this process may use
    memory_bytes: int | None
    available_bytes: int | None


class Engine(Fact):
    name: str
    package: str
    version: str
    tested: str  # versions
    served: bool  # whether its version is one of these
    entry_point: str | None  # of this plugin, such as "fp8moe_plugin:register"; None if it is not found
    excluded_by: str | None  # the value of VLLM_PLUGINS or SGLANG_PLUGINS, if it excludes the plugin

    @property
    def loads_plugin(self) -> bool:
        return self.entry_point is not None and self.excluded_by is None


class KernelCache(Fact):
    path: str
    exists: bool
    mode: str | None = None  # octal
    kernels: int = 0
    bytes: int = 0
    compilers: dict[str, int] = {}  # the number of kernels from each compiler
    refusal: str | None = None  # why it is not used


class KernelBundle(Fact):
    path: str
    kernels: int
    compiler: str

    def __str__(self) -> str:
        return f"{shown_text(self.path)}, {self.kernels} kernels compiled by {shown_text(self.compiler)}"


class Diagnosis(Fact):
    """Fields are None where they could not be determined; the findings say why."""

    machine: Machine | None = None
    settings: Settings | None = None
    variables: dict[str, str] = {}  # of VARIABLES, those that are set
    unknown_variables: list[str] = []  # named FP8MOE_*, and ignored
    engines: list[Engine] = []
    compiler: str | None = None  # of this machine
    launcher: str | None = None
    cache: KernelCache | None = None
    bundle: KernelBundle | None = None
    wheel: KernelBundle | None = None  # the kernels that were installed with the plugin
    driver: Driver | None = None
    gpus: list[Gpu] = []


def kernel_bundle(path: Path, bundle: Bundle) -> KernelBundle:
    return KernelBundle(path=str(path), kernels=len(bundle.manifest.kernels), compiler=bundle.manifest.compiler)


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def machine() -> Machine:
    """Returns the facts about this machine; its memory is None if Linux does not report it."""
    sizes: dict[str, int] = {}
    if MEMORY_FILE.is_file():
        found = re.findall(r"^(MemTotal|MemAvailable): +(\d+) kB$", MEMORY_FILE.read_text(), re.MULTILINE)
        sizes = {name: int(size) << 10 for name, size in found}
    return Machine(
        system=platform.platform(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=sizes.get("MemTotal"),
        available_bytes=sizes.get("MemAvailable"),
    )


def driver_and_gpus() -> tuple[Driver, list[Gpu]] | str:
    """Returns the NVIDIA driver and the GPUs of this machine, or the name of the driver's error if it has none."""
    from cuda.bindings import driver

    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # there is no libcuda
        status = driver.CUresult.CUDA_ERROR_NO_DEVICE
    if status != driver.CUresult.CUDA_SUCCESS:
        return str(status.name)
    _, version = driver.cuDriverGetVersion()
    return Driver(version=_module_version(), cuda=f"{version // 1000}.{version % 1000 // 10}"), list(_gpus())


def _gpus() -> Iterator[Gpu]:
    from cuda.bindings import driver

    attributes = driver.CUdevice_attribute
    _, count = driver.cuDeviceGetCount()
    devices = [driver.cuDeviceGet(ordinal)[1] for ordinal in range(count)]
    for ordinal, device in enumerate(devices):
        _, name = driver.cuDeviceGetName(64, device)
        _, major = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        _, minor = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        _, memory = driver.cuDeviceTotalMem(device)
        backend, refusal = choose_backend(settings().backend, (major, minor))
        yield Gpu(
            ordinal=ordinal,
            name=name.split(b"\0")[0].decode(),
            compute_capability=f"{major}.{minor}",
            memory_bytes=memory,
            served=refusal is None,
            backend=backend.name if backend else "triton" if refusal else "reference",
            refusal=refusal,
            **_links(ordinal, devices),
        )


def _links(ordinal: int, devices: list[Any]) -> dict[str, list[int]]:
    """Returns the fields `peers` and `nvlinks` of a GPU."""
    from cuda.bindings import driver

    atomics = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    own, others = devices[ordinal], [i for i in range(len(devices)) if i != ordinal]
    peers = [i for i in others if driver.cuDeviceCanAccessPeer(own, devices[i])[1]]
    # Between GPUs, only NVLink carries atomics.
    return {
        "peers": peers,
        "nvlinks": [i for i in peers if driver.cuDeviceGetP2PAttribute(atomics, own, devices[i])[1]],
    }


def _module_version() -> str | None:
    if not DRIVER_FILE.is_file():
        return None
    found = re.search(r"Kernel Module.*?\s(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)\s", DRIVER_FILE.read_text())
    return found[1] if found else None
