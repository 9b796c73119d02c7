"""The experts between vLLM's DeepEP dispatch and combine, on tensors laid out as DeepEP does.

DeepEP itself needs GPUs and network buffers. Two buffers in plain torch replace it. Each acts as one of two ranks and
returns what DeepEP's `low_latency_dispatch` and `dispatch` document and allocate: shapes, dtypes, strides, the rows
past the counts, and `-1` for experts of other ranks.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig, fp8_w8a8_moe_quant_config
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

from fp8moe_plugin.ops import per_token_group_quant_fp8
from tests import helpers as h
from tests.layers.vllm.one_rank import step_of
from tests.layers.vllm.test_config import experts_of, moe_layer

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 8, 2, 2048, 128  # DeepEP's low-latency mode knows no smaller hidden size
RANKS, MOST_TOKENS = 2, 12  # per rank; DeepEP requires a product that is a multiple of 4
LOCAL = EXPERTS // RANKS
STEPS = [((12, 5), "distinct"), ((12, 5), "some_missing"), ((1, 0), "first_half")]  # tokens of each rank, routing
PREPARE = "vllm.model_executor.layers.fused_moe.prepare_finalize"


@dataclasses.dataclass
class Rank:
    """The tokens of a rank, and the sums over their experts on all ranks."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    total: torch.Tensor


