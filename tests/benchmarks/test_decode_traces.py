"""The MoE part of a step that benchmarks.engine.decode finds in made-up traces."""

from typing import Any

import pytest

from benchmarks.engine.decode import LAST, busy_us, moe_us
from fp8moe_plugin.bench.result import OURS

ROUTER_GEMM = "void vllm::moe::router_gemm_kernel_bf16_output<256>(float*)"
TOPK = "void vllm::moe::grouped_topk_fused_small_expert_count_kernel<float, float, int>(float*)"
ATTENTION = (
    "void flash::flash_fwd_splitkv_combine_kernel<Traits>",
    "void flash::FlashAttnFwdCombine<64>::combine",
)
STEPS = 10  # time from the start of a kernel to that of the next


def trace(*names: str) -> list[dict[str, Any]]:
    """Consecutive kernels, each of length 7."""
    return [{"name": name, "ts": STEPS * i, "dur": 7} for i, name in enumerate(names)]


DECODE = ("route", "quantize", "gate_up_few_rows", "grouped_gemm_few_rows", "combine")
PREFILL = ("count_experts", *DECODE)
SMALL_BATCH = ("gate_up_small_batch", "down_small_batch")
FEW_TRITON = ("per_token_group_quant_8bit", "FillFunctor<int>", "fused_moe_kernel", "act_and_mul", "quant")
FEW_TRITON += ("fused_moe_kernel", "void vllm::moe::moe_sum_vec_dynamic_kernel<c10::BFloat16>()")
TRITON = ("per_token_group_quant_8bit", "moe_align_block_size_kernel", "count_and_sort", *FEW_TRITON[2:])
DEEPGEMM = ("quant", "_fwd_kernel_ep_scatter_1", "_fwd_kernel_ep_scatter_2", "gemm", "gemm", "_fwd_kernel_ep_gather")


@pytest.mark.parametrize(
    ("engine", "layer"),
    [
        (OURS, DECODE),
        (OURS, PREFILL),
        (OURS, SMALL_BATCH),
        ("triton", FEW_TRITON),
        ("triton", TRITON),
        ("deepgemm", DEEPGEMM),
    ],
)
def test_a_layer_is_distinguished_from_the_kernels_around_it(engine, layer):
    once = (ROUTER_GEMM, TOPK, *layer)
    around = trace(ATTENTION[0], *once, "rms_norm", *ATTENTION, *once, ATTENTION[1], "sample")
    assert moe_us(around, LAST[engine]) == 2 * STEPS * len(layer)


def test_a_layer_ends_with_the_first_last_kernel():
    kernels = trace(TOPK, "fused_moe_kernel", "moe_sum", "other", "moe_sum")
    assert moe_us(kernels, LAST["triton"]) == 2 * STEPS


def test_a_router_of_several_kernels_ends_with_the_last_of_them():
    assert moe_us(trace(TOPK, TOPK, *DECODE), LAST[OURS]) == STEPS * len(DECODE)


@pytest.mark.parametrize("names", [(), (ROUTER_GEMM, *ATTENTION), (TOPK, *DECODE[:-1]), (TOPK, *DECODE, TOPK), DECODE])
def test_without_whole_layers_there_is_no_time(names):
    assert moe_us(trace(*names), LAST[OURS]) is None


def test_the_gpu_is_busy_while_any_kernel_runs():
    spans = [(0, 10), (3, 4), (8, 6), (20, 5), (25, 5), (26, 1)]
    assert busy_us([{"ts": start, "dur": dur} for start, dur in spans]) == 14 + 10
    assert busy_us([]) == 0
