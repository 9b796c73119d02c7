"""Each wrong call differs from a valid one in one respect, which the error names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.activation import Activation
from tests import helpers as h
from tests import indexer
from tests.k_grouped import gradients

EXPERTS, ROWS, HIDDEN, INTERMEDIATE = 4, 6, 256, 128
Call = dict[str, Any]


def right_calls(device: torch.device) -> dict[str, Call]:
    gen = h.seeded(0, device)
    x, layer = h.random_tokens(gen, ROWS, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)._asdict()
    topk_weights, topk_ids = h.random_routing(gen, "distinct", ROWS, 2, EXPERTS)
    batch, counts = h.random_quantized(gen, EXPERTS, ROWS, HIDDEN), torch.full_like(topk_ids[:EXPERTS, 0], 2)
    layer |= h.random_biases(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    weight, weight_scale = h.random_weights(gen, 136, HIDDEN)
    experts = h.random_weights(gen, EXPERTS, 136, HIDDEN)

    def out(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    return {
        "per_token_group_quant_fp8": {"x": x, "group_size": 128},
        "silu_mul_quant_fp8": {
            "gate_up": h.random_tokens(gen, EXPERTS, ROWS, 256),
            "counts": counts,
            "activation": "silu",
        },
        "fp8_linear": {"x": x, "weight": weight, "weight_scale": weight_scale, "bias": out(136)},
        **right_gemms(gen, experts, batch, counts),
        "fused_moe": {
            "hidden_states": x,
            "hidden_scale": None,
            **layer,
            "topk_weights": topk_weights,
            "topk_ids": topk_ids,
            "expert_map": torch.arange(EXPERTS, dtype=torch.int32, device=device),
            "activation": "silu",
            "shared_expert": False,
            "routed_scale": 1.0,
            "out": out(ROWS, HIDDEN),
        },
        **right_choices(x, layer, out(ROWS, HIDDEN)),
        "batched_experts": {
            "hidden_states": batch[0],
            "hidden_scale": batch[1],
            **layer,
            "expert_num_tokens": counts,
            "expected_m": 2,
            "out": out(EXPERTS, ROWS, HIDDEN),
        },
        "k_grouped_fp8_gemm_nt_contiguous": right_gradients(gen),
    }


def right_choices(x: torch.Tensor, layer: Call, out: torch.Tensor) -> dict[str, Call]:
    logits = torch.linspace(-1, 1, ROWS * EXPERTS, device=x.device).view(ROWS, EXPERTS)
    choice = {"logits": logits, "topk": 2, "padding": torch.arange(ROWS, device=x.device) == 1}
    routed = {"hidden_states": x, **layer, **choice, "renormalize": True, "out": out}
    gate = torch.zeros(EXPERTS, x.shape[1], dtype=torch.bfloat16, device=x.device)
    shared = {"hidden_states": x, "shared_gate": gate[:1]}
    return {"choose_experts": choice | shared, "routed_moe": routed, "router_gemm": {"x": x, "weight": gate}}


def right_gemms(
    gen: torch.Generator, experts: h.Quantized, batch: h.Quantized, counts: torch.Tensor
) -> dict[str, Call]:
    def out(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=gen.device)

    return {
        "fp8_einsum": {
            "expr": "bhr,hdr->bhd",
            "a": h.random_quantized(gen, ROWS, EXPERTS, HIDDEN),
            "b": experts,
            "d": out(ROWS, EXPERTS, 136),
        },
        "fp8_gemm_nt": {
            "a": h.random_quantized(gen, ROWS, HIDDEN),
            "b": h.random_weights(gen, 136, HIDDEN),
            "out": out(ROWS, 136),
            "c": out(ROWS, 136),
        },
        "m_grouped_fp8_gemm_nt_contiguous": {
            "a": h.random_quantized(gen, ROWS, HIDDEN),
            "b": experts,
            "out": out(ROWS, 136),
            "m_indices": torch.zeros(ROWS, dtype=torch.int32, device=gen.device),
        },
        "m_grouped_fp8_gemm_nt_psum": {
            "a": h.random_quantized(gen, 3 * ROWS, HIDDEN),
            "b": experts,
            "out": out(3 * ROWS, 136),
            "ends": torch.tensor([2, 10, 10, 17], dtype=torch.int32, device=gen.device),
            "expected_m": 4,
            "alignment": 8,
        },
        "m_grouped_fp8_gemm_nt_masked": {
            "a": batch,
            "b": experts,
            "out": out(EXPERTS, ROWS, 136),
            "masked_m": counts,
            "expected_m": 2,
        },
    }


def right_gradients(gen: torch.Generator) -> Call:
    call = gradients(gen, ROWS, 48, [128, 0, 256])
    return {
        "a": call.a,
        "b": call.b,
        "d": torch.zeros_like(call.c),
        "ks_cpu": call.ks,
        "grouped_layout": torch.tensor(call.ks, dtype=torch.int32, device=gen.device),
        "c": call.c,
        "recipe": [1, 1, 128],
        "use_psum_layout": False,
    }


def first(change: Callable[[torch.Tensor], Any]) -> Callable[[h.Quantized], Any]:
    return lambda pair: (change(pair[0]), pair[1])


def second(change: Callable[[torch.Tensor], Any]) -> Callable[[h.Quantized], Any]:
    return lambda pair: (pair[0], change(pair[1]))


def with_k(k: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.new_zeros((*t.shape[:-1], k))


def strided(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


def misaligned(t: torch.Tensor) -> torch.Tensor:
    return t.new_zeros(t.numel() + 1)[1:].view(t.shape)


def narrow(t: torch.Tensor) -> torch.Tensor:
    return t[..., :-1].contiguous()


def short(t: torch.Tensor) -> torch.Tensor:
    return t[:-1].contiguous()


def meta(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def jagged(t: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([t[:1], t[1:]], layout=torch.jagged)


QUANT, SILU, LINEAR, GEMM = "per_token_group_quant_fp8", "silu_mul_quant_fp8", "fp8_linear", "fp8_gemm_nt"
EINSUM = "fp8_einsum"
CONTIGUOUS, MASKED = "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"
PSUM = "m_grouped_fp8_gemm_nt_psum"
MOE, BATCHED, GRADIENTS = "fused_moe", "batched_experts", "k_grouped_fp8_gemm_nt_contiguous"
CHOOSE, ROUTED, ROUTER = "choose_experts", "routed_moe", "router_gemm"

# op, argument, what is done to it, words of the message
WRONG_CALLS = {
    "quantize-float32": (QUANT, "x", torch.Tensor.float, "x has dtype torch.float32, needs torch.bfloat16"),
    "quantize-a-list": (QUANT, "x", torch.Tensor.tolist, "x is a list, not a torch.Tensor"),
    "quantize-a-scalar": (QUANT, "x", lambda x: x[0, 0].clone(), "x has no dimension"),
    "quantize-odd-k": (QUANT, "x", with_k(200), "x's last dimension is 200, needs a positive multiple of 128"),
    "quantize-no-k": (QUANT, "x", with_k(0), "x's last dimension is 0, needs a positive multiple of 128"),
    "quantize-strided": (QUANT, "x", strided, "x has strides (512, 2), needs a contiguous layout"),
    "quantize-misaligned": (QUANT, "x", misaligned, "x starts at an address that is not a multiple of 16"),
    "quantize-meta": (QUANT, "x", meta, "x holds no data"),
    "quantize-group-64": (QUANT, "group_size", lambda _: 64, "group_size is 64, needs 128"),
    "silu-two-dimensions": (SILU, "gate_up", lambda t: t[0], "gate_up has shape [6, 256], needs [any, any, any]"),
    "silu-odd-width": (
        SILU,
        "gate_up",
        with_k(384),
        "gate_up's last dimension is 384, needs a positive multiple of 256",
    ),
    "silu-too-many-groups": (
        SILU,
        "gate_up",
        lambda t: t.new_empty(65536, 0, 256),
        "gate_up has 65536 groups, the kernel takes up to 65535. Split the call.",
    ),
    "silu-counts-int64": (SILU, "counts", torch.Tensor.long, "counts has dtype torch.int64, needs torch.int32"),
    "silu-counts-elsewhere": (SILU, "counts", meta, "counts is on meta, the other tensors on"),
    "linear-float16": (LINEAR, "x", torch.Tensor.half, "x has dtype torch.float16"),
    "linear-nested": (LINEAR, "x", jagged, "x has no strided storage"),
    "linear-no-tensor": (LINEAR, "x", lambda _: None, "x is a NoneType, not a torch.Tensor"),
    "linear-strided": (LINEAR, "x", strided, "x has strides (512, 2), needs a contiguous layout"),
    "linear-other-k": (LINEAR, "x", with_k(384), "weight has shape [136, 256], needs [any, 384]"),
    "linear-weight-bf16": (LINEAR, "weight", torch.Tensor.bfloat16, "weight has dtype torch.bfloat16"),
    "linear-no-weight": (LINEAR, "weight", lambda _: None, "weight is a NoneType"),
    "linear-scale-shape": (LINEAR, "weight_scale", short, "weight's scales has shape [1, 2], needs [2, 2]"),
    "linear-bias-shape": (LINEAR, "bias", short, "bias has shape [135], needs [136]"),
    "gemm-a-not-a-pair": (GEMM, "a", lambda a: a[0], "a is a Tensor, not a pair"),
    "gemm-a-of-three": (GEMM, "a", lambda a: (*a, a), "a has 3 parts, needs (values, scales)"),
    "gemm-a-bf16": (GEMM, "a", first(torch.Tensor.bfloat16), "a has dtype torch.bfloat16, needs torch.float8_e4m3fn"),
    "gemm-a-three-dimensions": (GEMM, "a", first(lambda q: q[None]), "a has shape [1, 6, 256], needs [any, any]"),
    "gemm-odd-k": (GEMM, "a", first(with_k(200)), "a's K is 200, needs a positive multiple of 16"),
    "gemm-a-mn-major": (GEMM, "a", first(h.column_major), "a has strides (1, 6), needs consecutive elements along K"),
    "gemm-b-mn-major": (GEMM, "b", first(h.column_major), "b has strides (1, 136), needs consecutive elements along K"),
    "gemm-a-misaligned": (GEMM, "a", first(misaligned), "a starts at an address that is not a multiple of 16 bytes"),
    "gemm-a-scales-float16": (GEMM, "a", second(torch.Tensor.half), "a's scales has dtype torch.float16"),
    "gemm-a-scales-shape": (GEMM, "a", second(narrow), "a's scales has shape [6, 1], needs [6, 2]"),
    "gemm-a-scales-elsewhere": (GEMM, "a", second(meta), "a's scales is on meta"),
    "gemm-b-not-a-pair": (GEMM, "b", lambda b: b[0], "b is a Tensor, not a pair"),
    "gemm-b-other-k": (GEMM, "b", first(with_k(384)), "b has shape [136, 384], needs [any, 256]"),
    "gemm-odd-n": (GEMM, "b", first(lambda q: q[:132]), "b's N is 132, needs a positive multiple of 8"),
    "gemm-b-scales-per-channel": (GEMM, "b", second(lambda s: s[:, :1]), "b's scales has shape [2, 1], needs [2, 2]"),
    "gemm-b-scales-of-another-k": (GEMM, "b", second(with_k(3)), "b's scales has shape [2, 3], needs [2, 2]"),
    "gemm-b-elsewhere": (GEMM, "b", first(meta), "b is on meta, the other tensors on"),
    "gemm-out-float16": (GEMM, "out", torch.Tensor.half, "out has dtype torch.float16, needs torch.bfloat16 or"),
    "gemm-out-shape": (GEMM, "out", lambda out: out.T.contiguous(), "out has shape [136, 6], needs [6, 136]"),
    "gemm-out-strided": (GEMM, "out", strided, "out has strides (272, 2)"),
    "gemm-out-misaligned": (GEMM, "out", misaligned, "out starts at an address that is not a multiple of 16"),
    "gemm-float32-out-misaligned": (
        GEMM,
        "out",
        lambda out: misaligned(out.float()),
        "out starts at an address that is not a multiple of 16",
    ),
    "gemm-c-of-another-dtype": (GEMM, "c", torch.Tensor.float, "c has dtype torch.float32, needs torch.bfloat16"),
    "contiguous-out-float32": (CONTIGUOUS, "out", torch.Tensor.float, "out has dtype torch.float32"),
    "contiguous-indices-int64": (CONTIGUOUS, "m_indices", torch.Tensor.long, "m_indices has dtype torch.int64"),
    "contiguous-indices-short": (CONTIGUOUS, "m_indices", short, "m_indices has shape [5], needs [6]"),
    "contiguous-indices-elsewhere": (CONTIGUOUS, "m_indices", meta, "m_indices is on meta"),
    "contiguous-one-weight": (CONTIGUOUS, "b", lambda b: (b[0][0], b[1][0]), "b has shape [136, 256], needs [any, any"),
    "contiguous-no-k": (CONTIGUOUS, "a", first(with_k(0)), "a's K is 0, needs a positive multiple of 16"),
    "contiguous-out-mn-major": (CONTIGUOUS, "out", h.column_major, "out has strides (1, 6), needs rows of consecutive"),
    "psum-no-group": (PSUM, "b", first(lambda q: q[:0]), "b has shape [0, 136, 256], needs at least one expert"),
    "psum-ends-int64": (PSUM, "ends", torch.Tensor.long, "ends has dtype torch.int64, needs torch.int32"),
    "psum-ends-short": (PSUM, "ends", short, "ends has shape [3], needs [4]"),
    "psum-ends-elsewhere": (PSUM, "ends", meta, "ends is on meta, the other tensors on"),
    "psum-ends-strided": (PSUM, "ends", strided, "ends has strides (2,), needs a contiguous layout"),
    "psum-out-float32": (PSUM, "out", torch.Tensor.float, "out has dtype torch.float32, needs torch.bfloat16"),
    "psum-out-short": (PSUM, "out", short, "out has shape [17, 136], needs [18, 136]"),
    "psum-expected-m-float": (PSUM, "expected_m", float, "expected_m is a float, not an int"),
    "psum-alignment-tensor": (PSUM, "alignment", torch.tensor, "alignment is a Tensor, not an int"),
    "psum-alignment-0": (PSUM, "alignment", lambda _: 0, "alignment is 0, needs 1 or more"),
    "einsum-other-groups": (EINSUM, "b", lambda b: (b[0][:3], b[1][:3]), "b has shape [3, 136, 256], needs [4, any"),
    "einsum-other-equation": (EINSUM, "expr", lambda _: "bhd,hdr->bhr", "expr is 'bhd,hdr->bhr', needs"),
    "masked-other-groups": (MASKED, "b", lambda b: (b[0][:3], b[1][:3]), "b has shape [3, 136, 256], needs [4, any"),
    "masked-counts-float": (MASKED, "masked_m", torch.Tensor.float, "masked_m has dtype torch.float32"),
    "masked-counts-short": (MASKED, "masked_m", short, "masked_m has shape [3], needs [4]"),
    "masked-counts-elsewhere": (MASKED, "masked_m", meta, "masked_m is on meta"),
    "masked-counts-a-list": (MASKED, "masked_m", torch.Tensor.tolist, "masked_m is a list"),
    "masked-expected-m-tensor": (MASKED, "expected_m", torch.tensor, "expected_m is a Tensor, not an int"),
    "moe-float16": (MOE, "hidden_states", torch.Tensor.half, "hidden_states has dtype torch.float16"),
    "moe-codes-without-scales": (
        MOE,
        "hidden_states",
        lambda x: x.to(h.FP8),
        "hidden_scale is None, but hidden_states",
    ),
    "moe-scales-without-codes": (
        MOE,
        "hidden_scale",
        lambda _: torch.ones(ROWS, HIDDEN // 128),
        "hidden_scale is not None, but hidden_states is in bfloat16",
    ),
    "moe-three-dimensions": (MOE, "hidden_states", lambda x: x[None], "hidden_states has shape [1, 6, 256]"),
    "moe-other-hidden": (MOE, "hidden_states", with_k(384), "w13 has shape [4, 256, 256], needs [any, any, 384]"),
    "moe-w13-odd-intermediate": (MOE, "w13", lambda w: w[:, :192].contiguous(), "w13's second dimension is 192"),
    "moe-w13-transposed": (MOE, "w13", lambda w: w.mT, "w13 has strides"),
    "moe-bias-bf16": (MOE, "w13_bias", torch.Tensor.bfloat16, "w13_bias has dtype torch.bfloat16, needs torch.float32"),
    "moe-bias-shape": (MOE, "w2_bias", narrow, "w2_bias has shape [4, 255], needs [4, 256]"),
    "moe-one-bias": (MOE, "w2_bias", lambda _: None, "One of w13_bias and w2_bias is None. Pass both"),
    "batched-bias-elsewhere": (BATCHED, "w2_bias", meta, "w2_bias is on meta, the other tensors on"),
    "moe-w13-scale-e8m0": (MOE, "w13_scale", torch.Tensor.byte, "w13's scales has dtype torch.uint8"),
    "moe-w2-other-experts": (MOE, "w2", short, "w2's scales has shape [4, 2, 1], needs [3, 2, 1]"),
    "moe-w2-scale-per-tensor": (MOE, "w2_scale", lambda s: s[:, 0, 0], "w2's scales has shape [4]"),
    "moe-weights-of-another-shape": (MOE, "topk_weights", narrow, "topk_weights has shape [6, 1], needs [6, 2]"),
    "moe-weights-bf16": (MOE, "topk_weights", torch.Tensor.bfloat16, "topk_weights has dtype torch.bfloat16"),
    "moe-ids-int16": (MOE, "topk_ids", torch.Tensor.short, "topk_ids has dtype torch.int16, needs torch.int32 or"),
    "moe-ids-short": (MOE, "topk_ids", short, "topk_ids has shape [5, 2], needs [6, any]"),
    "moe-no-ids": (MOE, "topk_ids", lambda _: None, "topk_ids is a NoneType"),
    "moe-ids-elsewhere": (MOE, "topk_ids", meta, "topk_ids is on meta"),
    "moe-map-int64": (MOE, "expert_map", torch.Tensor.long, "expert_map has dtype torch.int64"),
    "moe-map-elsewhere": (MOE, "expert_map", meta, "expert_map is on meta"),
    "moe-map-empty": (
        MOE,
        "expert_map",
        lambda t: t[:0],
        "expert_map is empty, needs one entry for each global expert",
    ),
    "moe-weights-sparse": (MOE, "topk_weights", torch.Tensor.to_sparse, "topk_weights has no strided storage"),
    "moe-shared-and-map": (MOE, "shared_expert", lambda _: True, "shared_expert cannot be combined with expert_map"),
    "moe-scale-zero": (MOE, "routed_scale", lambda _: 0.0, "routed_scale is 0.0, needs a positive finite number"),
    "moe-scale-tiny": (MOE, "routed_scale", lambda _: 1e-46, "routed_scale is 1e-46, needs a positive finite number"),
    "moe-scale-huge": (MOE, "routed_scale", lambda _: 10**5000, "routed_scale is of type int, needs a positive finite"),
    "moe-scale-bool": (MOE, "routed_scale", lambda _: True, "routed_scale is a bool, not a float"),
    "moe-scale-nan": (MOE, "routed_scale", lambda _: float("nan"), "routed_scale is nan"),
    "silu-gelu": (SILU, "activation", lambda _: "gelu", "activation is 'gelu', needs 'silu'"),
    "silu-limit": (SILU, "activation", lambda _: Activation(limit=0.0), "whose limit is no positive float32 number"),
    "silu-limit-tiny": (SILU, "activation", lambda _: Activation(limit=1e-46), "whose limit is no positive float32"),
    "moe-gelu": (MOE, "activation", lambda _: "gelu", "activation is 'gelu', needs 'silu'"),
    "moe-out-float32": (MOE, "out", torch.Tensor.float, "out has dtype torch.float32"),
    "moe-out-shape": (MOE, "out", short, "out has shape [5, 256], needs [6, 256]"),
    "choose-float16": (CHOOSE, "logits", torch.Tensor.half, "logits has dtype torch.float16, needs torch.float32 or"),
    "choose-one-dimension": (CHOOSE, "logits", lambda t: t[0], "logits has shape [4], needs [any, any]"),
    "choose-strided": (CHOOSE, "logits", strided, "logits has strides (8, 2), needs a contiguous layout"),
    "choose-misaligned": (CHOOSE, "logits", lambda t: misaligned(t.bfloat16()), "logits starts at an address that is"),
    "choose-padding-short": (CHOOSE, "padding", short, "padding has shape [5], needs [6]"),
    "choose-padding-int": (CHOOSE, "padding", torch.Tensor.int, "padding has dtype torch.int32, needs torch.bool"),
    "choose-padding-elsewhere": (CHOOSE, "padding", meta, "padding is on meta, the other tensors on"),
    "choose-no-tokens": (CHOOSE, "hidden_states", lambda _: None, "hidden_states is None, but shared_gate is not"),
    "choose-tokens-short": (CHOOSE, "hidden_states", short, "hidden_states has shape [5, 256], needs [6, any]"),
    "choose-tokens-odd": (
        CHOOSE,
        "hidden_states",
        with_k(12),
        "hidden_states' H is 12, needs a positive multiple of 8",
    ),
    "choose-gate-float32": (CHOOSE, "shared_gate", torch.Tensor.float, "shared_gate has dtype torch.float32"),
    "choose-gate-of-two": (CHOOSE, "shared_gate", lambda t: t.repeat(2, 1), "shared_gate has shape [2, 256], needs [1"),
    "choose-gate-elsewhere": (CHOOSE, "shared_gate", meta, "shared_gate is on meta, the other tensors on"),
    "choose-none": (CHOOSE, "topk", lambda _: 0, "topk is 0, needs 1 to 4"),
    "choose-five-of-four": (CHOOSE, "topk", lambda _: 5, "topk is 5, needs 1 to 4"),
    "choose-topk-float": (CHOOSE, "topk", float, "topk is a float, not an int"),
    "router-float32": (ROUTER, "x", torch.Tensor.float, "x has dtype torch.float32, needs torch.bfloat16"),
    "router-odd-k": (ROUTER, "x", with_k(200), "x's last dimension is 200, needs a positive multiple of 32"),
    "router-one-token": (ROUTER, "x", lambda t: t[0], "x has shape"),
    "router-too-many-tokens": (ROUTER, "x", lambda t: t.new_empty(1_048_561, 32), "x has 1048561 tokens, the kernel"),
    "router-strided": (ROUTER, "x", strided, "x has strides"),
    "router-misaligned": (ROUTER, "weight", misaligned, "weight starts at an address that is"),
    "router-other-k": (ROUTER, "weight", with_k(64), "weight has shape"),
    "router-elsewhere": (ROUTER, "weight", meta, "weight is on meta, the other tensors on"),
    "router-gradient": (ROUTER, "weight", torch.Tensor.requires_grad_, "weight requires a gradient"),
    "choose-too-many-for-lanes": (CHOOSE, "logits", lambda t: t.new_zeros(6, 513), "logits are of 513 experts, the"),
    "routed-float16": (ROUTED, "hidden_states", torch.Tensor.half, "hidden_states has dtype torch.float16"),
    "routed-logits-short": (ROUTED, "logits", short, "logits has shape [5, 4], needs [6, 4]"),
    "routed-logits-narrow": (ROUTED, "logits", narrow, "logits has shape [6, 3], needs [6, 4]"),
    "routed-logits-elsewhere": (ROUTED, "logits", meta, "logits is on meta, the other tensors on"),
    "routed-padding-short": (ROUTED, "padding", short, "padding has shape [5], needs [6]"),
    "routed-tokens-short": (ROUTED, "hidden_states", short, "out has shape [6, 256], needs [5, 256]"),
    "routed-other-experts": (ROUTED, "w13", short, "w13's scales has shape [4, 2, 2], needs [3, 2, 2]"),
    "routed-five-of-four": (ROUTED, "topk", lambda _: 5, "topk is 5, needs 1 to 4"),
    "routed-renormalize-two": (ROUTED, "renormalize", lambda _: 2, "renormalize is 2, needs True or False"),
    "routed-out-shape": (ROUTED, "out", short, "out has shape [5, 256], needs [6, 256]"),
    "batched-bf16": (BATCHED, "hidden_states", torch.Tensor.bfloat16, "hidden_states has dtype torch.bfloat16"),
    "batched-scale-shape": (
        BATCHED,
        "hidden_scale",
        narrow,
        "hidden_states's scales has shape [4, 6, 1], needs [4, 6, 2]",
    ),
    "batched-counts-int64": (
        BATCHED,
        "expert_num_tokens",
        torch.Tensor.long,
        "expert_num_tokens has dtype torch.int64",
    ),
    "batched-counts-elsewhere": (BATCHED, "expert_num_tokens", meta, "expert_num_tokens is on meta"),
    "batched-expected-m-none": (BATCHED, "expected_m", lambda _: None, "expected_m is a NoneType, not an int"),
    "batched-expected-m-huge": (BATCHED, "expected_m", lambda _: 2**40, "expected_m does not fit 32 bits"),
    "batched-out-shape": (BATCHED, "out", short, "out has shape [3, 6, 256], needs [4, 6, 256]"),
    "gradients-a-not-a-pair": (GRADIENTS, "a", lambda a: a[0], "a is a Tensor, not a pair"),
    "gradients-a-bf16": (GRADIENTS, "a", first(torch.Tensor.bfloat16), "a has dtype torch.bfloat16"),
    "gradients-a-of-other-rows": (GRADIENTS, "a", first(short), "a has 2303 elements, needs 6 x 384"),
    "gradients-a-strided": (GRADIENTS, "a", first(strided), "a has strides (2,), needs a contiguous layout"),
    "gradients-a-scales-of-weights": (GRADIENTS, "a", second(short), "a's scales has shape [5, 3], needs [6, any]"),
    "gradients-a-scales-of-other-k": (GRADIENTS, "a", second(narrow), "a's scales has shape [6, 2], needs [6, 3]"),
    "gradients-b-scales-float16": (GRADIENTS, "b", second(torch.Tensor.half), "b's scales has dtype torch.float16"),
    "gradients-b-elsewhere": (GRADIENTS, "b", first(meta), "b is on meta, the other tensors on"),
    "gradients-b-of-other-k": (GRADIENTS, "b", first(with_k(128)), "b has 128 elements, needs 48 x 384"),
    "gradients-d-bf16": (GRADIENTS, "d", torch.Tensor.bfloat16, "d has dtype torch.bfloat16, needs torch.float32"),
    "gradients-d-of-one-group": (GRADIENTS, "d", lambda d: d[0], "d has shape [6, 48], needs [any, any, any]"),
    "gradients-d-odd-n": (GRADIENTS, "d", narrow, "d's N is 47, needs a positive multiple of 16"),
    "gradients-d-strided": (GRADIENTS, "d", strided, "d has strides (576, 96, 2)"),
    "gradients-d-misaligned": (GRADIENTS, "d", misaligned, "d starts at an address that is not a multiple of 16"),
    "gradients-no-ks": (GRADIENTS, "ks_cpu", lambda _: None, "ks_cpu is a NoneType, not a list"),
    "gradients-ks-on-device": (GRADIENTS, "ks_cpu", torch.tensor, "ks_cpu is a Tensor, not a list"),
    "gradients-ks-of-fewer-groups": (GRADIENTS, "ks_cpu", lambda ks: ks[:2], "ks_cpu has 2 groups, d 3"),
    "gradients-odd-k": (GRADIENTS, "ks_cpu", lambda _: [100, 0, 284], "ks_cpu[0] is 100, needs a positive multiple of"),
    "gradients-negative-k": (GRADIENTS, "ks_cpu", lambda _: [512, 0, -128], "ks_cpu[2] is -128, needs a positive"),
    "gradients-float-k": (GRADIENTS, "ks_cpu", lambda _: [128.0, 0, 256], "ks_cpu[0] is a float, not an int"),
    "gradients-layout-int64": (GRADIENTS, "grouped_layout", torch.Tensor.long, "grouped_layout has dtype torch.int64"),
    "gradients-layout-short": (GRADIENTS, "grouped_layout", short, "grouped_layout has shape [2], needs [3]"),
    "gradients-no-c": (GRADIENTS, "c", lambda _: None, "c is a NoneType, not a torch.Tensor"),
    "gradients-c-bf16": (GRADIENTS, "c", torch.Tensor.bfloat16, "c has dtype torch.bfloat16, needs torch.float32"),
    "gradients-c-of-one-group": (GRADIENTS, "c", lambda c: c[:1], "c has shape [1, 6, 48], needs [3, 6, 48]"),
    "gradients-recipe-of-weights": (
        GRADIENTS,
        "recipe",
        lambda _: (1, 128, 128),
        "recipe is (1, 128, 128), needs (1, 1",
    ),
    "gradients-recipe-a-number": (GRADIENTS, "recipe", lambda _: 1, "recipe is 1, needs 3 ints"),
    "gradients-psum": (GRADIENTS, "use_psum_layout", lambda _: True, "use_psum_layout is set, which DeepGEMM"),
}

# the same for values that only FP8MOE_DEBUG=1 checks
WRONG_VALUES = {
    "moe-id-too-large": (MOE, "topk_ids", lambda t: t.fill_(EXPERTS), "topk_ids holds 4, needs -1 to 3"),
    "moe-id-below-none": (MOE, "topk_ids", lambda t: t.fill_(-2), "topk_ids holds -2, needs -1 to 3"),
    "contiguous-id-too-large": (CONTIGUOUS, "m_indices", lambda t: t.fill_(7), "m_indices holds 7, needs -1 to 3"),
    "psum-end-too-large": (PSUM, "ends", lambda t: t.add_(2), "ends holds 19, needs 0 to 18"),
    "psum-ends-descend": (
        PSUM,
        "ends",
        lambda t: t.copy_(t.flip(0)),
        "ends descends from 17 to 10 at 1",
    ),
    "masked-count-too-large": (MASKED, "masked_m", lambda t: t.fill_(9), "masked_m holds 9, needs 0 to 6"),
    "batched-count-negative": (
        BATCHED,
        "expert_num_tokens",
        lambda t: t.fill_(-1),
        "expert_num_tokens holds -1, needs 0",
    ),
    "gradients-other-ks": (
        GRADIENTS,
        "grouped_layout",
        lambda t: t.fill_(128),
        "grouped_layout holds [128, 128, 128], ks_cpu [128, 0, 256]",
    ),
}

OPS = sorted({case[0] for case in WRONG_CALLS.values()})


@pytest.fixture
def debug():
    with h.environment("FP8MOE_DEBUG", "1"):
        yield


def run(op: str, call: Call) -> None:
    getattr(ops, op)(**call)


def assert_refused(device: torch.device, op: str, argument: str, change: Callable[[Any], Any], words: str) -> None:
    call = right_calls(device)[op]
    call[argument] = change(call[argument])
    with pytest.raises(InvalidInputError) as caught:
        run(op, call)
    assert words in str(caught.value)


def test_every_public_op_is_called(device):
    """tests/ops/test_mqa_logits.py calls those of an indexer, tests/ops/test_push.py those of a group of ranks."""
    of_ranks = {"open_window", "push_moe"}
    assert sorted(right_calls(device)) == OPS == sorted(set(ops.__all__) - indexer.OPS - of_ranks)


@pytest.mark.parametrize("op", OPS)
def test_the_unchanged_call_is_taken(device, op, debug):
    run(op, right_calls(device)[op])


@pytest.mark.parametrize("case", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_says_what_is_wrong(device, case):
    assert_refused(device, *case)


@pytest.mark.parametrize("case", [case for case in WRONG_CALLS.values() if case[0] == MOE], ids=lambda case: case[3])
def test_a_wrong_call_is_refused_behind_a_right_one(device, case):
    for _ in range(2):
        run(MOE, right_calls(device)[MOE])
        assert_refused(device, *case)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.half(), "hidden_scale has dtype torch.float16, needs torch.float32"),
        (narrow, "hidden_scale has shape [6, 1], needs [6, 2]"),
        (h.column_major, "hidden_scale has strides (1, 6), needs a contiguous layout"),
        (meta, "hidden_scale is on meta"),
        (torch.Tensor.tolist, "hidden_scale is a list, not a torch.Tensor"),
    ],
)
def test_wrong_scales_of_tokens_are_refused(device, change, words):
    call = right_calls(device)[MOE]
    q, scales = ops.per_token_group_quant_fp8(call["hidden_states"])
    scales = scales.contiguous()
    run(MOE, call | {"hidden_states": q, "hidden_scale": scales})
    with pytest.raises(InvalidInputError) as caught:
        run(MOE, call | {"hidden_states": q, "hidden_scale": change(scales)})
    assert words in str(caught.value)


def test_a_result_over_quantized_tokens_is_refused(device, debug):
    call = right_calls(device)[MOE]
    q, scales = ops.per_token_group_quant_fp8(call["hidden_states"])
    call |= {
        "hidden_states": call["out"].view(h.FP8)[: ROWS // 2].view_as(q).copy_(q),
        "hidden_scale": scales.contiguous(),
    }
    with pytest.raises(InvalidInputError, match="out shares memory with hidden_states, which is still read"):
        run(MOE, call)


@pytest.mark.parametrize("case", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_wrong_value_says_what_is_wrong_in_debug_mode(device, case, debug):
    assert_refused(device, *case)


@pytest.mark.parametrize("op", [GEMM, CONTIGUOUS, PSUM, MASKED])
def test_a_result_that_overlaps_is_refused(device, op, debug):
    call = right_calls(device)[op]
    memory = torch.zeros(call["out"].numel() + 8, dtype=torch.bfloat16, device=device)
    call["out"] = memory[:-8].view_as(call["out"])
    run(op, call)
    call["a"] = memory.view(h.FP8)[: call["a"][0].numel()].view_as(call["a"][0]), call["a"][1]
    with pytest.raises(InvalidInputError, match="out shares memory with a, which is still read"):
        run(op, call)
    assert_refused(device, op, "out", lambda out: out[..., :1, :].expand_as(out), "elements share memory")
    apart = memory.as_strided(call["out"].shape, (*call["out"].stride()[:-2], 128, 1))  # rows of 136
    assert_refused(device, op, "out", lambda _: apart, f"out has shape {list(apart.shape)} and strides")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "argument", "name"),
    [
        (SILU, "counts", "counts"),
        (LINEAR, "weight", "weight"),
        (CONTIGUOUS, "m_indices", "m_indices"),
        (MASKED, "masked_m", "masked_m"),
        (MOE, "topk_ids", "topk_ids"),
        (MOE, "w2_scale", "w2's scales"),
        (BATCHED, "expert_num_tokens", "expert_num_tokens"),
    ],
)
def test_a_tensor_left_on_the_cpu_is_refused(op, argument, name):
    device = torch.device("cuda", torch.cuda.current_device())
    assert_refused(device, op, argument, torch.Tensor.cpu, f"{name} is on cpu, the other tensors on {device}")
