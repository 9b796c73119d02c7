"""The Triton kernels, with their constexpr parameters: a closed set of tiles for each GPU."""

import functools
from dataclasses import dataclass

from fp8moe_plugin.checkpoint.shapes import MAX_LOCAL_EXPERTS
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat, ceil_div
from fp8moe_plugin.plan.keys import HOPPER, KIB, KernelKey
from fp8moe_plugin.plan.spec import LayerSpec

# The GPUs that Triton kernels are compiled for: compute capability, and shared memory of a block.
TARGETS = {
    "sm_89": ((8, 9), 99 * KIB),
    "sm_90": ((9, 0), 227 * KIB),
    "sm_100": ((10, 0), 227 * KIB),
    "sm_103": ((10, 3), 227 * KIB),
    "sm_120": ((12, 0), 99 * KIB),
    "sm_121": ((12, 1), 99 * KIB),
}
GPUS = {target.replace("_", ""): target for target in TARGETS}  # by their names in the warm-up
ROW_SCALES = {FP8_BLOCK: 0, FP8_CHANNEL: 1}  # by the format of weights, of the kernels that read them
EXPERT_FORMATS = *ROW_SCALES, PACKED_MXFP4  # of experts
CHUNK = 128  # (token, expert) pairs that a program of the routing kernels processes together
MAX_CHUNKS = 128  # programs of these kernels in a long step; each reads the counts of all
PADDED_EXPERTS = (256, MAX_LOCAL_EXPERTS)
QUANTIZE_ROWS = 8
MORE_QUANTIZE_ROWS = 32  # beside programs that count, whose registers let fewer programs share an SM
COMBINE_CHANNELS = 1024
TABLE_BLOCK = 1024  # groups or rows that the kernels of tile tables process together


@dataclass(frozen=True)
class TritonKey(KernelKey):
    """A kernel `source` of `triton_kernels`. `defines` are its constexpr parameters.

    Its `smem_bytes` are 0: Triton determines the size during compilation, and the compiled file records it.
    """

    stages: int = 1  # of the pipeline of loads

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.target})"


def target_of(capability: tuple[int, int] | None) -> str | None:
    """Returns the target of a compute capability, or None if no Triton kernels are compiled for it."""
    return next((target for target, (served, _) in TARGETS.items() if served == capability), None)


def _key(target: str, source: str, warps: int = 4, stages: int = 1, **constants: int) -> TritonKey:
    constants["PDL"] = int(TARGETS[target][0] >= HOPPER)
    return TritonKey(f"triton_{source}", tuple(sorted(constants.items())), 32 * warps, 0, target, stages)


def _activated(activation: Activation, ue8m0: bool) -> dict[str, int]:
    """Returns the constants of kernels with an activation and the quantization of its result."""
    return {"MODIFIED_SWIGLU": activation.variant, "UE8M0": int(ue8m0)}


def _of_gate_up(spec: LayerSpec) -> dict[str, int]:
    """Returns the constants of GEMM 1 of the experts, except its tiles."""
    return {**_of_weights(spec.weights, spec.bias), **_activated(spec.activation, spec.ue8m0)}


def _of_weights(weights: WeightFormat, bias: bool) -> dict[str, int]:
    """Returns the constants for what experts' weights are; BIAS is one only if there is a bias."""
    return {**({} if weights is PACKED_MXFP4 else {"ROW_SCALES": ROW_SCALES[weights]}), **({"BIAS": 1} if bias else {})}


# ---- routing and quantization --------------------------------------------------------------------------------------


@functools.cache
def quantize_route_key(target: str, ue8m0: bool, experts: int) -> TritonKey:
    """Quantization of a layer's tokens, and the routing of up to CHUNK pairs."""
    padded = padded_experts(experts)
    return _key(target, "quantize_route", CHUNK=CHUNK, EXPERTS=padded, ROWS=QUANTIZE_ROWS, UE8M0=int(ue8m0))


@functools.cache
def quantize_count_key(target: str, ue8m0: bool, experts: int) -> TritonKey:
    """Quantization of a layer's tokens, and the counts that `route_key` needs."""
    padded = padded_experts(experts)
    return _key(target, "quantize_count", CHUNK=CHUNK, EXPERTS=padded, ROWS=MORE_QUANTIZE_ROWS, UE8M0=int(ue8m0))


@functools.cache
def route_key(target: str, experts: int) -> TritonKey:
    return _key(target, "route", warps=8, CHUNK=CHUNK, EXPERTS=padded_experts(experts))


def route_chunks(pairs: int) -> tuple[int, int]:
    """Returns the number of programs of the routing kernels, and the number of CHUNKs of pairs for each program.

    A single program needs only one kernel.
    """
    parts = ceil_div(pairs, CHUNK * MAX_CHUNKS)
    return ceil_div(pairs, CHUNK * parts), parts


