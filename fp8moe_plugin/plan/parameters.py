"""The parameters of each kernel: names, kinds and order match the kernel's signature in its source.

A launch passes its arguments by name. A missing or unknown argument raises TypeError.
"""

from collections import namedtuple
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from fp8moe_plugin.plan.triton.signatures import TRITON_SCRATCH, TRITON_SIGNATURES, TritonParameter

K_GROUPS = 16  # groups per launch of k_grouped_gemm, each with parameters of its own


class Kind(StrEnum):
    """The type of a parameter."""

    MAP = "map"  # a TMA descriptor, passed by value
    POINTER = "pointer"  # a device address; 0 for none
    INT = "int"  # 32 bits, signed
    FLOAT = "float"  # 32 bits
    MAPS = "maps"  # K_GROUPS descriptors
    INTS = "ints"  # K_GROUPS ints
    ACTIVATION = "activation"  # ActivationNumbers, passed by value


class Parameter(NamedTuple):
    kind: Kind
    name: str


def triton_parameters(signature: tuple[TritonParameter, ...]) -> tuple[Parameter, ...]:
    """Returns the parameters in the kernel's source, followed by those that Triton adds."""
    pointers = tuple(Parameter(Kind.POINTER, name) for name in TRITON_SCRATCH)
    kinds = {"i32": Kind.INT, "fp32": Kind.FLOAT}
    return *(Parameter(kinds.get(p.type, Kind.POINTER), p.name) for p in signature), *pointers


def _signature(text: str) -> tuple[Parameter, ...]:
    kinds_and_names = (parameter.split() for parameter in text.split(","))
    parameters = tuple(Parameter(Kind(kind), name) for kind, name in kinds_and_names)
    are_maps = [parameter.kind in (Kind.MAP, Kind.MAPS) for parameter in parameters]
    assert are_maps == sorted(are_maps, reverse=True), "maps come first, where they are aligned"
    return parameters


