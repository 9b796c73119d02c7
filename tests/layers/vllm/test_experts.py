"""The experts accept the call that vLLM's modular kernel makes; without an engine."""

import dataclasses
import inspect

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig, fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.layers.experts import Experts
from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig
from fp8moe_plugin.layers.vllm.entry import Entry
from fp8moe_plugin.layers.vllm.gather import QuantizedGather
from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.vllm.online import OnlineLinearMethod, OnlineMoeMethod
from fp8moe_plugin.ops import batched_experts, fused_moe
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.ops.quantize import quantize_tokens
from tests import helpers as h
from tests.layers.vllm.one_rank import step_of
from tests.layers.vllm.test_config import experts_of, moe_layer
from tests.mxfp4 import random_experts

pytestmark = pytest.mark.seam

EXPERTS, TOKENS, TOPK, SIZE = 16, 5, 4, 256  # as moe_layer() says
UNUSED = torch.empty(0)


def build(layer: h.Layer, batched: bool, weights: WeightFormat = FP8_BLOCK) -> mk.FusedMoEExpertsModular:
    scales = fp8_w8a8_moe_quant_config(w1_scale=layer.w13_scale, w2_scale=layer.w2_scale, block_shape=[128, 128])
    capacity = {"max_num_tokens": TOKENS, "num_dispatchers": 2} if batched else {}
    return experts_of(batched, weights=weights)(moe_config=moe_layer(), quant_config=scales, **capacity)


def apply(experts: mk.FusedMoEExpertsModular, layer: h.Layer, x: torch.Tensor, **arguments: object) -> torch.Tensor:
    """Returns the output of a call with every argument that vLLM's signature has."""
    shapes = experts.workspace_shapes(x.shape[-2], 2 * SIZE, SIZE, TOPK, EXPERTS, EXPERTS, None, MoEActivation.SILU)
    assert shapes[:2] == ((0,), (0,))
    out = torch.zeros(shapes[2], dtype=torch.bfloat16)
    call = dict.fromkeys(list(inspect.signature(mk.FusedMoEExpertsModular.apply).parameters)[1:])
    call |= {"output": out, "hidden_states": x, "w1": layer.w13, "w2": layer.w2, "workspace13": UNUSED}
    experts.apply(**call | {"global_num_experts": EXPERTS, "apply_router_weight_on_input": False} | arguments)
    return out


@pytest.mark.parametrize("weighted_input", [False, True])
def test_the_standard_experts_are_the_fused_layer(weighted_input):
    gen = h.seeded(0, torch.device("cpu"))
    layer, x = h.random_layer(gen, EXPERTS, SIZE, SIZE), h.random_tokens(gen, TOKENS, SIZE)
    weights, ids = h.random_routing(gen, "distinct", TOKENS, TOPK, EXPERTS)
    routing = {"topk_weights": weights, "topk_ids": ids, "apply_router_weight_on_input": weighted_input}
    expected = fused_moe(x, *layer, torch.ones_like(weights) if weighted_input else weights, ids)
    assert h.same_bits(apply(build(layer, batched=False), layer, x, **routing), expected)


def test_the_standard_experts_take_quantized_tokens():
    gen = h.seeded(0, torch.device("cpu"))
    layer, x = h.random_layer(gen, EXPERTS, SIZE, SIZE), h.random_tokens(gen, TOKENS, SIZE)
    weights, ids = h.random_routing(gen, "distinct", TOKENS, TOPK, EXPERTS)
    q, scales = quantize_tokens(x, False)
    out = apply(build(layer, batched=False), layer, q, a1q_scale=scales, topk_weights=weights, topk_ids=ids)
    assert h.same_bits(out, fused_moe(x, *layer, weights, ids))


def test_the_batched_experts_are_the_batched_op(monkeypatch):
    step_of(monkeypatch, [TOKENS, TOKENS])
    gen = h.seeded(0, torch.device("cpu"))
    layer, rows = h.random_layer(gen, EXPERTS, SIZE, SIZE), h.random_quantized(gen, EXPERTS, 2 * TOKENS, SIZE)
    _, ids = h.random_routing(gen, "distinct", TOKENS, TOPK, EXPERTS)
    counts = torch.arange(EXPERTS, dtype=torch.int32) % (2 * TOKENS)
    meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
    out = apply(build(layer, True), layer, rows[0], a1q_scale=rows[1], topk_ids=ids, expert_tokens_meta=meta)
    expected = batched_experts(*rows, *layer, counts, expected_m=1, out=torch.zeros_like(out))
    assert h.same_bits(out, expected)


