"""Each wrong call under DeepGEMM's names differs from a valid one in one respect, which the error names."""

from typing import Any

import pytest
import torch

from fp8moe_plugin import deep_gemm
from fp8moe_plugin.errors import InvalidInputError
from tests import helpers as h

Call = dict[str, Any]
CONTIGUOUS, MASKED = "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"
HEADS, TRANSFORM = "fp8_gemm_nt_skip_head_mid", "transform_sf_into_required_layout"
ALIGNED, PACKED = "get_mn_major_tma_aligned_tensor", "get_mn_major_tma_aligned_packed_ue8m0_tensor"
K_GROUPED = "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"
ALIGNMENT = "set_mk_alignment_for_contiguous_layout"
EINSUM = "fp8_einsum"


def right_calls(device: torch.device) -> dict[str, Call]:
    gen = h.seeded(0, device)
    a, b, d = h.random_quantized(gen, 6, 256), h.random_weights(gen, 128, 256), torch.empty(6, 128, device=device)
    experts, rows = h.random_weights(gen, 2, 128, 256), h.random_quantized(gen, 2, 6, 256)
    ids, counts = (torch.zeros(n, dtype=torch.int32, device=device) for n in (6, 2))
    options = {"recipe": (1, 128, 128), "recipe_a": None, "recipe_b": None}
    sf = torch.ones(6, 2, device=device)
    return {
        "fp8_gemm_nt": {"a": a, "b": b, "d": d, "c": None, **options},
        "fp8_gemm_nn": {"a": a, "b": (b[0].T, b[1].T), "d": d, **options},
        "fp8_gemm_tt": {"a": (a[0].T, a[1].T), "b": b, "d": d, **options},
        HEADS: {"a": a, "b": b, "d": torch.empty(6, 160, device=device), "head_splits": (32, 16, 32)},
        CONTIGUOUS: {
            "a": a,
            "b": experts,
            "d": d.bfloat16(),
            "grouped_layout": ids,
            "expected_m_for_psum_layout": None,
            **options,
        },
        MASKED: {
            "a": rows,
            "b": experts,
            "d": torch.empty(2, 6, 128, device=device).bfloat16(),
            "masked_m": counts,
            "expected_m": 3,
            **options,
        },
        EINSUM: {
            "expr": "bhr,hdr->bhd",
            "a": h.random_quantized(gen, 6, 2, 256),
            "b": experts,
            "d": torch.empty(6, 2, 128, device=device).bfloat16(),
            "c": None,
            "recipe": (1, 128, 128),
        },
        "get_tma_aligned_size": {"x": 5, "element_size": 4},
        ALIGNED: {"sf": sf},
        PACKED: {"sf": sf},
        K_GROUPED: {
            "sf": torch.ones(3, 6, device=device),
            "grouped_layout": counts,
            "ks_cpu": [128, 256],
            "gran_k": 128,
            "k_alignment": 128,
            "use_psum_layout": False,
        },
        TRANSFORM: {"sf": sf, "mn": 6, "k": 256, "recipe": (1, 128, 128), "num_groups": None, "is_sfa": True},
        ALIGNMENT: {"new_value": 128},
        "set_tc_util": {"new_tc_util": 100},
        "set_num_sms": {"num_sms": 0},
    }


