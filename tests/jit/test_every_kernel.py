"""All kernels of the plan compile to sm_90a cubins on a machine without a GPU."""

from pathlib import Path

import pytest

import fp8moe_plugin
from fp8moe_plugin.jit.compiler import compile_kernel
from fp8moe_plugin.plan import KernelKey, all_kernels


def name(key: KernelKey) -> str:
    return "-".join([key.source, *(f"{macro}={value}" for macro, value in key.defines)])


@pytest.mark.parametrize("key", all_kernels(), ids=name)
def test_a_kernel_compiles_without_spills_local_memory_warnings_or_lost_speed(key: KernelKey) -> None:
    cubin, faults = compile_kernel(key)
    assert cubin.startswith(b"\x7fELF")
    assert faults == []


def test_the_kernels_fit_a_block_of_a_hopper_gpu() -> None:
    assert all(key.smem_bytes <= 227 * 1024 and key.threads <= 1024 for key in all_kernels())


def test_the_lines_of_the_sources_are_no_longer_than_those_of_the_rest() -> None:
    for path in (Path(fp8moe_plugin.__file__).parent / "csrc").rglob("*.cu*"):
        assert [line for line in path.read_text().splitlines() if len(line) > 120] == [], path.name
