"""All kernels of the plan compile to sm_90a cubins on a machine without a GPU."""

import pytest

from fp8moe_plugin.jit.compiler import compile_kernel
from fp8moe_plugin.plan import KernelKey, all_kernels


def name(key: KernelKey) -> str:
    return "-".join([key.source, *(f"{macro}={value}" for macro, value in key.defines)])


@pytest.mark.parametrize("key", all_kernels(), ids=name)
def test_a_kernel_compiles_without_spills_local_memory_or_warnings(key: KernelKey) -> None:
    cubin, faults = compile_kernel(key)
    assert cubin.startswith(b"\x7fELF")
    assert faults == []


def test_the_kernels_fit_a_block_of_a_hopper_gpu() -> None:
    assert all(key.smem_bytes <= 227 * 1024 and key.threads <= 1024 for key in all_kernels())
