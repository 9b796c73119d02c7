"""The blocks of vLLM's Qwen models, whose shared expert has a gate: merged where our router chooses the experts.

No model is around them, and no engine.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.qwen2_moe import Qwen2MoeSparseMoeBlock
from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock

from fp8moe_plugin.layers.vllm import compat, shared_expert
from fp8moe_plugin.layers.vllm import moe as moe_module
from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig
from fp8moe_plugin.layers.vllm.router import FusedRouter
from fp8moe_plugin.ops import choose_experts, routed_moe
from tests import helpers as h
from tests.layers.experts import EXPERTS, HIDDEN, TOPK, make_checkpoint
from tests.layers.vllm.moe_block import PREFIX, MoeBlock
from tests.layers.vllm.one_rank import load_experts, load_mlp

pytestmark = pytest.mark.seam

INTERMEDIATE = 256
CHECKPOINT = make_checkpoint(INTERMEDIATE)
MODEL = SimpleNamespace(
    num_experts=EXPERTS,
    hidden_act="silu",
    hidden_size=HIDDEN,
    moe_intermediate_size=INTERMEDIATE,
    shared_expert_intermediate_size=INTERMEDIATE,
    num_experts_per_tok=TOPK,
    norm_topk_prob=True,
)


def qwen2(config: VllmConfig, quantized: Fp8MoeConfig) -> torch.nn.Module:
    return Qwen2MoeSparseMoeBlock(MODEL, quant_config=quantized, prefix=PREFIX)


def qwen3_next(config: VllmConfig, quantized: Fp8MoeConfig) -> torch.nn.Module:
    model = SimpleNamespace(hf_text_config=MODEL, hf_config=SimpleNamespace(), dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "model_config", model)
        patch.setattr(config, "quant_config", quantized)
        return Qwen3NextSparseMoeBlock(config, prefix=PREFIX)


def our_router(layer: Any, experts: Any) -> FusedRouter:
    """As if a GPU served the layer: the reference computes all that the router calls."""
    return FusedRouter(experts, compat.runner_of(layer).router)


class Block(MoeBlock):
    def __init__(self, monkeypatch: pytest.MonkeyPatch, make: Any = qwen2, router: Any = our_router) -> None:
        monkeypatch.setattr(moe_module, "fused_router", router)
        product = lambda self, layer, x, bias=None: torch.nn.functional.linear(x, layer.weight, bias)  # noqa: E731
        monkeypatch.setattr(UnquantizedLinearMethod, "apply", product)
        super().__init__(monkeypatch, make, "shared_expert")

    def load(self) -> None:
        gen = h.seeded(1, torch.device("cpu"))
        for gate in (self.module.gate, self.module.shared_expert_gate):
            gate.weight.data.copy_(h.random_tokens(gen, len(gate.weight), HIDDEN) * 2 / HIDDEN**0.5)
        load_experts(self.experts, CHECKPOINT)
        load_mlp(self.mlp, CHECKPOINT, 1)

    def expected(self) -> torch.Tensor:
        logits = torch.nn.functional.linear(self.x, self.module.gate.weight)
        gate = self.module.shared_expert_gate.weight.data
        return routed_moe(self.x, *self.tensors(), logits, TOPK, shared_gate=gate)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(shared_expert, "log_once", lambda level, text: lines.append(text))
    return lines


@pytest.mark.parametrize("make", [qwen2, qwen3_next])
def test_a_shared_expert_with_a_gate_is_one_more(ranks, monkeypatch, log, make):
    block = Block(monkeypatch, make)
    assert block.runner.shared_experts is None
    assert block.config.additional_config
    assert log == ["shared experts are computed as one more expert (FP8MOE_MERGE_SHARED_EXPERT=0: separately)"]
    assert h.same_bits(block.run(), block.expected())


def test_a_gate_that_is_loaded_again_is_read(ranks, monkeypatch):
    block = Block(monkeypatch)
    before = block.run()
    block.module.shared_expert_gate.weight.data.neg_()
    assert not h.same_bits(block.run(), before)
    assert h.same_bits(block.run(), block.expected())


def test_logits_that_our_router_does_not_read(ranks, monkeypatch):
    """vLLM's router reads them; the weights of the shared expert are ours nevertheless."""
    block = Block(monkeypatch)
    monkeypatch.setattr(FusedRouter, "takes", lambda self, logits: False)
    logits = torch.nn.functional.linear(block.x, block.module.gate.weight)
    choice = choose_experts(logits, TOPK)
    monkeypatch.setattr(block.runner.router, "select_experts", lambda **_: choice)
    assert h.same_bits(block.run(), block.expected())


def test_experts_that_vllm_chooses_keep_it_apart(ranks, monkeypatch, log):
    block = Block(monkeypatch, router=lambda layer, experts: None)
    assert block.runner.shared_experts is not None
    assert log == ["shared experts with a gate are not merged: the other experts are chosen by vLLM's router"]


def test_code_compiled_with_it_apart_is_not_taken_from_vllms_cache(ranks, monkeypatch):
    """Settings are no part of the cache's key, but decide who chooses the experts."""
    routers = our_router, our_router, lambda layer, experts: None
    merged, again, apart = (Block(monkeypatch, router=router).config.compute_hash() for router in routers)
    assert merged == again != apart


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: setattr(block.runner, "routed_scaling_factor", 2.5), "the weights of the other experts have a"),
        (lambda block: setattr(block.module.shared_expert_gate, "quant_method", object()), "the gate is no plain"),
        (lambda block: block.module.shared_expert_gate.float(), "the gate has another dtype or layout"),
    ],
)
def test_a_gate_of_another_kind_keeps_it_apart(ranks, monkeypatch, log, change, reason):
    load = Block.load

    def changed(block: Block) -> None:
        change(block)
        load(block)

    monkeypatch.setattr(Block, "load", changed)
    block = Block(monkeypatch)
    assert block.runner.shared_experts is not None
    (line,) = log
    assert line.startswith(f"shared experts with a gate are not merged: {reason}")


@pytest.mark.parametrize("make", [qwen2, qwen3_next])
def test_a_merged_shared_expert_computes_what_the_runner_computed(ranks, monkeypatch, make):
    apart = Block(monkeypatch, make, router=lambda layer, experts: None)
    monkeypatch.setattr(
        apart.runner.router, "select_experts", lambda *_, **given: choose_experts(given["router_logits"], TOPK)
    )
    merged = Block(monkeypatch, make)
    assert merged.runner.shared_experts is None is not apart.runner.shared_experts
    assert 0 < h.relative_l2(merged.run(), apart.run()) < 0.01
