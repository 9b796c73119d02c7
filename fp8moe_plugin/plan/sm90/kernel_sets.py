"""The kernels that a layer may launch, each with the reason that `warmup list` prints."""

from fp8moe_plugin.formats.activation import VARIANTS
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.plan.gpu_tuning import UNTUNED
from fp8moe_plugin.plan.keys import KernelKey, KernelSet
from fp8moe_plugin.plan.sm90.catalog import (
    DENSE_CLUSTER_TILE_N,
    DENSE_FEW_TILE_ROWS,
    DENSE_TILE_ROWS,
    GROUPED_TILE_N,
    MQA_NEXT_N,
    PACKED_FORMATS,
    SMALL_BATCH_STAGES,
    add_rows_key,
    add_sums_key,
    choose_experts_key,
    combine_key,
    count_experts_key,
    dense_gemm_few_rows_key,
    dense_gemm_key,
    dense_gemm_many_rows_key,
    dense_variant,
    down_small_batch_key,
    gate_up_few_rows_key,
    gate_up_key,
    gate_up_small_batch_key,
    grouped_gemm_few_rows_key,
    grouped_gemm_key,
    k_grouped_gemm_key,
    pack_mxfp4_key,
    permute_key,
    push_sums_key,
    push_tokens_key,
    pushed,
    quantize_key,
    route_key,
    router_gemm_key,
    silu_mul_quant_key,
    tiles_of_counts_key,
    tiles_of_ends_key,
    tiles_of_indices_key,
    transpose_scales_key,
)
from fp8moe_plugin.plan.sm90.constants import PAIRS_PER_CHUNK, SMALL_BATCH_K_BLOCKS, Layout
from fp8moe_plugin.plan.sm90.grouped import few_rows_per_expert, grouped_key, has_wide_tiles
from fp8moe_plugin.plan.sm90.indexer import mqa_logits_key, paged_mqa_logits_key, paged_mqa_metadata_key
from fp8moe_plugin.plan.sm90.push import may_push_rows
from fp8moe_plugin.plan.sm90.tiles import PACKED_WIDE
from fp8moe_plugin.plan.spec import Arrival, LayerSpec, Output
from fp8moe_plugin.plan.tuning import (
    DENSE_ROWS,
    EARLY_BELOW,
    GATHER_UP_TO,
    KEEP_B_UP_TO,
    PACKED_WIDE_ROWS_PER_EXPERT,
    PUSHED_ROWS_RANKS_FROM,
)


def layer_kernels(spec: LayerSpec, arrival: Arrival) -> KernelSet:
    """Returns every kernel that a mixture-of-experts layer may launch, with its reason."""
    if arrival is Arrival.PUSHED:
        return _push_kernels(spec)
    gemms = _few_rows_kernels(spec) | _many_rows_kernels(spec)
    if spec.weights is PACKED_MXFP4:
        gemms |= {pack_mxfp4_key(): "packing of experts in MXFP4 while they are loaded"}
    if arrival is Arrival.BATCHED:
        return gemms | {tiles_of_counts_key(): "tiles of batched experts, as DeepEP's low-latency mode hands them over"}
    gemms |= _wide_tiles_kernels(spec)
    if spec.weights not in PACKED_FORMATS:
        reason = f"GEMM 1 and SwiGLU of experts of up to {GATHER_UP_TO} channels {_prefill(spec)}, with gathered tokens"
        gemms |= {gate_up_key(spec, gather=True): reason}
    found = gemms | _row_major_quantization(spec) | _permutation(spec, arrival) | _routing_kernels(spec)
    return found if arrival is Arrival.QUANTIZED else found | _small_batch_kernels(spec)


def few_rows_tokens(spec: LayerSpec) -> int:
    """Returns the most tokens of a step for which a layer uses the kernels for few rows, unless tuned otherwise."""
    return few_rows_per_expert(spec.weights, UNTUNED) * spec.shape.global_experts // spec.shape.topk


def _wide_tiles_tokens(spec: LayerSpec) -> int:
    """Returns the most tokens of a step for which a layer with wide tiles uses them."""
    return PACKED_WIDE_ROWS_PER_EXPERT * spec.shape.global_experts // spec.shape.topk


