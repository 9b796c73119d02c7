"""The arithmetic of the ops in plain torch, for machines without a supported GPU and as the reference of the tests.

The functions take tensors in the layouts of the ops, and round at the same points as the kernels.
"""

import torch

from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.ops import mxfp4, workspace
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.operands import ExpertWeights, Quantized
from fp8moe_plugin.plan.sm90.constants import MQA_SPLIT_ROWS
from fp8moe_plugin.plan.spec import LayerSpec, layer_refusal

FP8_MAX = 448.0
SMALLEST_AMAX = 1e-10  # keeps the scale of an all-zero group finite


# ---- the layer -----------------------------------------------------------------------------------------------------


def refusal(spec: LayerSpec) -> str | None:
    """Returns the property of a layer that the functions below do not compute, or None."""
    return layer_refusal(spec)


def fused_moe(
    spec: LayerSpec,
    hidden_states: torch.Tensor,
    hidden_scale: torch.Tensor | None,
    weights: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Compute `ops.fused_moe` on checked arguments."""
    experts = len(weights.w2[0])
    ids = local_experts(topk_ids, experts - spec.shared_expert, expert_map)
    topk_weights = topk_weights * float(spec.routed_scale)
    if spec.shared_expert:
        ids = torch.nn.functional.pad(ids, (0, 1), value=experts - 1)
        if not spec.shared_gate:
            topk_weights = torch.nn.functional.pad(topk_weights, (0, 1), value=1.0)
    q, scales = quantize(hidden_states, spec.ue8m0) if hidden_scale is None else (hidden_states, hidden_scale)
    products = workspace.empty((*ids.shape, hidden_states.shape[1]), torch.bfloat16, out.device)
    for e in ids[ids >= 0].unique().tolist():
        token, choice = (ids == e).nonzero(as_tuple=True)
        rows = q.view(torch.uint8)[token].view(FP8), scales[token]
        products[token, choice] = expert(spec, rows, weights.of_expert(e))
    return combine(products, ids >= 0, topk_weights, out)


def batched_experts(
    spec: LayerSpec, x: Quantized, weights: ExpertWeights, counts: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute `ops.batched_experts` on checked arguments."""
    for e, count in enumerate(counts.clamp(0, x[0].shape[1]).tolist()):
        rows = x[0][e, :count], x[1][e, :count]
        out[e, :count] = expert(spec, rows, weights.of_expert(e))


def expert(spec: LayerSpec, rows: Quantized, weights: ExpertWeights) -> torch.Tensor:
    """Returns bfloat16 `w2 @ activated(gate, up)` with `gate, up = w13 @ row`, both plus bias, for each row."""
    w13, w2 = dequantize_expert(weights, spec.weights)
    b13, b2 = weights.biases or (0.0, 0.0)
    inner = silu_mul_quant(product(rows, w13) + b13, spec.ue8m0, spec.activation)
    return (product(inner, w2) + b2).bfloat16()


def local_experts(topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Returns the int64 local expert of each (token, expert) pair, -1 if it is not on this rank."""
    ids = topk_ids.long()
    limit = num_experts if expert_map is None else expert_map.numel()
    ids = torch.where((ids < 0) | (ids >= limit), -1, ids)
    if expert_map is not None:
        ids = torch.where(ids < 0, -1, expert_map.long()[ids.clamp(min=0)])
    return torch.where((ids < 0) | (ids >= num_experts), -1, ids)


def combine(products: torch.Tensor, here: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write to `out` the weighted sum over j of `products[t, j]` where `here[t, j]`, in float32 in the order of j."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for j in range(here.shape[1]):
        tokens = here[:, j].nonzero().flatten()
        total[tokens] += topk_weights[tokens, j, None].float() * products[tokens, j].float()
    return out.copy_(total)


# ---- quantization --------------------------------------------------------------------------------------------------


def quantize(x: torch.Tensor, ue8m0: bool = False) -> Quantized:
    """Compute `ops.per_token_group_quant_fp8` for any float dtype."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = group_scales(groups.abs().amax(-1), ue8m0)
    q = (groups / scales.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return q.view(x.shape), scales


def group_scales(amax: torch.Tensor, ue8m0: bool) -> torch.Tensor:
    """Returns the scale of each group from its largest magnitude."""
    # The divisor is a tensor: torch divides by a number by multiplying with its inverse, which rounds twice.
    scales = amax.clamp(min=SMALLEST_AMAX) / torch.full_like(amax, FP8_MAX)
    if not ue8m0:
        return scales
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def silu_mul_quant(gate_up: torch.Tensor, ue8m0: bool = False, activation: Activation = SILU) -> Quantized:
    """Compute `ops.silu_mul_quant_fp8` for dense rows: `[.., 2I]` to e4m3 `[.., I]` and scales `[.., I/128]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return quantize(activated(gate, up, activation), ue8m0)


def activated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns bfloat16; `silu(gate) * up` rounds sums, SiLU and product, a modified SwiGLU only its result."""
    if not activation.variant:
        return torch.nn.functional.silu(gate.bfloat16()) * up.bfloat16()
    gate_limit, activated_limit, up_limit, alpha, beta = activation.numbers
    gate = gate.float().clamp(max=gate_limit)
    inner = (gate * torch.sigmoid(alpha * gate)).clamp(max=activated_limit)
    return (inner * (up.float().clamp(-up_limit, up_limit) + beta)).bfloat16()


def write(out: Quantized, result: Quantized) -> None:
    """Copy quantized rows between any layouts."""
    out[0].view(torch.uint8).copy_(result[0].view(torch.uint8))
    out[1].copy_(result[1])


# ---- GEMMs ---------------------------------------------------------------------------------------------------------


def gemm(a: Quantized, b: Quantized, weights: WeightFormat = FP8_BLOCK) -> torch.Tensor:
    """Returns float32 `a @ b.T` of the dequantized operands.

    Args:
        weights: the format of `b`, which is in e4m3.
    """
    return product(a, dequantize_blocks(*b, weights))


def product(a: Quantized, b: torch.Tensor) -> torch.Tensor:
    """Returns float32 `a @ b.T` for the dequantized a, without the rounding of `torch.autocast`."""
    with torch.autocast(a[0].device.type, enabled=False):
        return dequantize_rows(*a) @ b.T


def k_grouped_gemm(a: Quantized, b: Quantized, ks: tuple[int, ...], c: torch.Tensor, d: torch.Tensor) -> None:
    """Compute `ops.k_grouped_fp8_gemm_nt_contiguous` on checked arguments."""
    (m, n), begin = d.shape[1:], 0
    for group, k in enumerate(ks):
        blocks = slice(begin // GROUP, (begin + k) // GROUP)
        x = a[0].flatten()[m * begin : m * (begin + k)].view(m, k), a[1][:, blocks]
        y = b[0].flatten()[n * begin : n * (begin + k)].view(n, k), b[1][:, blocks]
        with torch.autocast(d.device.type, enabled=False):
            d[group] = c[group] + dequantize_rows(*x) @ dequantize_rows(*y).T
        begin += k


def contiguous_gemm(a: Quantized, b: Quantized, out: torch.Tensor, m_indices: torch.Tensor) -> None:
    """Compute `ops.m_grouped_fp8_gemm_nt_contiguous` on checked arguments."""
    ids, lengths = m_indices.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0).tolist()
    for group, length, end in zip(ids.tolist(), lengths.tolist(), ends, strict=True):
        rows = slice(end - length, end)
        here = 0 <= group < b[0].shape[0]
        out[rows] = gemm((a[0][rows], a[1][rows]), (b[0][group], b[1][group])) if here else 0.0


def psum_gemm(alignment: int, a: Quantized, b: Quantized, out: torch.Tensor, ends: torch.Tensor) -> None:
    """Compute `ops.m_grouped_fp8_gemm_nt_psum` on checked arguments."""
    begin = 0
    for group, end in enumerate(ends.clamp(0, len(out)).tolist()):
        rows = slice(begin, end)
        out[rows] = gemm((a[0][rows], a[1][rows]), (b[0][group], b[1][group]))
        begin = -(-end // alignment) * alignment


def masked_gemm(a: Quantized, b: Quantized, out: torch.Tensor, masked_m: torch.Tensor) -> None:
    """Compute `ops.m_grouped_fp8_gemm_nt_masked` on checked arguments."""
    for group, count in enumerate(masked_m.clamp(0, a[0].shape[1]).tolist()):
        out[group, :count] = gemm((a[0][group, :count], a[1][group, :count]), (b[0][group], b[1][group]))


def dequantize_rows(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns float32 `[.., K]` from e4m3 `[.., K]` and scales `[.., ceil(K/128)]`."""
    return q.float() * scales.repeat_interleave(GROUP, -1)[..., : q.shape[-1]]


def dequantize_expert(expert: ExpertWeights, weights: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float32 w13 `[2I, H]` and w2 `[H, I]` of one expert."""
    if weights is PACKED_MXFP4:
        return mxfp4.dequantize(*expert.w13, gate_up=True), mxfp4.dequantize(*expert.w2, gate_up=False)
    return dequantize_blocks(*expert.w13, weights), dequantize_blocks(*expert.w2, weights)


def dequantize_blocks(w: torch.Tensor, scales: torch.Tensor, weights: WeightFormat = FP8_BLOCK) -> torch.Tensor:
    """Returns float32 `[.., N, K]` from e4m3 `[.., N, K]` and the scales of its blocks, which the format sizes."""
    n, k = w.shape[-2:]
    rows, columns = (min(side, size) for side, size in zip(weights.scales.block, (n, k), strict=True))
    wide = scales.repeat_interleave(rows, -2)[..., :n, :].repeat_interleave(columns, -1)[..., :k]
    return w.float() * wide


# ---- logits of an indexer ------------------------------------------------------------------------------------------


def mqa_logits(
    q: torch.Tensor,
    kv: Quantized,
    weights: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    logits: torch.Tensor,
    compressed: bool,
    clean: bool,
) -> None:
    """Compute `ops.fp8_mqa_logits` on checked arguments; `rows`: from `kv_ranges`."""
    scores = index_scores(q, kv, weights).to(logits.dtype)
    if clean:
        logits.fill_(float("-inf"))
    for i, (start, end) in enumerate(zip(*(bound.tolist() for bound in rows), strict=True)):
        first = 0 if compressed else start
        logits[i, first : first + end - start] = scores[i, start:end]


def paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """Compute `ops.fp8_paged_mqa_logits` on checked arguments."""
    (_, next_n, _, dim), page = q.shape, kv_cache.shape[1]
    for i, length in enumerate(lengths.tolist()):
        table = block_table[i, : -(-length // page)].long()
        data = kv_cache[table].flatten(1)
        values = data[:, : page * dim].contiguous().view(FP8).view(-1, dim)[:length]
        scales = data[:, page * dim :].contiguous().view(torch.float32).flatten()[:length]
        tokens = slice(i * next_n, (i + 1) * next_n)
        logits[tokens, :length] = index_scores(q[i], (values, scales), weights[tokens]).to(logits.dtype)


def index_scores(q: torch.Tensor, kv: Quantized, weights: torch.Tensor) -> torch.Tensor:
    """Returns float32 `[M, N]` for q `[M, H, D]`: the sum of `weights * relu(q . k)`, times the scale of k."""
    k, total = kv[0].float(), torch.zeros(q.shape[0], kv[0].shape[0], device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        for head in range(q.shape[1]):
            total += (q[:, head].float() @ k.T).relu() * weights[:, head, None]
    return total * kv[1]


def kv_ranges(starts: torch.Tensor, ends: torch.Tensor, n: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the KV rows `[start, end)` of each token, clamped like in the kernels; an empty range has start = end."""
    starts = starts.clamp(0, n)
    return starts, ends.clamp(max=n).minimum(starts + longest).maximum(starts)


def paged_mqa_schedule(context_lens: torch.Tensor, runs: int) -> torch.Tensor:
    """Compute `ops.get_paged_mqa_logits_metadata` on checked arguments."""
    splits = (context_lens[:, -1].clamp(min=0) + MQA_SPLIT_ROWS - 1) // MQA_SPLIT_ROWS
    ends = splits.long().cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    run = torch.arange(runs + 1, device=context_lens.device)
    first = run * (total // runs) + (run - (runs - total % runs)).clamp(min=0)
    request = torch.searchsorted(ends, first, right=True)
    before = torch.cat([ends.new_zeros(1), ends])[request]
    return torch.stack([request, first - before], 1).int()