@pytest.mark.parametrize(
    ("tokens", "sizes", "expected_m"), [(1, [1, 1], 1), (1, [1, 4], 2), (4, [4, 1], 2), (5, [5, 5], 3), (4, [], 2)]
)
def test_the_batched_experts_expect_the_rows_of_the_step(monkeypatch, tokens, sizes, expected_m):
    """Not those of the slabs, which have room for any step. Without data parallelism, vLLM tells no sizes."""
    called = []
    monkeypatch.setattr(Experts, "run_batched", lambda _, x, scale, counts, rows, out: called.append(rows))
    step_of(monkeypatch, sizes)
    layer = h.random_layer(h.seeded(0, torch.device("cpu")), EXPERTS, SIZE, SIZE)
    slabs, ids = torch.zeros(EXPERTS, 2 * TOKENS, SIZE), torch.zeros(tokens, TOPK, dtype=torch.int32)
    meta = mk.ExpertTokensMetadata(expert_num_tokens=torch.zeros(EXPERTS), expert_num_tokens_cpu=None)
    apply(build(layer, True), layer, slabs, topk_ids=ids, expert_tokens_meta=meta)
    assert called == [expected_m]


class Slabs(mk.FusedMoEPrepareAndFinalizeModular):
    """A dispatch and combine like DeepEP's low-latency mode: passes slabs on, and keeps the experts' results."""

    def __init__(self, rows: h.Quantized, counts: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def topk_indices_dtype(self) -> None:
        return None

    def max_num_tokens_per_rank(self) -> int:
        return TOKENS

    def num_dispatchers(self) -> int:
        return 2

    def output_is_reduced(self) -> bool:
        return True

    def prepare(self, *_: object, defer_input_quant: bool) -> tuple[object, ...]:
        assert not defer_input_quant  # DeepEP quantizes the tokens
        return *self.rows, self.meta, None, None

    def finalize(self, output: torch.Tensor, fused_expert_output: torch.Tensor, *_: object) -> None:
        self.combined = fused_expert_output.clone()


@pytest.mark.parametrize("weights", [FP8_BLOCK, PACKED_MXFP4], ids=str)
def test_vllms_kernel_calls_the_batched_experts(monkeypatch, workspaces, weights):
    step_of(monkeypatch, [TOKENS, TOKENS])
    gen = h.seeded(0, torch.device("cpu"))
    packed = random_experts(gen, EXPERTS, SIZE, SIZE, SPAN).packed()
    layer = packed if weights is PACKED_MXFP4 else h.random_layer(gen, EXPERTS, SIZE, SIZE)
    rows = h.random_quantized(gen, EXPERTS, 2 * TOKENS, SIZE)
    counts = torch.arange(EXPERTS, dtype=torch.int32) % (2 * TOKENS)
    dispatch = Slabs(rows, counts)
    mk.FusedMoEKernel(dispatch, build(layer, True, weights)).apply(
        *(h.random_tokens(gen, TOKENS, SIZE), layer.w13, layer.w2),
        *h.random_routing(gen, "distinct", TOKENS, TOPK, EXPERTS),
        activation=MoEActivation.SILU,
        global_num_experts=EXPERTS,
        expert_map=None,
        apply_router_weight_on_input=False,
    )
    expected = batched_experts(*rows, *layer, counts, expected_m=1, weights=weights)
    for expert, count in enumerate(counts):
        assert h.same_bits(dispatch.combined[expert, :count], expected[expert, :count])


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        (experts_of(False), mk.FusedMoEExpertsModular),
        (experts_of(True), mk.FusedMoEExpertsModular),
        (QuantizedGather, mk.FusedMoEPrepareAndFinalizeModular),
        (Fp8MoeMethod, FusedMoEMethodBase),
        (OnlineMoeMethod, FusedMoEMethodBase),
        (Fp8MoeLinearMethod, LinearMethodBase),
        (OnlineLinearMethod, LinearMethodBase),
        (Fp8MoeConfig, QuantizationConfig),
        (Entry, QuantizationConfig),
    ],
)
def test_what_vllm_calls_is_there_and_takes_what_vllm_declares(ours, base):
    assert ours.__abstractmethods__ == frozenset()
    for name, declared in inspect.getmembers(base, inspect.isroutine):
        own = getattr(ours, name)
        if name.startswith("__") or own in (declared, getattr(declared, "__func__", None)):
            continue
        named = {p.name for p in inspect.signature(declared).parameters.values() if p.kind < p.VAR_POSITIONAL}
        takes = inspect.signature(own)
        takes.bind(**dict.fromkeys(named - {"self"} | takes.parameters.keys() & {"self"}))


@pytest.mark.parametrize(
    ("all2all", "served"),
    [
        ("allgather_reducescatter", True),
        ("deepep_high_throughput", True),
        ("deepep_low_latency", True),
        ("deepep_v2", True),
        ("nixl_ep", True),
        ("flashinfer_all2allv", False),
        ("flashinfer_nvlink_two_sided", False),
        ("flashinfer_nvlink_one_sided", False),
        ("mori_low_latency", False),
        ("moonep", False),
        ("passthrough", False),
    ],
)
def test_only_some_ways_to_exchange_tokens_are_served(all2all, served):
    alone = dataclasses.replace(FusedMoEParallelConfig.make_no_parallel(), all2all_backend=all2all)
    spread = dataclasses.replace(alone, dp_size=2, ep_size=2, use_ep=True)
    for batched in (False, True):
        experts = experts_of(batched)
        assert experts._supports_parallel_config(spread) == served
        assert experts._supports_parallel_config(alone) == (all2all != "passthrough")