class LowLatencyBuffer:
    """A row in an expert's slab for each token routed to that expert of this rank; the other rows are NaN."""

    def __init__(self, ranks: list[Rank], rank: int) -> None:
        self.ranks, self.first = ranks, rank * LOCAL

    def low_latency_dispatch(
        self, x, topk_idx, max_tokens, num_experts, *, use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook
    ):
        assert (topk_idx.dtype, topk_idx.is_contiguous()) == (torch.int64, True)
        assert use_fp8
        assert return_recv_hook
        assert (round_scale, use_ue8m0, async_finish) == (False, False, False)
        slab = RANKS * max_tokens
        rows = h.poisoned(num_experts // RANKS, slab, HIDDEN, dtype=h.FP8, device=x.device)
        scales = h.poisoned(num_experts // RANKS, HIDDEN // 128, slab, dtype=torch.float32, device=x.device).mT
        handle = []
        for expert in range(LOCAL):
            sent = [
                (rank, *entry) for rank in self.ranks for entry in (rank.ids == self.first + expert).nonzero().tolist()
            ]
            for row, (rank, token, _) in enumerate(sent):
                q, scale = per_token_group_quant_fp8(rank.x[token : token + 1])
                h.bits(rows)[expert, row], scales[expert, row] = h.bits(q)[0], scale[0]
            handle.append(sent)
        counts = torch.tensor([len(sent) for sent in handle], dtype=torch.int32, device=x.device)
        return (rows, scales), counts, handle, None, lambda: None

    def low_latency_combine(self, x, topk_idx, topk_weights, handle, *, async_finish, zero_copy, return_recv_hook, out):
        assert x.shape == (LOCAL, RANKS * MOST_TOKENS, HIDDEN)
        for expert, sent in enumerate(handle):
            for row, (rank, token, column) in enumerate(sent):
                rank.total[token] += rank.weights[token, column] * x[expert, row].float()
        return out, None, lambda: None


class HighThroughputBuffer:
    """The tokens routed to this rank, each once, with the local ids of its experts here and -1 for the others."""

    def __init__(self, ranks: list[Rank], rank: int) -> None:
        self.ranks, self.mine, self.first = ranks, ranks[rank], rank * LOCAL

    capture = None

    def get_dispatch_layout(self, *, topk_idx, num_experts, previous_event, async_finish, allocate_on_comm_stream):
        assert (topk_idx.dtype, num_experts) == (torch.int64, EXPERTS)
        return None, None, None, None, None

    def dispatch(self, *, x, topk_idx, topk_weights, expert_alignment, **_):
        assert x.dtype == torch.bfloat16  # the experts quantize by themselves
        assert (topk_idx.dtype, topk_weights.dtype, expert_alignment) == (torch.int64, torch.float32, 1)
        parts, handle = [], []
        for rank in self.ranks:
            local = rank.ids.long() - self.first
            local = torch.where((local >= 0) & (local < LOCAL), local, -1)
            here = (local >= 0).any(1)
            parts.append((rank.x[here], local[here], torch.where(local < 0, 0.0, rank.weights)[here]))
            handle += [(rank, token) for token in here.nonzero().flatten().tolist()]
        rows, ids, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        counts = torch.bincount(ids[ids >= 0], minlength=LOCAL).tolist()
        return rows, ids, weights, counts, handle, SimpleNamespace(event=None)

    def combine(self, *, x, handle, **_):
        assert x.shape == (len(handle), HIDDEN)
        for row, (rank, token) in enumerate(handle):
            rank.total[token] += x[row].float()
        return torch.zeros_like(self.mine.x), None, SimpleNamespace(event=None)


@pytest.fixture
def prepare_finalize(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[Callable[[str], type]]:
    """vLLM's classes, which import DeepEP and take their memory from vLLM's workspace."""
    deep_ep = ModuleType("deep_ep")
    deep_ep.Config = deep_ep.EventOverlap = object
    deep_ep.Buffer = SimpleNamespace(get_dispatch_config=lambda ranks: None, get_combine_config=lambda ranks: None)
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)
    init_workspace_manager(device)

    def load(module: str, name: str) -> type:
        monkeypatch.delitem(sys.modules, f"{PREPARE}.{module}", raising=False)
        return getattr(importlib.import_module(f"{PREPARE}.{module}"), name)

    yield load
    reset_workspace_manager()


def make_ranks(gen: torch.Generator, tokens: tuple[int, int], routing: str) -> list[Rank]:
    ranks = []
    for count in tokens:
        weights, ids = h.random_routing(gen, routing, count, TOPK, EXPERTS)
        total = torch.zeros(count, HIDDEN, device=gen.device)
        ranks.append(Rank(h.random_tokens(gen, count, HIDDEN), weights, ids, total))
    return ranks


def run_rank(
    patch: pytest.MonkeyPatch,
    layer: h.Layer,
    rank: int,
    ranks: list[Rank],
    dispatch: mk.FusedMoEPrepareAndFinalize,
    ue8m0: bool,
) -> None:
    """The layer on one rank, built and called by our method."""
    mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
    w13, w13_scale, w2, w2_scale = (tensor[mine].contiguous() for tensor in layer)
    scales = fp8_w8a8_moe_quant_config(w1_scale=w13_scale, w2_scale=w2_scale, block_shape=[128, 128])
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel = dataclasses.replace(parallel, dp_size=RANKS, dp_rank=rank, ep_size=RANKS, ep_rank=rank, use_ep=True)
    sizes = {"num_experts": EXPERTS, "num_local_experts": LOCAL, "hidden_dim": HIDDEN, "moe_parallel_config": parallel}
    batched = dispatch.activation_format == mk.FusedMoEActivationFormat.BatchedExperts
    capacity = {"max_num_tokens": dispatch.max_num_tokens_per_rank(), "num_dispatchers": RANKS} if batched else {}
    experts = experts_of(batched, ue8m0)(moe_config=moe_layer(**sizes), quant_config=scales, **capacity)
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32, device=w13.device)
    expert_map[mine] = torch.arange(LOCAL, dtype=torch.int32, device=w13.device)
    step_of(patch, [len(of.x) for of in ranks])
    mk.FusedMoEKernel(dispatch, experts).apply(
        ranks[rank].x,
        w13,
        w2,
        ranks[rank].weights,
        ranks[rank].ids.to(dispatch.topk_indices_dtype()),
        activation=MoEActivation.SILU,
        global_num_experts=EXPERTS,
        expert_map=expert_map,
        apply_router_weight_on_input=False,
    )


def assert_like_the_layer(layer: h.Layer, ranks: list[Rank], ue8m0: bool) -> None:
    for rank in ranks:
        if not len(rank.x):
            continue
        expected = h.layer_reference(rank.x, layer, rank.weights, rank.ids, quantized=True, ue8m0=ue8m0)
        assert h.relative_l2(rank.total, expected) <= 1e-2


@pytest.mark.parametrize(("tokens", "routing"), STEPS)
def test_slabs_of_the_low_latency_mode(monkeypatch, device, prepare_finalize, tokens, routing):
    """Scales are column-major float32, as in DeepEP for TMA; rows past a count must not affect the result."""
    gen = h.seeded(0, device)
    layer, ranks = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE), make_ranks(gen, tokens, routing)
    mode = prepare_finalize("deepep_ll", "DeepEPLLPrepareAndFinalize")
    for rank in range(RANKS):
        buffer = LowLatencyBuffer(ranks, rank)
        dispatch = mode(buffer, MOST_TOKENS, RANKS, use_fp8_dispatch=True)
        run_rank(monkeypatch, layer, rank, ranks, dispatch, ue8m0=False)
    assert_like_the_layer(layer, ranks, ue8m0=False)


@pytest.mark.parametrize(("tokens", "routing", "ue8m0"), [*((*step, False) for step in STEPS), (*STEPS[0], True)])
def test_rows_of_the_high_throughput_mode(monkeypatch, device, prepare_finalize, tokens, routing, ue8m0):
    """Ids are int64 and global, `-1` for an expert of another rank; a rank may get no token at all."""
    gen = h.seeded(0, device)
    layer, ranks = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE), make_ranks(gen, tokens, routing)
    mode = prepare_finalize("deepep_ht", "DeepEPHTPrepareAndFinalize")
    for rank in range(RANKS):
        buffer = HighThroughputBuffer(ranks, rank)
        dispatch = mode(buffer, num_dispatchers=RANKS, dp_size=RANKS, rank_expert_offset=rank * LOCAL)
        run_rank(monkeypatch, layer, rank, ranks, dispatch, ue8m0)
    assert_like_the_layer(layer, ranks, ue8m0)