def _prefill(spec: LayerSpec) -> str:
    most = _wide_tiles_tokens(spec) if has_wide_tiles(spec) else few_rows_tokens(spec)
    return f"in steps of more than {most} tokens: prefill"


def _push_kernels(spec: LayerSpec) -> KernelSet:
    """Returns the kernels of a layer whose ranks store tokens into each other's windows."""
    found = layer_kernels(spec, Arrival.QUANTIZED) | {
        push_tokens_key(spec.ue8m0, quantize=True): "tokens stored in the windows of other ranks, in e4m3",
        push_sums_key(): "sums of a rank's experts stored in the window of each token's rank",
        add_sums_key(): "the sums of all ranks of each token added",
    }
    if may_push_rows(spec):
        found |= _pushed_rows_kernels(spec)
    if spec.weights in PACKED_FORMATS:
        return found
    small = push_tokens_key(spec.ue8m0, quantize=False)
    return (
        found | _small_batch_kernels(spec) | {small: "the same in steps of up to 16 tokens of all ranks, in bfloat16"}
    )


def _pushed_rows_kernels(spec: LayerSpec) -> KernelSet:
    """Returns the kernels with which GEMM 2 pushes rows in place of sums."""
    steps = f"in steps of {PUSHED_ROWS_RANKS_FROM} or more ranks and more than {few_rows_tokens(spec)} tokens"
    return {
        pushed(grouped_gemm_key(Output.BF16)): f"GEMM 2 that stores rows in the windows of other ranks, {steps}",
        add_rows_key(): "the weighted sum of these rows",
    }


def _few_rows_kernels(spec: LayerSpec) -> KernelSet:
    """Returns the GEMMs that stream weights."""
    steps, of = f"in steps of up to {few_rows_tokens(spec)} tokens: decode", f"of experts in {spec.weights.name}"
    return {
        grouped_gemm_few_rows_key(spec.weights, spec.bias): f"GEMM 2 {of} {steps}",
        gate_up_few_rows_key(spec): f"GEMM 1 {of} and SwiGLU {steps}",
    }


def _wide_tiles_kernels(spec: LayerSpec) -> KernelSet:
    """Returns the GEMMs that stream packed weights for more rows."""
    if not has_wide_tiles(spec):
        return {}
    steps = f"in steps of {few_rows_tokens(spec) + 1} to {_wide_tiles_tokens(spec)} tokens"
    down, gate_up = (
        grouped_key(PACKED_WIDE, False, spec.weights, spec.bias),
        gate_up_few_rows_key(spec, PACKED_WIDE.rows),
    )
    return {
        down: f"GEMM 2 of experts in {spec.weights.name} {steps}",
        gate_up: f"GEMM 1 of experts in {spec.weights.name} and SwiGLU {steps}",
    }


def _many_rows_kernels(spec: LayerSpec) -> KernelSet:
    """Returns the GEMMs whose tiles have up to 128 rows and a tail, or up to 256 if they decode weights."""
    steps, of = _prefill(spec), f"of experts in {spec.weights.name}"
    down, down_keeps_b = (
        grouped_gemm_key(Output.BF16, keep_b=keep_b, weights=spec.weights, bias=spec.bias) for keep_b in (False, True)
    )
    found = {down: f"GEMM 2 {of} {steps}", gate_up_key(spec, gather=False): f"GEMM 1 {of} and SwiGLU {steps}"}
    if spec.weights in PACKED_FORMATS:
        return found
    many = f"in steps of {EARLY_BELOW} or more tokens per expert"
    return found | {down_keeps_b: f"GEMM 2 of experts of up to {KEEP_B_UP_TO} channels, {many}"}


def _permutation(spec: LayerSpec, arrival: Arrival) -> KernelSet:
    if arrival is Arrival.QUANTIZED:
        return {permute_key(): "copies of tokens that arrive quantized, for each of their experts"}
    key = quantize_key(spec.ue8m0, Layout.PERMUTED)
    return {key: "quantization of the tokens, with a copy for each of their experts"}


def _row_major_quantization(spec: LayerSpec) -> KernelSet:
    key = quantize_key(spec.ue8m0, Layout.ROW_MAJOR)
    return {key: "quantization of the tokens where GEMM 1 gathers them, or before an all-to-all"}


