"""The parameters that a launch passes to each Triton kernel, with the types that the kernel is compiled for.

`*bf16:16 x` is a pointer to bfloat16 whose value is a multiple of 16, and `i32:16 n` an int that is one. Triton can
then load 16 bytes at a time.
"""

from typing import NamedTuple

from fp8moe_plugin.formats.activation import ActivationNumbers

TRITON_SCRATCH = ("global_scratch", "profile_scratch")  # pointers that Triton adds; no kernel here uses them


class TritonParameter(NamedTuple):
    type: str
    divisor: int  # of the value
    name: str


def _signature(text: str) -> tuple[TritonParameter, ...]:
    def parameter(type_and_divisor: str, name: str) -> TritonParameter:
        kind, _, divisor = type_and_divisor.partition(":")
        return TritonParameter(kind, int(divisor or 1), name)

    return tuple(parameter(*words.split()) for words in text.split(","))


_ACTIVATION = ", ".join(f"fp32 {number}" for number in ActivationNumbers._fields)
TRITON_SIGNATURES = {
    "triton_combine": _signature(
        "*bf16:16 rows, *i32 slots, *fp32 weights, *bf16:16 out, i32:128 hidden, i32 topk, "
        "i32 weight_columns, fp32 routed_scale"
    ),
    "triton_down_small_batch": _signature(
        "*bf16:16 inner, *i32 ids, *i32 expert_map, *fp32 weights, *fp8e4nv:16 b, *fp32 b_scales, *bf16:16 out, "
        "i32:128 hidden, i32:128 k, i32 ids_64, i32 mapped, i32 shared_expert, i32 pairs, i32 topk, "
        "i32 routed_experts, i32 num_experts, i32 weight_columns, fp32 routed_scale, *fp32 bias"
    ),
    "triton_gate_up": _signature(
        "*fp8e4nv:16 a, *fp32 a_scales, *i32:16 a_rows, *fp8e4nv:16 b, *fp32 b_scales, *fp8e4nv:16 q, *fp32:16 scales, "
        "*i32:16 table, *i32:16 num_tiles, i32:128 channels, i32:128 k, i32 a_scale_row, i32 a_scale_group, "
        "i32 a_scale_k_block, i32:4 scale_k_block, i32 gathered, i32 group_m, " + _ACTIVATION + ", *fp32 bias"
    ),
    "triton_gate_up_small_batch": _signature(
        "*bf16:16 x, *i32 ids, *i32 expert_map, *fp8e4nv:16 b, *fp32 b_scales, *bf16:16 inner, i32:128 channels, "
        "i32:128 k, i32 ids_64, i32 mapped, i32 shared_expert, i32 pairs, i32 topk, i32 routed_experts, "
        "i32 num_experts, " + _ACTIVATION + ", *fp32 bias"
    ),
    "triton_gemm": _signature(
        "*fp8e4nv:16 a, *fp32 a_scales, *i32:16 a_rows, *fp8e4nv:16 b, *fp32 b_scales, *bf16:16 c, *bf16:16 out, "
        "*i32:16 table, *i32:16 num_tiles, i32 m, i32:8 n, i32:128 k, i32 a_scale_row, i32 a_scale_group, "
        "i32 a_scale_k_block, i32 gathered, i32 added, i32 grouped, i32 group_m, *fp32 bias"
    ),
    "triton_packed_gate_up": _signature(
        "*fp8e4nv:16 a, *fp32 a_scales, *i32:16 a_rows, *i32:16 b, *fp32 b_scales, *fp8e4nv:16 q, *fp32:16 scales, "
        "*i32:16 table, *i32:16 num_tiles, i32:128 channels, i32:128 k, i32 steps, i32 a_scale_row, i32 a_scale_group, "
        "i32 a_scale_k_block, i32:4 scale_k_block, i32 gathered, i32 group_m, " + _ACTIVATION + ", *fp32 bias"
    ),
    "triton_packed_gemm": _signature(
        "*fp8e4nv:16 a, *fp32 a_scales, *i32:16 b, *fp32 b_scales, *bf16:16 out, *i32:16 table, *i32:16 num_tiles, "
        "i32:128 n, i32:128 k, i32 steps, i32 a_scale_row, i32 a_scale_group, i32 a_scale_k_block, i32 group_m, "
        "*fp32 bias"
    ),
    "triton_quantize": _signature(
        "*bf16:16 x, *fp8e4nv:16 q, *fp32 scales, i32 tokens, i32:128 k, i32 scale_row, i32 scale_k_block"
    ),
    "triton_quantize_count": _signature(
        "*bf16:16 x, *fp8e4nv:16 q, *fp32:16 scales, i32 num_tokens, i32:128 k, *i32 ids, *i32 expert_map, "
        "*i32:16 counts, *i32:16 slots, i32 chunks, i32 parts, i32 ids_64, i32 mapped, i32 shared_expert, i32 pairs, "
        "i32 topk, i32 routed_experts, i32 num_experts"
    ),
    "triton_quantize_route": _signature(
        "*bf16:16 x, *fp8e4nv:16 q, *fp32:16 scales, i32 num_tokens, i32:128 k, *i32 ids, *i32 expert_map, "
        "*i32:16 slots, *i32:16 tokens, *i32:16 table, *i32:16 num_tiles, i32 ids_64, i32 mapped, i32 shared_expert, "
        "i32 pairs, i32 topk, i32 routed_experts, i32 num_experts, i32 block_m"
    ),
    "triton_route": _signature(
        "*i32 ids, *i32 expert_map, *i32:16 counts, *i32:16 slots, *i32:16 tokens, *i32:16 table, *i32:16 num_tiles, "
        "i32 parts, i32 ids_64, i32 mapped, i32 shared_expert, i32 pairs, i32 topk, i32 routed_experts, "
        "i32 num_experts, i32 block_m"
    ),
    "triton_silu_mul_quant": _signature(
        "*bf16:16 gate_up, *i32 counts, *fp8e4nv:16 q, *fp32 scales, i32 max_m, i32:128 channels, i32:4 scale_k_block, "
        + _ACTIVATION
    ),
    "triton_tiles_of_counts": _signature(
        "*i32 counts, *i32:16 table, *i32:16 num_tiles, i32 groups, i32 max_m, i32 block_m"
    ),
    "triton_tiles_of_indices": _signature(
        "*i32 ids, *i32:16 table, *i32:16 num_tiles, i32 rows, i32 num_groups, i32 block_m"
    ),
}
