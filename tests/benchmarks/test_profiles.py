"""The figures that benchmarks.engine.profiles takes from made-up traces."""

from collections import Counter
from typing import Any

from benchmarks.engine.profiles import BUSY, CALLS, EXPERTS, NESTED, OP, busy_us, per_unit, summary, times


def op(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "tid": tid, "cat": cat}


def test_the_gpu_is_busy_while_any_kernel_runs() -> None:
    spans = [(20, 5), (0, 10), (3, 4), (8, 6), (25, 5), (26, 1)]
    assert busy_us([{"ts": start, "dur": dur} for start, dur in spans]) == 14 + 10
    assert busy_us([]) == 0


def test_an_op_inside_another_one_counts_once() -> None:
    found = times([
        op("fp8moe::fused_moe", 12, 5),
        op(EXPERTS, 10, 10, cat="user_annotation"),
        op("_C::per_token_group_fp8_quant", 11, 1),
        op("fp8moe::linear", 20, 3),
        op("fp8moe::linear", 13, 4, tid=2),
    ])  # fmt: skip
    assert {name: us for (kind, name), us in found.items() if kind == OP} == {EXPERTS: 10, "fp8moe::linear": 7}
    assert found[CALLS, "fp8moe::linear"] == 2
    assert found[NESTED, "fp8moe::fused_moe"] == 5
    assert found[NESTED, "_C::per_token_group_fp8_quant"] == 1


def test_only_fp8_ops_of_the_host_count() -> None:
    theirs = ("_C::cutlass_scaled_mm", "_C::rms_norm_per_block_quant", "_C::per_token_group_fp8_quant")
    theirs += (
        "vllm::fp8_gemm_nt_op",
        "vllm::w8a8_triton_block_scaled_mm_func",
        "vllm::triton_per_token_group_quant_fp8",
    )
    others = ("vllm::moe_forward", "aten::empty", "_C::rms_norm", "_moe_C::topk_softmax", "vllm::unified_attention")
    events = [op(name, 10 * i, 5) for i, name in enumerate((*theirs, *others))]
    events.append(op("fp8moe::linear", 0, 5, cat="gpu_user_annotation"))
    assert {name for kind, name in times(events) if kind == OP} == set(theirs)


def test_figures_of_one_step_are_the_difference_over_the_steps() -> None:
    def trace(steps: int) -> list[dict[str, Any]]:
        kernels = [op("gemm", 100 * i, 40, cat="kernel") for i in range(1 + steps)]
        return kernels + [op("fp8moe::linear", 100 * i, 8) for i in range(1 + steps)]

    row = summary(per_unit(times(trace(6)), times(trace(2)), 4))
    assert row == {
        "gpu_busy_ms": 0.04,
        "host_ops_ms": 0.008,
        "host_ops": {"fp8moe::linear": {"calls": 1, "us": 8}},
        "host_nested_us": {},
        "kernels_us": {"gemm": 40},
    }
    assert per_unit(times(trace(2)), Counter(), 3)[BUSY] == 40
