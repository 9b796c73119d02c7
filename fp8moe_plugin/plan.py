"""Which kernels there are, and which one a call takes. Pure Python: the runtime and any precompilation ask here.

No shape of a model and no number of tokens is in a key: a handful of kernels serves every checkpoint.
"""

import functools
from dataclasses import dataclass
from enum import IntEnum

SMEM_ALIGNMENT = 1024
PREFILL_BLOCK_M = 128  # tokens of a tile of grouped_gemm
DECODE_BLOCK_M = 64  # tokens of a tile of grouped_gemm_swap_ab
SCALE_SLACK = 4  # ActivationScales::kSlack of csrc/tile_queue.cuh


@dataclass(frozen=True)
class KernelKey:
    """One kernel to compile: `csrc/<source>.cu`, whose entry is named `<source>` too.

    It is compiled under the macros `defines`, and THREADS and SMEM_BYTES, with which it is launched.
    """

    source: str
    defines: tuple[tuple[str, int], ...] = ()
    threads: int = 128
    smem_bytes: int = 0

    def __str__(self) -> str:
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.defines)])


class Output(IntEnum):
    """How grouped_gemm writes its result; the values are those of the macros in csrc/grouped_gemm.cu."""

    BF16 = 0
    BF16_DIRECT = 1
    F32_DIRECT = 2


@functools.cache
def grouped_gemm_key(output: Output, block_n: int = 256) -> KernelKey:
    stages = 4 if block_n == 256 else 5
    halves = block_n // 128
    operands = stages * (128 + block_n) * 128
    staging = 128 * 128 * 2
    scales_and_barriers = stages * ((PREFILL_BLOCK_M + SCALE_SLACK) * 4 + halves * 4 + 16 + 16)
    smem = _align(operands + staging + scales_and_barriers)
    defines = (("BLOCK_N", block_n), ("OUTPUT", int(output)), ("STAGES", stages))
    return KernelKey("grouped_gemm", defines, 384, smem)


@functools.cache
def swap_ab_key() -> KernelKey:
    stages = 8
    operands = stages * (128 + DECODE_BLOCK_M) * 128
    staging = DECODE_BLOCK_M * 128 * 2
    scales_and_barriers = stages * ((DECODE_BLOCK_M + SCALE_SLACK) * 4 + 4 + 16 + 16)
    smem = _align(operands + staging + scales_and_barriers)
    return KernelKey("grouped_gemm_swap_ab", (("STAGES", stages),), 384, smem)


@functools.cache
def quantize_key(ue8m0: bool, permute: bool) -> KernelKey:
    return KernelKey("quantize", (("UE8M0", int(ue8m0)), ("PERMUTE", int(permute))), 256)


@functools.cache
def silu_mul_quant_key(ue8m0: bool) -> KernelKey:
    return KernelKey("silu_mul_quant", (("UE8M0", int(ue8m0)),), 256)


@functools.cache
def combine_key() -> KernelKey:
    return KernelKey("combine", (), 128)


@functools.cache
def route_key(ids_64: bool) -> KernelKey:
    return KernelKey("route", (("IDS_64", int(ids_64)),), 512)


@functools.cache
def tiles_of_counts_key(masked: bool) -> KernelKey:
    return KernelKey("tiles_of_counts", (("MASKED", int(masked)),), 1024)


@functools.cache
def tiles_of_indices_key() -> KernelKey:
    return KernelKey("tiles_of_indices", (), 1024)


def moe_kernels(ue8m0: bool, batched: bool) -> list[KernelKey]:
    """All that a mixture-of-experts layer launches; `batched`: its tokens come quantized and sorted."""
    experts = [swap_ab_key(), grouped_gemm_key(Output.BF16), silu_mul_quant_key(ue8m0), tiles_of_counts_key(batched)]
    if batched:
        return experts
    return [*experts, quantize_key(ue8m0, permute=True), route_key(False), route_key(True), combine_key()]


def linear_kernels(ue8m0: bool) -> list[KernelKey]:
    """All that a dense layer launches."""
    gemms = [swap_ab_key(), grouped_gemm_key(Output.BF16, 256), grouped_gemm_key(Output.BF16, 128)]
    return [*gemms, quantize_key(ue8m0, permute=False)]


def all_kernels() -> list[KernelKey]:
    """Every kernel there is: those of the layers, and those that only direct callers of the ops reach."""
    layers = [k for ue8m0 in (False, True) for k in (*moe_kernels(ue8m0, False), *moe_kernels(ue8m0, True))]
    dense = [grouped_gemm_key(output, block_n) for output in Output for block_n in (128, 256)]
    ops = [*linear_kernels(False), *linear_kernels(True), *dense, tiles_of_indices_key()]
    return list(dict.fromkeys([*layers, *ops]))


def moe_block_m(tokens: int, topk: int, global_experts: int) -> int:
    """Rows a tile of a fused MoE layer: swap-AB tiles as long as an expert has few tokens on average."""
    return DECODE_BLOCK_M if tokens * topk <= DECODE_BLOCK_M * global_experts else PREFILL_BLOCK_M


def masked_block_m(expected_m: int) -> int:
    """Rows a tile of a masked GEMM whose groups have about `expected_m` rows."""
    return DECODE_BLOCK_M if expected_m <= DECODE_BLOCK_M else PREFILL_BLOCK_M


def dense_block_m(m: int, plain: bool) -> int:
    """Rows a tile of a dense GEMM; swap-AB tiles only store bfloat16 without an addend (`plain`)."""
    return DECODE_BLOCK_M if m <= DECODE_BLOCK_M and plain else PREFILL_BLOCK_M


def dense_block_n(m: int, n: int, sms: int) -> int:
    """Columns a tile of a dense GEMM: 256, or 128 where 256 would leave multiprocessors idle."""
    return 256 if ceil_div(m, PREFILL_BLOCK_M) * ceil_div(n, 256) >= sms else 128


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _align(size: int) -> int:
    return ceil_div(size, SMEM_ALIGNMENT) * SMEM_ALIGNMENT
