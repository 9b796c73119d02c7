"""The public ops: torch tensors in, torch tensors out, from whole layers down to single kernels.

| level | ops |
|---|---|
| layer | `routed_moe`, `fused_moe`, `fp8_linear` |
| layer with its all-to-all | `push_moe`, `open_window` |
| experts of rows that an all-to-all delivers | `batched_experts` |
| GEMM | `fp8_gemm_nt`, `m_grouped_fp8_gemm_nt_*`, `k_grouped_fp8_gemm_nt_contiguous`, `fp8_einsum` |
| pieces of a layer | `router_gemm`, `choose_experts`, `per_token_group_quant_fp8`, `silu_mul_quant_fp8` |
| indexer | `fp8_mqa_logits`, `fp8_paged_mqa_logits`, `get_paged_mqa_logits_metadata` |
"""

from fp8moe_plugin.ops.einsum import fp8_einsum
from fp8moe_plugin.ops.gemm import fp8_gemm_nt
from fp8moe_plugin.ops.grouped_gemm import (
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_psum,
)
from fp8moe_plugin.ops.k_grouped_gemm import k_grouped_fp8_gemm_nt_contiguous
from fp8moe_plugin.ops.linear import fp8_linear
from fp8moe_plugin.ops.moe import batched_experts, fused_moe
from fp8moe_plugin.ops.mqa_logits import fp8_fp4_mqa_logits, fp8_mqa_logits
from fp8moe_plugin.ops.paged_mqa_logits import fp8_fp4_paged_mqa_logits, fp8_paged_mqa_logits
from fp8moe_plugin.ops.paged_mqa_metadata import get_paged_mqa_logits_metadata
from fp8moe_plugin.ops.push import push_moe
from fp8moe_plugin.ops.quantize import per_token_group_quant_fp8
from fp8moe_plugin.ops.routed_moe import choose_experts, routed_moe
from fp8moe_plugin.ops.router_gemm import router_gemm
from fp8moe_plugin.ops.silu_mul_quant import silu_mul_quant_fp8
from fp8moe_plugin.ops.window import open_window

__all__ = [
    "batched_experts",
    "choose_experts",
    "fp8_einsum",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_gemm_nt",
    "fp8_linear",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "fused_moe",
    "get_paged_mqa_logits_metadata",
    "k_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_psum",
    "open_window",
    "per_token_group_quant_fp8",
    "push_moe",
    "routed_moe",
    "router_gemm",
    "silu_mul_quant_fp8",
]