# name, argument, its value, words of the message
WRONG_CALLS = {
    "recipe-of-blackwell": ("fp8_gemm_nt", "recipe", (1, 1, 32), "the recipe is (1, 1, 32), needs"),
    "recipe-a-tensor": ("fp8_gemm_nt", "recipe", torch.zeros(3), "recipe is a tensor, needs 3 ints"),
    "recipe-a-number": ("fp8_gemm_nt", "recipe", 128, "recipe is 128, needs 3 ints"),
    "heads-two": (HEADS, "head_splits", (64, 64), "head_splits is (64, 64), needs 3 ints"),
    "heads-a-no-pair": (HEADS, "a", torch.zeros(6, 256), "a is a Tensor, not a pair"),
    "b-without-scales": ("fp8_gemm_nn", "b", (None, None), "b holds no matrices"),
    "b-one-dimension": ("fp8_gemm_nn", "b", (torch.zeros(4), torch.zeros(4)), "b holds no matrices"),
    "recipe-and-parts": ("fp8_gemm_nt", "recipe_a", (1, 128), "Pass either the first, or both others"),
    "recipe-of-blocks-of-a": (CONTIGUOUS, "recipe", (128, 128, 128), "the recipe is (128, 128, 128), needs"),
    "masked-recipe": (MASKED, "recipe", (1, 128, 64), "the recipe is (1, 128, 64), needs"),
    "a-not-a-pair": ("fp8_gemm_tt", "a", torch.zeros(2, 2), "a is a Tensor, not a pair. Pass (values, scales)"),
    "b-of-three": ("fp8_gemm_nn", "b", (1, 2, 3), "b has 3 parts, needs (values, scales)"),
    "d-a-list": ("fp8_gemm_nt", "d", [1], "out is a list, not a torch.Tensor"),
    "c-a-number": ("fp8_gemm_nt", "c", 1.0, "c is a float, not a torch.Tensor"),
    "d-expanded": ("fp8_gemm_nt", "d", torch.zeros(1, 128).expand(6, 128), "strides (0, 1): elements share memory"),
    "psum-a-tensor": (
        CONTIGUOUS,
        "use_psum_layout",
        torch.ones(2),
        "use_psum_layout is a Tensor, not a bool",
    ),
    "heads-that-do-not-fit": (HEADS, "head_splits", (32, 16, 31), "b has 128 rows, which are no heads of 32 + 31"),
    "heads-negative": (HEADS, "head_splits", (-32, 16, 64), "head_splits is (-32, 16, 64)"),
    "heads-of-nothing": (HEADS, "head_splits", (0, 16, 0), "which are no heads of 0 + 0"),
    "heads-d-without-gaps": (HEADS, "d", torch.empty(6, 128), "d has shape [6, 128], needs [6, 160]"),
    "heads-d-float16": (HEADS, "d", torch.empty(6, 160).half(), "d has dtype torch.float16, needs"),
    "hint-without-psum": (CONTIGUOUS, "expected_m_for_psum_layout", 3, "is given without use_psum_layout"),
    "psum-of-indices": (CONTIGUOUS, "use_psum_layout", True, "ends has shape [6], needs [2]"),
    "layout-a-list": (CONTIGUOUS, "grouped_layout", [0] * 6, "m_indices is a list, not a torch.Tensor"),
    "expected-m-a-float": (MASKED, "expected_m", 3.5, "expected_m is a float, not an int"),
    "einsum-of-gradients": (EINSUM, "expr", "bhd,bhr->hdr", "expr is 'bhd,bhr->hdr', needs 'bhr,hdr->bhd'"),
    "einsum-a-number": (EINSUM, "expr", 3, "expr is 3, needs 'bhr,hdr->bhd'"),
    "einsum-recipe": (EINSUM, "recipe", (1, 1, 128), "the recipe is (1, 1, 128), needs (1, 128, 128)"),
    "einsum-no-recipe": (EINSUM, "recipe", None, "recipe is None, needs 3 ints"),
    "einsum-addend": (EINSUM, "c", torch.zeros(6, 2, 128), "c is given, but no kernel adds to d"),
    "einsum-a-no-pair": (EINSUM, "a", torch.zeros(6, 2, 256), "a is a Tensor, not a pair"),
    "einsum-matrix": (EINSUM, "a", (torch.zeros(6, 256).to(h.FP8), torch.ones(6, 2)), "a has shape [6, 256], needs"),
    "einsum-groups": (
        EINSUM,
        "b",
        (torch.zeros(3, 128, 256).to(h.FP8), torch.ones(3, 1, 2)),
        "b has shape [3, 128, 256], needs [2, any, any]",
    ),
    "einsum-weights-of-all": (
        EINSUM,
        "b",
        (torch.zeros(256, 256).to(h.FP8), torch.ones(2, 2)),
        "b has shape [256, 256]",
    ),
    "einsum-group-first": (
        EINSUM,
        "d",
        torch.empty(2, 6, 128).bfloat16(),
        "d has shape [2, 6, 128], needs [6, 2, 128]",
    ),
    "einsum-float32": (EINSUM, "d", torch.empty(6, 2, 128), "d has dtype torch.float32, needs torch.bfloat16"),
    "size-a-float": ("get_tma_aligned_size", "x", 5.0, "x is a float, not an int"),
    "element-of-3-bytes": ("get_tma_aligned_size", "element_size", 3, "element_size is 3, needs 1, 2, 4, 8 or 16"),
    "scales-one-dimension": (ALIGNED, "sf", torch.ones(6), "sf has shape [6], needs [MN, K/128] or"),
    "scales-float64": (ALIGNED, "sf", torch.ones(6, 2).double(), "sf has dtype torch.float64, needs torch.float32"),
    "packed-scales-bf16": (PACKED, "sf", torch.ones(6, 2).bfloat16(), "sf has dtype torch.bfloat16, needs"),
    "packed-scales-four-dimensions": (PACKED, "sf", torch.ones(1, 1, 6, 2), "sf has shape [1, 1, 6, 2], needs"),
    "groups-a-tensor": (K_GROUPED, "ks_cpu", torch.ones(2), "ks_cpu is a Tensor, not a list"),
    "groups-uneven": (K_GROUPED, "ks_cpu", [128, 255], "ks_cpu holds 255, needs multiples of 128"),
    "groups-of-other-scales": (K_GROUPED, "ks_cpu", [128, 128], "sf has 3 rows, ks_cpu 2 blocks of K"),
    "groups-without-granularity": (K_GROUPED, "gran_k", 0, "gran_k is 0, needs 1 or more"),
    "groups-negative": (K_GROUPED, "ks_cpu", [512, -128], "ks_cpu[1] is -128, needs 0 or more"),
    "groups-psum": (K_GROUPED, "use_psum_layout", True, "use_psum_layout is set, which only Blackwell GPUs have"),
    "transform-other-rows": (TRANSFORM, "mn", 7, "sf has shape [6, 2], needs [7, 2]"),
    "transform-other-groups": (TRANSFORM, "num_groups", 2, "sf has shape [6, 2], needs [2, 6, 2]"),
    "transform-k-a-list": (TRANSFORM, "k", [], "k is a list, not an int"),
    "transform-recipe-of-two": (TRANSFORM, "recipe", (1, 128), "three numbers need True or False, two need None"),
    "transform-no-recipe": (TRANSFORM, "recipe", None, "recipe is None, needs 2 or 3 ints"),
    "transform-32-channels": (TRANSFORM, "recipe", (1, 1, 32), "which gives (1, 32), needs (1, 128) or (128, 128)"),
    "transform-of-which": (TRANSFORM, "is_sfa", None, "is_sfa None: three numbers need True or False"),
    "alignment-zero": (ALIGNMENT, "new_value", 0, "the alignment is 0, needs 1 or more"),
    "alignment-none": (ALIGNMENT, "new_value", None, "the alignment is a NoneType, not an int"),
    "percents": ("set_tc_util", "new_tc_util", 101, "new_tc_util is 101, needs 0 to 100"),
    "multiprocessors-negative": ("set_num_sms", "num_sms", -1, "num_sms is -1, needs 0 or more"),
    "multiprocessors-a-float": ("set_num_sms", "num_sms", 64.0, "num_sms is a float, not an int"),
}