PARAMETERS = {
    "add_rows": _signature(
        "pointer window, pointer ids, pointer owners, pointer weights, pointer out, int ids_64, int tokens, int topk, "
        "int experts, int vectors, float routed_scale"
    ),
    "add_sums": _signature(
        "pointer window, pointer ids, pointer owners, pointer out, int ids_64, int tokens, int rows, int topk, "
        "int experts, int vectors"
    ),
    "choose_experts": _signature(
        "pointer logits, pointer padding, pointer x, pointer shared_gate, pointer weights, pointer ids, "
        "int logits_bf16, int tokens, int experts, int topk, int renormalize, int vectors"
    ),
    "combine": _signature(
        "pointer rows, pointer slots, pointer weights, pointer out, int vectors, int topk, int weight_columns, "
        "float routed_scale"
    ),
    "count_experts": _signature(
        "pointer ids, pointer expert_map, pointer counts, int ids_64, int shared_expert, int pairs, int topk, "
        "int routed_experts, int num_experts"
    ),
    "dense_gemm": _signature(
        "map a_map, map a_tail_map, map b_map, pointer a_scales, int a_scale_k_stride, pointer b_scales, pointer d, "
        "int m, int n, int k, int tile_n, pointer bias"
    ),
    "dense_gemm_many_rows": _signature(
        "map a_map, map b_map, map d_map, pointer a_scales, int a_scale_k_stride, pointer b_scales, pointer d, "
        "int m, int n, int k, pointer bias"
    ),
    "dense_gemm_few_rows": _signature(
        "map a_map, map b_map, pointer a_scales, int a_scale_k_stride, pointer b_scales, pointer d, "
        "int m, int n, int k, int tile_m, int splits, pointer bias"
    ),
    "down_small_batch": _signature(
        "map w_map, map q_map, pointer w_scales, pointer scales, pointer tokens_written, pointer ids, "
        "pointer expert_map, pointer out, int ids_64, int shared_expert, int routed_experts, int num_experts, "
        "int tokens, int topk, int hidden, int intermediate, int splits, pointer bias, pointer topk_weights, "
        "float routed_scale, int weight_columns"
    ),
    "gate_up": _signature(
        "map a_map, map a_narrow_map, map b_map, map d_map, pointer a_scales, int a_scale_expert_stride, "
        "int a_scale_k_stride, pointer b_scales, pointer gathered, pointer a_rows, pointer d, pointer d_scales, "
        "pointer done_counters, pointer table, pointer num_tiles, int m, int n, int k, activation activation, "
        "pointer bias"
    ),
    "gate_up_small_batch": _signature(
        "map w_map, pointer x, pointer w_scales, pointer ids, pointer expert_map, pointer topk_weights, pointer q, "
        "pointer scales, pointer tokens_written, int ids_64, int shared_expert, int routed_experts, int num_experts, "
        "int tokens, int topk, int hidden, int intermediate, float routed_scale, activation activation, pointer bias, "
        "int weight_columns, int stages_before_down"
    ),
    "gate_up_few_rows": _signature(
        "map w_map, map x_map, pointer x_scales, int x_scale_expert_stride, int x_scale_row_stride, "
        "int x_scale_k_stride, pointer w_scales, pointer a_rows, pointer q, pointer scales, pointer partial, "
        "pointer done_counters, pointer table, pointer num_tiles, int m, int intermediate, int k, int splits, "
        "int counters_per_tile, activation activation, pointer bias"
    ),
    "grouped_gemm": _signature(
        "map a_map, map a_narrow_map, map b_map, map d_map, pointer a_scales, int a_scale_expert_stride, "
        "int a_scale_k_stride, pointer b_scales, pointer d, pointer c, pointer done_counters, pointer table, "
        "pointer num_tiles, int m, int n, int k, pointer bias"
    ),
    "grouped_gemm_few_rows": _signature(
        "map a_map, map a_tall_map, map b_map, pointer a_scales, int a_scale_expert_stride, int a_scale_k_stride, "
        "pointer b_scales, pointer d, pointer table, pointer num_tiles, int m, int n, int k, int claim_pair, "
        "int columns_at_once, pointer done_counters, int counters_per_tile, pointer bias"
    ),
    "k_grouped_gemm": _signature(
        "maps a_maps, maps b_maps, ints k_blocks, ints first_k_blocks, ints indices, pointer a_scales, "
        "int a_scale_k_stride, pointer b_scales, int b_scale_k_stride, pointer c, pointer d, int m, int n, int groups"
    ),
    "push_sums": _signature(
        "pointer rows, pointer slots, pointer window, int rows_per_rank, int vectors, int topk, float routed_scale"
    ),
    "push_tokens": _signature(
        "pointer x, pointer ids, pointer weights, pointer owners, pointer window, int ids_64, int tokens, int rows, "
        "int topk, int experts, int groups"
    ),
    "quantize": _signature(
        "pointer x, pointer q, pointer scales, pointer slots, int tokens, int groups, int topk, int tokens_per_warp, "
        "pointer x_scales"
    ),
    "route": _signature(
        "pointer ids, pointer expert_map, pointer counts, pointer slots, pointer tokens, pointer num_rows, "
        "pointer table, pointer num_tiles, pointer done_counters, int ids_64, int shared_expert, int pairs, int topk, "
        "int routed_experts, int num_experts, int block_m, int counters_per_tile"
    ),
    "router_gemm": _signature("pointer x, pointer weight, pointer logits, int tokens, int experts, int steps"),
    "silu_mul_quant": _signature(
        "pointer gate_up, pointer counts, pointer q, pointer scales, int max_m, int groups, activation activation"
    ),
    "tiles_of_counts": _signature(
        "pointer counts, pointer table, pointer num_tiles, pointer done_counters, int groups, int max_m, int block_m"
    ),
    "tiles_of_ends": _signature(
        "pointer ends, pointer table, pointer num_tiles, pointer done_counters, int groups, int rows, int alignment, "
        "int block_m"
    ),
    "tiles_of_indices": _signature(
        "pointer ids, pointer run_begins, pointer table, pointer num_tiles, pointer d, int rows, int num_groups, "
        "int block_m, int chunks"
    ),
    "transpose_scales": _signature(
        "pointer scales, pointer counts, pointer out, int group_stride, int row_stride, int out_group_stride, "
        "int out_k_stride, int rows, int k_blocks"
    ),
    "mqa_logits": _signature(
        "map q_map, map k_map, pointer scales, pointer weights, int weights_pitch, pointer starts, pointer ends, "
        "pointer logits, int logits_pitch, int bf16, int m, int n, int dim, int width, int clean"
    ),
    "pack_mxfp4": _signature(
        "pointer codes, pointer exponents, pointer chunks, pointer scales, int rows, int groups, int row_blocks, "
        "int k_blocks, int further, int parts, int part, int largest"
    ),
    "paged_mqa_logits": _signature(
        "map q_map, map kv_map, pointer kv, int page_stride, pointer weights, int weights_pitch, "
        "pointer context_lens, pointer block_table, int table_pitch, int table_width, pointer schedule, "
        "pointer logits, int logits_pitch, int bf16, int batch, int dim, int most, int sharers"
    ),
    "paged_mqa_metadata": _signature("pointer context_lens, pointer schedule, int batch, int next_n, int blocks"),
}


PARAMETERS |= {kernel: triton_parameters(signature) for kernel, signature in TRITON_SIGNATURES.items()}

# Packs the arguments of a launch: `ARGUMENTS["combine"](rows=.., slots=.., ..)` is a tuple in the signature's order.
ARGUMENTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    kernel: namedtuple(
        kernel,
        (parameter.name for parameter in parameters),
        defaults=(0,) * len(TRITON_SCRATCH) if kernel in TRITON_SIGNATURES else (),
    )
    for kernel, parameters in PARAMETERS.items()
}
