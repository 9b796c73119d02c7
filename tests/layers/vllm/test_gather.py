"""The experts between vLLM's all-gather and reduce-scatter, which vLLM has for GPUs alone: ranks take turns here."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.forward_context import DPMetadata
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig, fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep

from fp8moe_plugin.layers.vllm import compat, gather
from fp8moe_plugin.layers.vllm.gather import QuantizedGather, quantized_gather
from fp8moe_plugin.ops import fused_moe, per_token_group_quant_fp8
from fp8moe_plugin.plan.spec import Arrival
from tests import helpers as h
from tests.layers.experts import make_checkpoint
from tests.layers.vllm.one_rank import Layer, step_of
from tests.layers.vllm.test_config import experts_of, moe_layer

pytestmark = pytest.mark.seam

EXPERTS, TOPK, SIZE, RANKS = 8, 2, 256, 2
LOCAL, THRESHOLD = EXPERTS // RANKS, 12  # as many tokens per rank are quantized
CPU = torch.device("cpu")
Rank = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, weights, ids


class Group:
    """vLLM's group of expert-parallel ranks, of which one runs: of the others it computes what they would send."""

    def __init__(self, ranks: list[Rank], rank: int, ue8m0: bool) -> None:
        self.ranks, self.rank, self.ue8m0 = ranks, rank, ue8m0
        self.sent: list[torch.dtype] = []

    def dispatch(self, tokens, weights, ids, is_sequence_parallel=False, extra_tensors=None):
        self.sent.append(tokens.dtype)
        others = [x for x, _, _ in self.ranks]
        if extra_tensors is not None:
            quantized = [per_token_group_quant_fp8(x, ue8m0=self.ue8m0) for x in others]
            others, scales = [q.view(torch.uint8) for q, _ in quantized], [s for _, s in quantized]
            (given,) = extra_tensors
            assert given.is_contiguous()
            assert torch.equal(given, scales[self.rank])
        assert torch.equal(tokens, others[self.rank])
        gathered = [torch.cat(part) for part in (others, *zip(*[rank[1:] for rank in self.ranks], strict=True))]
        return (*gathered, [torch.cat(scales)]) if extra_tensors is not None else tuple(gathered)

    def combine(self, sums, is_sequence_parallel=False):
        self.sums = sums.clone()
        return sums[: len(self.ranks[self.rank][0])]

    def combine_into_output(self, sums, output, is_sequence_parallel=False):
        output.copy_(self.combine(sums))

    def allocate_combine_input(self, *args, **_):
        return None


@pytest.fixture(autouse=True)
def threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "QUANTIZED_TOKENS", THRESHOLD)


def make_ranks(gen: torch.Generator, tokens: tuple[int, int]) -> list[Rank]:
    return [(h.random_tokens(gen, n, SIZE), *h.random_routing(gen, "distinct", n, TOPK, EXPERTS)) for n in tokens]


def run_rank(
    monkeypatch: pytest.MonkeyPatch, layer: h.Layer, ranks: list[Rank], rank: int, ue8m0: bool, **options: object
) -> Group:
    """The layer on one rank, called by vLLM's modular kernel."""
    mine, group = slice(rank * LOCAL, (rank + 1) * LOCAL), Group(ranks, rank, ue8m0)
    for module in (gather, naive_dp_ep):
        monkeypatch.setattr(module, "get_ep_group", lambda: group)
    step_of(monkeypatch, [len(x) for x, _, _ in ranks])
    w13, w13_scale, w2, w2_scale = (tensor[mine].contiguous() for tensor in layer)
    scales = fp8_w8a8_moe_quant_config(w1_scale=w13_scale, w2_scale=w2_scale, block_shape=[128, 128])
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel = dataclasses.replace(parallel, dp_size=RANKS, dp_rank=rank, ep_size=RANKS, ep_rank=rank, use_ep=True)
    changes = {"num_experts": EXPERTS, "num_local_experts": LOCAL, "moe_parallel_config": parallel}
    experts = experts_of(False, ue8m0)(moe_config=moe_layer(**changes), quant_config=scales)
    vllms = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular(num_dispatchers=RANKS)
    call = {"activation": MoEActivation.SILU, "global_num_experts": EXPERTS, "apply_router_weight_on_input": False}
    mk.FusedMoEKernel(quantized_gather(vllms, ue8m0), experts).apply(
        ranks[rank][0], w13, w2, *ranks[rank][1:], expert_map=expert_map(rank), **call | options
    )
    return group


