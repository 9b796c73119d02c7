"""What benchmarks.engine_decode takes for the MoE layers of a step, in made-up traces."""

from typing import Any

import pytest

from benchmarks.engine_decode import MOE, moe_us
from warmup.bench_result import OURS

ROUTER = "void vllm::moe::router_gemm_kernel_bf16_output<256>(float*)"
ATTENTION = (
    "void flash::flash_fwd_splitkv_combine_kernel<Traits>",
    "void flash::FlashAttnFwdCombine<64>::combine",
)
STEPS = 10  # of time: each kernel begins so long after the one before


def trace(*names: str) -> list[dict[str, Any]]:
    """Kernels one behind the other, each 7 long."""
    return [{"name": name, "ts": STEPS * i, "dur": 7} for i, name in enumerate(names)]


DECODE = ("route", "quantize", "gate_up_swap_ab", "grouped_gemm_swap_ab", "combine")
PREFILL = ("count_experts", *DECODE)


@pytest.mark.parametrize("layer", [DECODE, PREFILL])
def test_our_layer_is_told_from_the_kernels_around_it(layer):
    around = trace(ATTENTION[0], ROUTER, *layer, "rms_norm", *ATTENTION, ROUTER, *layer, ATTENTION[1], "sample")
    assert moe_us(around, *MOE[OURS]) == 2 * (STEPS * (len(layer) - 1) + 7)


def test_a_layer_ends_with_the_first_last_kernel():
    kernels = trace("moe_align_block_size_kernel", "fused_moe_kernel", "moe_sum", "other", "moe_sum")
    assert moe_us(kernels, *MOE["triton"]) == 2 * STEPS + 7


def test_unpermute_begins_no_layer():
    first, second = ("moe_permute", "gemm", "moe_unpermute"), ("ep_scatter", "ep_gather")
    kernels = trace(*first, "moe_unpermute_again", "other", *second)
    assert moe_us(kernels, *MOE["deepgemm"]) == 2 * STEPS + 7 + STEPS + 7


@pytest.mark.parametrize("names", [(), (ROUTER, *ATTENTION), DECODE[:-1], (*DECODE, "route"), DECODE[1:]])
def test_without_whole_layers_there_is_no_time(names):
    assert moe_us(trace(*names), *MOE[OURS]) is None
