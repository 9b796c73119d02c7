"""DeepSeek-V4's `wo_a`: vLLM passes its weight to DeepGEMM's `fp8_einsum`, which our op replaces; without an engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.utils import deep_gemm

from fp8moe_plugin import ops
from fp8moe_plugin.errors import InvalidInputError, UnsupportedError
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.layers import kernels
from fp8moe_plugin.layers.vllm import deepseek_v4
from fp8moe_plugin.layers.vllm.deepseek_v4 import serve_batched_product
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.sm90.kernel_sets import batched_dense_kernels
from tests import helpers as h
from tests.layers.vllm.one_rank import FP8, Quantized, default_config

pytestmark = pytest.mark.seam

TOKENS, GROUPS, N, K = 5, 4, 128, 256
CPU = torch.device("cpu")
CALL = "bhr,hdr->bhd"


@pytest.fixture(autouse=True)
def no_deep_gemm(monkeypatch: pytest.MonkeyPatch, on_rank: Callable[[int, int], None]) -> None:
    on_rank(1, 0)
    monkeypatch.setattr(deep_gemm, "_fp8_einsum_impl", None)
    monkeypatch.setattr(deep_gemm, "_lazy_init", lambda: None)


def projection(ranks: int, n: int = N) -> ColumnParallelLinear:
    """The layer as vLLM's model makes it."""
    with set_current_vllm_config(default_config()):
        layer = ColumnParallelLinear(K, GROUPS * n, bias=False, quant_config=Quantized(FP8), prefix="attn.wo_a")
    layer.is_bmm, layer.bmm_batch_size = True, GROUPS // ranks
    return layer


def load(layer: ColumnParallelLinear, weight: torch.Tensor, scales: torch.Tensor) -> ColumnParallelLinear:
    layer.weight.weight_loader(layer.weight, weight)
    layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scales)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    weight, _ = h.random_weights(h.seeded(0, CPU), GROUPS * N, K)
    bytes_of_scales = torch.arange(118, 118 + GROUPS * 2, dtype=torch.uint8).view(GROUPS, 2)
    return weight, bytes_of_scales.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 1), (4, 3)])
def test_each_group_is_multiplied_by_its_weight(on_rank: Callable[[int, int], None], ranks: int, rank: int) -> None:
    on_rank(ranks, rank)
    weight, scales = weights()
    layer, groups = load(projection(ranks), weight, scales), GROUPS // ranks
    x, x_scales = h.random_quantized(h.seeded(1, CPU), TOKENS, groups, K)
    z = h.poisoned(TOKENS, groups, N, dtype=torch.bfloat16, device=CPU)
    parameters = layer.weight, layer.weight_scale_inv
    deep_gemm.fp8_einsum(CALL, (x, x_scales), parameters, z, recipe=(1, 128, 128))
    for group in range(groups):
        whole = rank * groups + group
        own = weight[whole * N :][:N], scales[whole : whole + 1].float()
        h.assert_rounded(z[:, group], h.product((x[:, group], x_scales[:, group]), own))


def test_weights_of_other_models_go_to_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(deep_gemm, "_fp8_einsum_impl", lambda *args, **named: calls.append((args, named)))
    for _ in range(2):  # layers of one model
        load(projection(1), *weights())
    a, z = h.random_quantized(h.seeded(1, CPU), TOKENS, GROUPS, K), torch.empty(TOKENS, GROUPS, N).bfloat16()
    theirs = h.random_weights(h.seeded(2, CPU), GROUPS, N, K)
    deep_gemm.fp8_einsum(CALL, a, theirs, z, recipe=(1, 128, 128))
    assert calls == [((CALL, a, theirs, z), {"recipe": (1, 128, 128)})]


def test_wrong_calls_reach_the_checks_of_our_op() -> None:
    layer = load(projection(1), *weights())
    a, z = h.random_quantized(h.seeded(1, CPU), TOKENS, GROUPS, K), torch.empty(TOKENS, GROUPS, N).bfloat16()
    with pytest.raises(InvalidInputError, match=r"the recipe is \(1, 1, 128\)"):
        deep_gemm.fp8_einsum(CALL, a, (layer.weight, layer.weight_scale_inv), z, recipe=(1, 1, 128))


@pytest.mark.parametrize("groups", [1, 2])
def test_its_kernels_are_loaded_with_the_layer(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    loaded = []
    monkeypatch.setattr(kernels, "backend_of", lambda tensor: BACKENDS[SM90])
    monkeypatch.setattr(kernels.driver, "load", lambda key, device, warmup: loaded.append((key, warmup)))
    serve_batched_product("attn.wo_a", torch.empty(256, 128), groups, "the command")
    assert loaded == [(key, "the command") for key in (batched_dense_kernels() if groups > 1 else ())]


def test_groups_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"attn\.wo_a: 256 output channels in 4 groups are no whole scale blocks"
    ):
        serve_batched_product("attn.wo_a", torch.empty(256, 128), 4, "the command")


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepseek_v4, "kernels_backend", lambda tensor: BACKENDS["sm_89"])
    with pytest.raises(UnsupportedError, match="needs a Hopper GPU"):
        serve_batched_product("attn.wo_a", torch.empty(256, 128), 1, "the command")


def test_vllms_projection_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v4.nvidia.ops import o_proj

    weight, scales = weights()
    layer = load(projection(1), weight, scales)
    x, x_scales = h.random_quantized(h.seeded(1, CPU), TOKENS, GROUPS, K)
    monkeypatch.setattr(o_proj, "fused_inv_rope_fp8_quant", lambda *_, **__: (x, x_scales))  # a Triton kernel
    sizes = {"n_groups": GROUPS, "heads_per_group": 1, "nope_dim": 0, "rope_dim": K, "o_lora_rank": N}
    of_hopper = {"einsum_recipe": (1, 128, 128), "tma_aligned_scales": False}
    z = o_proj.deep_gemm_fp8_o_proj(x, None, None, layer, lambda z: z, **sizes, **of_hopper)
    expected = h.poisoned(TOKENS, GROUPS, N, dtype=torch.bfloat16, device=CPU)
    ops.fp8_einsum(CALL, (x, x_scales), (weight.view(GROUPS, N, K), scales.float().view(GROUPS, 1, 2)), expected)
    assert torch.equal(z, expected.flatten(1))
