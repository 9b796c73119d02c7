"""What a benchmark needs of the machine."""

import importlib.util
import subprocess

import torch

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.plan.keys import HOPPER


def check_gpu() -> None:
    """Raise `UnsupportedError` unless this process sees a Hopper GPU."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability != HOPPER:
        found = "compute capability {}.{}".format(*capability) if capability else "no usable GPU"
        raise UnsupportedError(
            f"Measuring needs a Hopper GPU (compute capability 9.0: H100, H200, H20), but torch found {found}. "
            "Run it on the machine that serves, with a CUDA build of torch."
        )


def check_machine() -> None:
    """Raise `UnsupportedError` unless this process sees a Hopper GPU and vLLM."""
    check_gpu()
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError(
            "The benchmark compares with vLLM's own backends, and vLLM is not installed here. "
            "Run it in the environment that serves, or: pip install vllm"
        )


def driver_version() -> str:
    """Returns the version of NVIDIA's driver. Raises `UnsupportedError` if nvidia-smi cannot be run."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise UnsupportedError(
            "nvidia-smi, which reports the driver version, cannot be run. Make sure it is on the PATH and works."
        ) from error
