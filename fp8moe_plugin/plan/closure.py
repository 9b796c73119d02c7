"""Which kernels a layer or a model may launch at any number of tokens: these alone are loaded when serving starts."""

import functools
import itertools
import operator

from fp8moe_plugin.checkpoint.shapes import GROUP, Indexer, Model
from fp8moe_plugin.plan.catalog import (
    DENSE_CLUSTER_TILE_N,
    DENSE_FEW_ROWS_TILE_M,
    DENSE_TILE_M,
    GROUPED_TILE_N,
    MQA_HEADS,
    MQA_NEXT_N,
    SM90,
    SMALL_BATCH_STAGES,
    KernelKey,
    choose_experts_key,
    combine_key,
    count_experts_key,
    dense_gemm_few_rows_key,
    dense_gemm_key,
    dense_gemm_many_rows_key,
    down_small_batch_key,
    gate_up_few_rows_key,
    gate_up_key,
    gate_up_small_batch_key,
    grouped_gemm_few_rows_key,
    grouped_gemm_key,
    k_grouped_gemm_key,
    mqa_logits_key,
    paged_mqa_logits_key,
    paged_mqa_metadata_key,
    quantize_key,
    route_key,
    router_gemm_key,
    silu_mul_quant_key,
    tiles_of_counts_key,
    tiles_of_ends_key,
    tiles_of_indices_key,
    transpose_scales_key,
)
from fp8moe_plugin.plan.constants import PAIRS_PER_CHUNK, SMALL_BATCH_K_BLOCKS, Layout, Output
from fp8moe_plugin.plan.mqa import indexer_refusal
from fp8moe_plugin.plan.step import few_rows_tokens
from fp8moe_plugin.plan.triton_catalog import is_triton
from fp8moe_plugin.plan.triton_closure import linear_reasons, moe_reasons, op_keys
from fp8moe_plugin.plan.tuning import DENSE_ROWS, EARLY_BELOW, GATHER_UP_TO, KEEP_B_UP_TO


def moe_kernels(ue8m0: bool, batched: bool, target: str = SM90) -> list[KernelKey]:
    """Every kernel that a mixture-of-experts layer may launch; `batched`: its tokens arrive quantized and sorted.

    Args:
        target: SM90 for the kernels of csrc, or that of Triton kernels.
    """
    if is_triton(target):
        return list(moe_reasons(target, ue8m0, batched))
    gemms = [gate_up_key(ue8m0, gather=False), grouped_gemm_key(Output.BF16)]
    gemms.append(grouped_gemm_key(Output.BF16, keep_b=True))
    if batched:
        return [*gemms, tiles_of_counts_key()]
    gemms += [grouped_gemm_few_rows_key(), gate_up_few_rows_key(ue8m0)]
    gather = [gate_up_key(ue8m0, gather=True), quantize_key(ue8m0, Layout.ROW_MAJOR)]
    small_batch = [gate_up_small_batch_key(ue8m0, *kind) for kind in SMALL_BATCH_STAGES]
    small_batch += [down_small_batch_key(*kind) for kind in SMALL_BATCH_STAGES]
    routing = [router_gemm_key(), choose_experts_key(), count_experts_key(), route_key(), combine_key()]
    return [*gemms, *gather, *small_batch, quantize_key(ue8m0, Layout.PERMUTED), *routing]


def linear_kernels(ue8m0: bool, target: str = SM90) -> list[KernelKey]:
    """Every kernel that a dense layer may launch; `target` as for `moe_kernels`."""
    if is_triton(target):
        return list(linear_reasons(target, ue8m0))
    few_rows = dense_gemm_few_rows_key(), *map(dense_gemm_key, DENSE_TILE_M)
    many_rows = *map(dense_gemm_many_rows_key, DENSE_CLUSTER_TILE_N), grouped_gemm_key(Output.BF16)
    return [*few_rows, *many_rows, quantize_key(ue8m0, Layout.K_MAJOR)]


def indexer_kernels(heads: int) -> list[KernelKey]:
    """All that an indexer of so many heads launches."""
    paged = [paged_mqa_logits_key(heads, next_n) for next_n in MQA_NEXT_N]
    return [mqa_logits_key(heads), *paged, paged_mqa_metadata_key()]


def model_kernels(model: Model, target: str = SM90) -> dict[KernelKey, str]:
    """Every kernel that serving a checkpoint may launch, for any split and any number of tokens, each with its reason.

    Raises:
        LookupError: a kernel has no reason.
    """
    if is_triton(target):
        formats = (True, False) if model.experts.layers else ()
        layers_of_experts = (moe_reasons(target, model.ue8m0, batched) for batched in formats)
        return functools.reduce(operator.or_, layers_of_experts, linear_reasons(target, model.ue8m0))
    # Experts may all be unquantized.
    layers = (moe_kernels(model.ue8m0, batched) for batched in ((False, True) if model.experts.layers else ()))
    keys = dict.fromkeys([*linear_kernels(model.ue8m0), *itertools.chain(*layers), *_of_indexer(model.indexer)])
    reasons = _reasons(model)
    for key in keys:
        if key not in reasons:
            raise LookupError(
                f"{key} has no reason for `warmup list` to print. Add one to _reasons in plan/closure.py."
            )
    return {key: reasons[key] for key in keys}