def _small_batch_kernels(spec: LayerSpec) -> KernelSet:
    found: KernelSet = {}
    for padded_tokens, cluster in sorted(SMALL_BATCH_STAGES):  # of clusters with one kernel, the largest
        steps = f"in steps of up to {padded_tokens} tokens, hidden size up to {SMALL_BATCH_K_BLOCKS * GROUP * cluster}"
        first = gate_up_small_batch_key(spec, padded_tokens, cluster)
        found[first] = f"routing, quantization, GEMM 1 and SwiGLU {steps}"
        found[down_small_batch_key(spec, padded_tokens, cluster)] = f"GEMM 2 and the weighted sum {steps}"
    return found


def _routing_kernels(spec: LayerSpec) -> KernelSet:
    """Returns the kernels that run before and after the GEMMs."""
    one_chunk = PAIRS_PER_CHUNK // spec.shape.topk
    return {
        router_gemm_key(): "logits of few tokens: the op router_gemm, and softmax routers under vLLM",
        choose_experts_key(): "softmax top-k: the op choose_experts, and softmax routers under vLLM",
        count_experts_key(): f"tokens of each expert, in steps of more than {one_chunk} tokens",
        route_key(): "rows of each expert and their tiles",
        combine_key(): "the weighted sum of each token's experts",
    }


def dense_kernels(ue8m0: bool, weights: WeightFormat, biased: bool) -> KernelSet:
    """Returns every kernel that a dense layer may launch, with its reason; where `biased`, with a bias and without."""
    gemms: KernelSet = {
        dense_gemm_few_rows_key(): f"dense GEMMs with few columns in steps of up to {DENSE_FEW_TILE_ROWS[-1]} tokens",
    }
    for tile_rows in DENSE_TILE_ROWS:
        gemms[dense_gemm_key(tile_rows)] = (
            f"other dense GEMMs in steps of up to {DENSE_ROWS} tokens, or more where its tiles take fewer or shorter "
            f"waves: tiles of {tile_rows} rows"
        )
    for tile_n in DENSE_CLUSTER_TILE_N:
        gemms[dense_gemm_many_rows_key(tile_n)] = (
            f"dense GEMMs in steps of more than {DENSE_ROWS} tokens: prefill, tiles of {tile_n} columns"
        )
    found = {dense_variant(grouped_gemm_key(Output.BF16), weights): "dense GEMMs: prefill"}
    found |= {dense_variant(key, weights): reason for key, reason in gemms.items()}
    if biased:
        found |= {dense_variant(key, weights, biased): f"{reason}, with a bias" for key, reason in gemms.items()}
    return found | {quantize_key(ue8m0, Layout.K_MAJOR): "quantization of the activations of dense layers"}


def batched_dense_kernels() -> KernelSet:
    """Returns every kernel that a batch of two or more dense GEMMs launches, with its reason."""
    return {
        grouped_gemm_few_rows_key(FP8_BLOCK): "batched dense GEMMs of few tokens: decode",
        grouped_gemm_key(Output.BF16): "batched dense GEMMs: prefill",
        tiles_of_counts_key(): "tiles of batched dense GEMMs",
        transpose_scales_key(): "scales of batched dense GEMMs, in steps whose tokens are no multiple of 4",
    }


def indexer_kernels(heads: int) -> KernelSet:
    """Returns every kernel that an indexer with this number of heads launches, with its reason."""
    found = {mqa_logits_key(heads): "the indexer's logits: prefill"}
    for next_n in MQA_NEXT_N:
        found[paged_mqa_logits_key(heads, next_n)] = (
            f"the indexer's logits of paged KV for {next_n} tokens of each request: decode"
        )
    return found | {paged_mqa_metadata_key(): "the indexer's logits of paged KV: which block computes which part"}


def op_kernels() -> list[KernelKey]:
    """Returns the kernels that only direct calls of the ops launch."""
    outputs = (Output.BF16_DIRECT, Output.F32_DIRECT)
    dense = [grouped_gemm_key(output, tile_n) for output in outputs for tile_n in GROUPED_TILE_N]
    silu = [silu_mul_quant_key(ue8m0, activation) for ue8m0 in (False, True) for activation in VARIANTS]
    layouts = tiles_of_ends_key(), tiles_of_indices_key(), transpose_scales_key()
    return [*dense, *silu, *layouts, k_grouped_gemm_key()]
