"""The launches that quantize tokens, or apply SwiGLU and quantize the result."""

from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import Rows
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.sm90.catalog import quantize_key, silu_mul_quant_key
from fp8moe_plugin.plan.sm90.constants import FEW_TOKENS_PER_WARP, ROWS_PER_WARP, TOKENS_PER_WARP, Layout
from fp8moe_plugin.plan.tuning import QUANTIZE_FEW_TOKENS

BLOCKS_PER_MULTIPROCESSOR = 8  # of silu_mul_quant: two waves, enough to even out experts of unequal size


def quantize_rows_launch(ue8m0: bool, x: Address, out: Rows) -> Launch:
    """Returns the launch that quantizes bfloat16 `[rows, k]` at `x` to rows with K-major or row-major scales."""
    key = quantize_key(ue8m0, Layout.ROW_MAJOR if out.is_row_major else Layout.K_MAJOR)
    # With row-major scales the kernel does not wait for what writes x.
    return quantize_launch(key, x, out.values, out.scales, out.rows, out.k, pdl=not out.is_row_major)


def quantize_launch(
    key: KernelKey,
    x: Address,
    q: Address,
    scales: Address,
    tokens: int,
    k: int,
    *,
    slots: Address = 0,
    topk: int = 0,
    x_scales: Address = 0,
    pdl: bool = False,
) -> Launch:
    """Returns the launch that quantizes bfloat16 `[tokens, k]` at `x` to `q`, in the layout of the key.

    Args:
        slots: for `Layout.PERMUTED` the address of int32 `[tokens, topk]`, the rows that get each token; -1 for none.
        x_scales: for `permute_key` the address of float32 `[tokens, k / 128]`; `x` is then e4m3.
        pdl: it may start before the preceding kernel ends. Only `Layout.K_MAJOR` waits for that kernel; with another
            layout, that kernel must not access these tensors.
    """
    groups = k // GROUP
    few = tokens <= QUANTIZE_FEW_TOKENS and dict(key.defines)["LAYOUT"] == Layout.K_MAJOR
    tokens_per_warp = FEW_TOKENS_PER_WARP if few else TOKENS_PER_WARP
    return Launch(
        key,
        ceil_div(ceil_div(tokens, tokens_per_warp) * groups, key.threads // 32),
        key.arguments(
            x=x,
            q=q,
            scales=scales,
            slots=slots,
            tokens=tokens,
            groups=groups,
            topk=topk,
            tokens_per_warp=tokens_per_warp,
            x_scales=x_scales,
        ),
        pdl=pdl,
    )


def silu_mul_quant_launch(
    ue8m0: bool,
    activation: Activation,
    gate_up: Address,
    counts: Address,
    groups: int,
    max_m: int,
    out: Rows,
    multiprocessors: int,
) -> Launch:
    """Returns the launch that applies the activation to bfloat16 `[groups, max_m, 2I]` and quantizes the result.

    It processes the first `counts[g]` rows of each group.
    """
    k_blocks, key = out.k // GROUP, silu_mul_quant_key(ue8m0, activation)
    needed = ceil_div(ceil_div(max_m, ROWS_PER_WARP) * k_blocks, key.threads // 32)
    at_once = ceil_div(multiprocessors * BLOCKS_PER_MULTIPROCESSOR, groups)
    return Launch(
        key,
        (min(needed, at_once), groups),
        key.arguments(
            gate_up=gate_up,
            counts=counts,
            q=out.values,
            scales=out.scales,
            max_m=max_m,
            groups=k_blocks,
            activation=activation.numbers,
        ),
    )