def _of_indexer(indexer: Indexer | None) -> list[KernelKey]:
    """None for an indexer that no kernel serves: DeepGEMM then does."""
    if indexer is None or indexer_refusal(indexer.heads, indexer.dim):
        return []
    return indexer_kernels(indexer.heads)


def _reasons(model: Model) -> dict[KernelKey, str]:
    """What a checkpoint needs each kernel for, as `warmup list` prints it."""
    ue8m0, topk = model.ue8m0, model.experts.topk
    few = few_rows_tokens(topk, model.experts.experts)
    reasons = {
        grouped_gemm_few_rows_key(): f"GEMM 2 of the experts in steps of up to {few} tokens: decode",
        dense_gemm_few_rows_key(): f"dense GEMMs with few columns in steps of up to {DENSE_FEW_ROWS_TILE_M[-1]} tokens",
        gate_up_few_rows_key(ue8m0): f"GEMM 1 of the experts and SwiGLU in steps of up to {few} tokens: decode",
        gate_up_key(
            ue8m0, False
        ): f"GEMM 1 and SwiGLU of experts of more than {GATHER_UP_TO} channels in steps of more "
        f"than {few} tokens: prefill; and of batched experts",
        gate_up_key(ue8m0, True): f"GEMM 1 and SwiGLU of experts of up to {GATHER_UP_TO} channels in steps of more "
        f"than {few} tokens: prefill, with gathered tokens",
        grouped_gemm_key(
            Output.BF16
        ): f"GEMM 2 of the experts in steps of more than {few} tokens, and dense GEMMs: prefill",
        grouped_gemm_key(Output.BF16, keep_b=True): f"GEMM 2 of experts of up to {KEEP_B_UP_TO} channels, in steps of "
        f"{EARLY_BELOW} or more tokens per expert",
        quantize_key(ue8m0, Layout.K_MAJOR): "quantization of the activations of dense layers",
        quantize_key(ue8m0, Layout.PERMUTED): "quantization of the tokens, with a copy for each of their experts",
        quantize_key(ue8m0, Layout.ROW_MAJOR): "quantization of the tokens where GEMM 1 gathers them",
        router_gemm_key(): "logits of few tokens: the op router_gemm, and softmax routers under vLLM",
        choose_experts_key(): "softmax top-k: the op choose_experts, and softmax routers under vLLM",
        count_experts_key(): f"tokens of each expert, in steps of more than {PAIRS_PER_CHUNK // topk} tokens",
        route_key(): "rows of each expert and their tiles",
        tiles_of_counts_key(): "tiles of batched experts, as DeepEP's low-latency mode hands them over",
        combine_key(): "the weighted sum of each token's experts",
        paged_mqa_metadata_key(): "the indexer's logits of paged KV: which block computes which part",
    }
    for heads in MQA_HEADS:
        reasons[mqa_logits_key(heads)] = "the indexer's logits: prefill"
        for next_n in MQA_NEXT_N:
            reasons[paged_mqa_logits_key(heads, next_n)] = (
                f"the indexer's logits of paged KV for {next_n} tokens of each request: decode"
            )
    for tile_m in DENSE_TILE_M:
        reasons[dense_gemm_key(tile_m)] = (
            f"other dense GEMMs in steps of up to {DENSE_ROWS} tokens, or more where its tiles take fewer or shorter "
            f"waves: tiles of {tile_m} rows"
        )
    for tile_n in DENSE_CLUSTER_TILE_N:
        reasons[dense_gemm_many_rows_key(tile_n)] = (
            f"dense GEMMs in steps of more than {DENSE_ROWS} tokens: prefill, tiles of {tile_n} columns"
        )
    for padded_tokens, cluster in SMALL_BATCH_STAGES:
        steps = f"in steps of up to {padded_tokens} tokens, hidden size up to {SMALL_BATCH_K_BLOCKS * GROUP * cluster}"
        first = gate_up_small_batch_key(ue8m0, padded_tokens, cluster)
        reasons[first] = f"routing, quantization, GEMM 1 and SwiGLU {steps}"
        reasons[down_small_batch_key(padded_tokens, cluster)] = f"GEMM 2 and the weighted sum {steps}"
    return reasons


def all_kernels(target: str = SM90) -> list[KernelKey]:
    """Every kernel of a target: those of the layers, and those that only direct calls of the ops launch."""
    if is_triton(target):
        return _all_triton(target)
    layers = [k for ue8m0 in (False, True) for k in (*moe_kernels(ue8m0, False), *moe_kernels(ue8m0, True))]
    outputs = (Output.BF16_DIRECT, Output.F32_DIRECT)
    dense = [grouped_gemm_key(output, tile_n) for output in outputs for tile_n in GROUPED_TILE_N]
    silu = [silu_mul_quant_key(ue8m0) for ue8m0 in (False, True)]
    layouts = tiles_of_ends_key(), tiles_of_indices_key(), transpose_scales_key()
    ops = [*linear_kernels(False), *linear_kernels(True), *dense, *silu, *layouts, k_grouped_gemm_key()]
    indexers = itertools.chain(*map(indexer_kernels, MQA_HEADS))
    return list(dict.fromkeys([*layers, *ops, *indexers]))


def _all_triton(target: str) -> list[KernelKey]:
    formats = (False, True)
    layers = [moe_kernels(ue8m0, batched, target) for ue8m0 in formats for batched in formats]
    dense = [linear_kernels(ue8m0, target) for ue8m0 in formats]
    return list(dict.fromkeys(itertools.chain(*layers, *dense, op_keys(target))))