def on(device: torch.device, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on(device, part) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() and value.stride(0) == 0:  # which copies do not keep
        return value[:1].to(device).expand(value.shape)
    return value.to(device)


@pytest.mark.parametrize("name", sorted({case[0] for case in WRONG_CALLS.values()}))
def test_the_unchanged_call_is_taken(device, name):
    getattr(deep_gemm, name)(**right_calls(device)[name])


@pytest.mark.parametrize("case", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_says_what_is_wrong(device, case):
    name, argument, value, words = case
    with pytest.raises(InvalidInputError) as caught:
        getattr(deep_gemm, name)(**(right_calls(device)[name] | {argument: on(device, value)}))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"c": None}, "c is None, but recipe (1, 1, 128) adds to it"),
        ({"d": torch.zeros(6, 128).bfloat16()}, "d has dtype torch.bfloat16, needs torch.float32"),
        ({"c": torch.zeros(6, 64)}, "c has shape [6, 64], needs [6, 128]"),
        ({"a": (torch.zeros(6, 200).to(h.FP8), torch.ones(6, 2))}, "a's K is 200, needs a positive multiple of 16"),
        ({"b": (torch.zeros(128, 384).to(h.FP8), torch.ones(128, 3))}, "b has shape [128, 384], needs [any, 256]"),
        ({"b": (torch.zeros(128, 256).to(h.FP8), torch.ones(1, 2))}, "b's scales has shape [1, 2], needs [128, 2]"),
    ],
    ids=str,
)
def test_a_wrong_call_of_a_gradient(device, change, words):
    gen = h.seeded(0, device)
    a, b = h.random_quantized(gen, 6, 256), h.random_quantized(gen, 128, 256)
    call = {"a": a, "b": b, "d": torch.zeros(6, 128, device=device), "c": torch.zeros(6, 128, device=device)}
    deep_gemm.fp8_gemm_nt(**call, recipe=(1, 1, 128))
    with pytest.raises(InvalidInputError) as caught:
        deep_gemm.fp8_gemm_nt(
            **(call | {name: on(device, value) for name, value in change.items()}), recipe=(1, 1, 128)
        )
    assert words in str(caught.value)


def test_channels_of_both_operands_are_the_same(device):
    call = right_calls(device)["fp8_gemm_nt"] | {"recipe": None, "recipe_a": (1, 128), "recipe_b": (128, 64)}
    with pytest.raises(InvalidInputError, match="Pass the same channels in both"):
        deep_gemm.fp8_gemm_nt(**call)


def test_scales_of_blocks_are_dense(device):
    blocks = torch.ones(4, 6, device=device)[:, ::2]
    with pytest.raises(InvalidInputError, match="needs dense ones in either order"):
        deep_gemm.transform_sf_into_required_layout(blocks, 500, 384, (128, 128))