def expert_map(rank: int) -> torch.Tensor:
    local = torch.arange(EXPERTS, dtype=torch.int32) - rank * LOCAL
    return torch.where((local >= 0) & (local < LOCAL), local, -1).int()


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(
    ("tokens", "sent"), [((12, 12), torch.uint8), ((3, 12), torch.uint8), ((11, 11), torch.bfloat16), ((1, 2), None)]
)
def test_ranks_choose_alike_and_get_the_same_bits(monkeypatch, workspaces, tokens, sent, ue8m0):
    gen = h.seeded(0, CPU)
    layer, ranks = h.random_layer(gen, EXPERTS, SIZE, SIZE), make_ranks(gen, tokens)
    x, weights, ids = (torch.cat(part) for part in zip(*ranks, strict=True))
    for rank in range(RANKS):
        group = run_rank(monkeypatch, layer, ranks, rank, ue8m0)
        assert group.sent == [sent or torch.bfloat16]
        mine = (tensor[rank * LOCAL : (rank + 1) * LOCAL].contiguous() for tensor in layer)
        expected = fused_moe(x, *mine, weights, ids, expert_map=expert_map(rank), ue8m0=ue8m0)
        assert h.same_bits(group.sums, expected)


def test_weighted_tokens_are_sent_in_bfloat16(monkeypatch, workspaces):
    """vLLM multiplies them by their routing weights, which dispatch does not get."""
    gen = h.seeded(0, CPU)
    layer, tokens = h.random_layer(gen, EXPERTS, SIZE, SIZE), h.random_tokens(gen, THRESHOLD, SIZE)
    ids = torch.arange(THRESHOLD, dtype=torch.int32)[:, None] % EXPERTS
    ranks = [(tokens, torch.ones(THRESHOLD, 1), ids)] * RANKS
    assert run_rank(monkeypatch, layer, ranks, 0, False, apply_router_weight_on_input=True).sent == [torch.bfloat16]


def test_ranks_of_equal_tokens_need_no_metadata(monkeypatch):
    for metadata in (None, DPMetadata(torch.tensor([40]))):
        context = SimpleNamespace(dp_metadata=metadata)
        monkeypatch.setattr(gather, "get_forward_context", lambda context=context: context)
        assert gather.most_tokens(7) == 7


def test_another_dispatch_stays_as_it_is():
    for dispatch in (object(), SimpleNamespace(is_sequence_parallel=False)):
        assert quantized_gather(dispatch, False) is dispatch
    vllms = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular(is_sequence_parallel=True, num_dispatchers=3)
    ours = quantized_gather(vllms, True)
    assert (ours.is_sequence_parallel, ours.num_dispatchers(), ours.ue8m0) == (True, 3, True)


def test_a_layer_that_gathers_loads_kernels_of_both_arrivals(monkeypatch):
    loaded: list[Arrival] = []
    vllms = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular(num_dispatchers=RANKS)
    monkeypatch.setattr(compat, "make_prepare_finalize", lambda *_: vllms)
    monkeypatch.setattr(
        "fp8moe_plugin.layers.experts.Experts.prepare", lambda self, prefix, arrivals, warmup: loaded.extend(arrivals)
    )
    layer = Layer(SIZE, 1, 0).load(make_checkpoint(SIZE))
    layer._expert_routing_tables = lambda: None
    layer.quant_method.process_weights_after_loading(layer)
    assert loaded == [Arrival.STANDARD, Arrival.QUANTIZED]
    assert isinstance(layer.quant_method.moe_kernel.prepare_finalize, QuantizedGather)
