"""Every variant of the bandwidth-bound kernels compiles for sm_90a, without a GPU, a warning or a spilled register."""

import pytest

from fp8moe_plugin.jit.compiler import compile_kernel
from fp8moe_plugin.ops.combine import combine_key
from fp8moe_plugin.ops.quantize import quantize_key
from fp8moe_plugin.ops.route import route_key, tiles_of_counts_key, tiles_of_indices_key
from fp8moe_plugin.ops.silu_mul_quant import silu_mul_quant_key
from fp8moe_plugin.plan import KernelKey

KEYS = (
    *(quantize_key(ue8m0, permute) for ue8m0 in (False, True) for permute in (False, True)),
    *(silu_mul_quant_key(ue8m0) for ue8m0 in (False, True)),
    combine_key(),
    *(route_key(ids_64) for ids_64 in (False, True)),
    *(tiles_of_counts_key(masked) for masked in (False, True)),
    tiles_of_indices_key(),
)


def _name(key: KernelKey) -> str:
    return "-".join((key.source, *(f"{name}={value}" for name, value in key.defines)))


@pytest.mark.parametrize("key", KEYS, ids=_name)
def test_a_kernel_compiles_without_local_memory_or_warnings(key: KernelKey) -> None:
    assert compile_kernel(key).startswith(b"\x7fELF")  # raises CompileError on either
