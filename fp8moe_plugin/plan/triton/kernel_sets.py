"""The Triton kernels that a layer may launch at any number of tokens, with the reasons that `warmup list` prints."""

from fp8moe_plugin.formats.activation import VARIANTS
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.plan.keys import KernelKey, KernelSet
from fp8moe_plugin.plan.spec import Arrival, LayerSpec
from fp8moe_plugin.plan.triton.catalog import (
    CHUNK,
    FEW_ROWS,
    MORE_ROWS,
    NARROW_TILE_N,
    PADDED_EXPERTS,
    TRITON_DENSE_TILE_ROWS,
    combine_key,
    down_key,
    down_small_batch_key,
    expert_tile_rows,
    gate_up_key,
    gate_up_small_batch_key,
    gemm_key,
    quantize_count_key,
    quantize_key,
    quantize_route_key,
    route_key,
    silu_mul_quant_key,
    tiles_of_counts_key,
    tiles_of_indices_key,
)


def layer_kernels(target: str, spec: LayerSpec, arrival: Arrival) -> KernelSet:
    """Returns every kernel that a mixture-of-experts layer may launch, with its reason."""
    reasons: KernelSet = {}
    ue8m0 = spec.ue8m0
    for rows in expert_tile_rows(spec.weights):
        reasons[gate_up_key(target, rows, spec)] = f"GEMM 1 of the experts and SwiGLU, in tiles of {rows} rows"
        and_dense = "" if spec.weights is PACKED_MXFP4 else ", and dense GEMMs"
        reasons[down_key(target, rows, spec)] = f"GEMM 2 of the experts{and_dense}, in tiles of {rows} rows"
    if arrival is Arrival.BATCHED:
        reasons[tiles_of_counts_key(target)] = "tiles of batched experts, as DeepEP's low-latency mode hands them over"
        return reasons
    for experts in PADDED_EXPERTS:
        both = quantize_route_key(target, ue8m0, experts)
        reasons[both] = f"quantization and rows of up to {experts} experts, in steps of up to {CHUNK} pairs"
        counts = quantize_count_key(target, ue8m0, experts)
        reasons[counts] = f"quantization, and tokens of each of up to {experts} experts, in longer steps"
        reasons[route_key(target, experts)] = f"rows of up to {experts} experts and their tiles, in longer steps"
    reasons[combine_key(target)] = "the weighted sum of each token's experts"
    if arrival is Arrival.QUANTIZED:
        return reasons | {quantize_key(target, ue8m0): "quantization of tokens before an all-to-all"}
    if spec.weights is PACKED_MXFP4:
        return reasons
    return reasons | {
        gate_up_small_batch_key(target, spec): "GEMM 1 of the experts and SwiGLU, in steps of few tokens",
        down_small_batch_key(target, spec): "GEMM 2 of the experts and the weighted sum, in steps of few tokens",
    }


def dense_kernels(target: str, ue8m0: bool, weights: WeightFormat) -> KernelSet:
    """Returns every kernel that a dense layer may launch, with its reason."""
    narrow_key = gemm_key(target, FEW_ROWS, NARROW_TILE_N, weights=weights)
    narrow: KernelSet = {narrow_key: "dense GEMMs of few rows and columns"}
    gemms: KernelSet = {
        gemm_key(target, rows, weights=weights): f"dense GEMMs, in tiles of {rows} rows"
        for rows in TRITON_DENSE_TILE_ROWS
    }
    return narrow | gemms | {quantize_key(target, ue8m0): "quantization of the activations of dense layers"}


def op_kernels(target: str) -> list[KernelKey]:
    """Returns the kernels that only direct calls of the ops launch."""
    silu = (silu_mul_quant_key(target, ue8m0, activation) for ue8m0 in (False, True) for activation in VARIANTS)
    return [gemm_key(target, MORE_ROWS, f32=True), tiles_of_indices_key(target), *silu]