def padded_experts(experts: int) -> int:
    """Returns the smallest supported number of local experts that is at least `experts`."""
    return next(padded for padded in PADDED_EXPERTS if experts <= padded)


@functools.cache
def tiles_of_counts_key(target: str) -> TritonKey:
    return _key(target, "tiles_of_counts", BLOCK=TABLE_BLOCK)


@functools.cache
def tiles_of_indices_key(target: str) -> TritonKey:
    return _key(target, "tiles_of_indices", BLOCK=TABLE_BLOCK)


@functools.cache
def quantize_key(target: str, ue8m0: bool) -> TritonKey:
    return _key(target, "quantize", ROWS=QUANTIZE_ROWS, UE8M0=int(ue8m0))


@functools.cache
def silu_mul_quant_key(target: str, ue8m0: bool, activation: Activation) -> TritonKey:
    return _key(target, "silu_mul_quant", ROWS=QUANTIZE_ROWS, **_activated(activation, ue8m0))


def gate_up_small_batch_key(target: str, spec: LayerSpec) -> TritonKey:
    return _key(target, "gate_up_small_batch", BLOCK_N=4, GROUPS=16, **_of_gate_up(spec))


def down_small_batch_key(target: str, spec: LayerSpec) -> TritonKey:
    constants = {**_of_weights(spec.weights, spec.bias), "UE8M0": int(spec.ue8m0)}
    return _key(target, "down_small_batch", BLOCK_N=8, GROUPS=16, **constants)


@functools.cache
def combine_key(target: str) -> TritonKey:
    return _key(target, "combine", BLOCK=COMBINE_CHANNELS)


# ---- GEMMs ---------------------------------------------------------------------------------------------------------

FEW_ROWS, MORE_ROWS, MANY_ROWS = 16, 64, 128  # rows per tile; with the fewest, products are transposed
TILE_N = 128  # columns
NARROW_TILE_N = 32  # with FEW_ROWS, if wider tiles would leave SMs idle
NARROW_STAGES = 8  # as many bytes in flight as two stages of a wide tile


EXPERT_TILE_ROWS = FEW_ROWS, MORE_ROWS  # per tile of experts
PACKED_TILE_ROWS = FEW_ROWS, 32  # of packed weights, whose codes take the registers of more rows
PACKED_WARPS = 8
TRITON_DENSE_TILE_ROWS = FEW_ROWS, MORE_ROWS, MANY_ROWS  # per tile of dense GEMMs


def expert_tile_rows(weights: WeightFormat) -> tuple[int, int]:
    """Returns the rows of a tile of experts with few rows and with more."""
    return PACKED_TILE_ROWS if weights is PACKED_MXFP4 else EXPERT_TILE_ROWS


def gate_up_key(target: str, tile_rows: int, spec: LayerSpec) -> TritonKey:
    """GEMM 1 of the experts with its activation and the quantization of the result, in tiles of `tile_rows` rows."""
    swap, warps = int(tile_rows == FEW_ROWS), 4 if tile_rows == FEW_ROWS else 8
    stages = 4 if _is_large(target) else 3
    if spec.weights is PACKED_MXFP4:
        return _key(target, "packed_gate_up", PACKED_WARPS, 2, BLOCK_M=tile_rows, **_of_gate_up(spec))
    return _key(target, "gate_up", warps, stages, BLOCK_M=tile_rows, SWAP=swap, **_of_gate_up(spec))


@functools.cache
def gemm_key(
    target: str,
    tile_rows: int,
    tile_n: int = TILE_N,
    f32: bool = False,
    weights: WeightFormat = FP8_BLOCK,
    bias: bool = False,
) -> TritonKey:
    """GEMM with bfloat16 or float32 results, in tiles of `tile_rows` rows and `tile_n` columns."""
    swap, warps = int(tile_rows == FEW_ROWS and tile_n == TILE_N), 8 if tile_rows == MANY_ROWS else 4
    # With few rows, fewer stages let several blocks share an SM: while one stores its tile, others load.
    stages = 3 if tile_rows == FEW_ROWS or not _is_large(target) else 4
    stages = NARROW_STAGES if tile_n == NARROW_TILE_N else stages
    tile = {"BLOCK_M": tile_rows, "BLOCK_N": tile_n, "SWAP": swap}
    return _key(target, "gemm", warps, stages, **tile, F32=int(f32), **_of_weights(weights, bias))


def down_key(target: str, tile_rows: int, spec: LayerSpec) -> TritonKey:
    """GEMM 2 of the experts, in tiles of `tile_rows` rows."""
    if spec.weights is PACKED_MXFP4:
        constants = _of_weights(spec.weights, spec.bias)
        return _key(target, "packed_gemm", PACKED_WARPS, 3, BLOCK_M=tile_rows, **constants)
    return gemm_key(target, tile_rows, weights=spec.weights, bias=spec.bias)


def _is_large(target: str) -> bool:
    """Returns whether shared memory holds four stages of any tile."""
    return TARGETS[target][1] >= 227 * KIB
