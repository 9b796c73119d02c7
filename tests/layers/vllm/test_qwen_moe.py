"""The blocks of vLLM's Qwen models, whose shared expert has a gate: merged where our router chooses the experts.

No model is around them, and no engine.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.qwen2_moe import Qwen2MoeSparseMoeBlock
from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.layers.parameters import expert_tensors
from fp8moe_plugin.layers.vllm import compat, shared_expert
from fp8moe_plugin.layers.vllm import config as config_module
from fp8moe_plugin.layers.vllm import moe as moe_module
from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig
from fp8moe_plugin.layers.vllm.router import FusedRouter
from fp8moe_plugin.layers.vllm.shared_expert import Mlp
from fp8moe_plugin.ops import choose_experts, routed_moe
from tests import helpers as h
from tests.layers.experts import EXPERTS, HIDDEN, TOPK, make_checkpoint
from tests.layers.vllm.one_rank import load_experts, load_mlp
from tests.layers.vllm.test_deepseek_moe import ranks  # noqa: F401

pytestmark = pytest.mark.seam

INTERMEDIATE, TOKENS, PREFIX = 256, 7, "model.layers.3.mlp"
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


class Block:
    """A loaded block of the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, make: Any = qwen2, router: Any = our_router) -> None:
        monkeypatch.setattr(config_module, "warmup_command", lambda: "warmup")
        monkeypatch.setattr(moe_module, "fused_router", router)
        product = lambda self, layer, x, bias=None: torch.nn.functional.linear(x, layer.weight, bias)  # noqa: E731
        monkeypatch.setattr(UnquantizedLinearMethod, "apply", product)
        self.config = VllmConfig()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(self.config):
                self.module = make(self.config, Fp8MoeConfig(QuantSpec(FP8_BLOCK)))
                self.mlp = Mlp(self.module.shared_expert.gate_up_proj, self.module.shared_expert.down_proj)
                self.runner = self.module.experts
                self.experts = self.runner.routed_experts
                self.load()
        finally:
            torch.set_default_dtype(torch.float32)
        self.x = h.random_tokens(h.seeded(0, torch.device("cpu")), TOKENS, HIDDEN)

    def load(self) -> None:
        gen = h.seeded(1, torch.device("cpu"))
        for gate in (self.module.gate, self.module.shared_expert_gate):
            gate.weight.data.copy_(h.random_tokens(gen, len(gate.weight), HIDDEN) * 2 / HIDDEN**0.5)
        load_experts(self.experts, CHECKPOINT)
        load_mlp(self.mlp, CHECKPOINT, 1)
        for part in (*self.mlp, self.experts):
            part.quant_method.process_weights_after_loading(part)

    def run(self) -> torch.Tensor:
        with set_forward_context(None, self.config), torch.inference_mode():
            return self.module(self.x.clone())

    def expected(self) -> torch.Tensor:
        """With expert 1 as the shared one, too."""
        tensors = [getattr(self.experts, name).data for name in expert_tensors(FP8_BLOCK, 1, 128, 128)]
        tensors = [
            torch.cat([tensor.view(torch.uint8), tensor[1:2].view(torch.uint8)]).view(tensor.dtype)
            for tensor in tensors
        ]
        logits = torch.nn.functional.linear(self.x, self.module.gate.weight)
        return routed_moe(self.x, *tensors, logits, TOPK, shared_gate=self.module.shared_expert_gate.weight.data)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(shared_expert, "log_once", lambda level, text: lines.append(text))
    return lines


@pytest.mark.parametrize("make", [qwen2, qwen3_next])
def test_a_shared_expert_with_a_gate_is_one_more(ranks, monkeypatch, log, make):  # noqa: F811
    block = Block(monkeypatch, make)
    assert block.runner.shared_experts is None
    assert block.config.additional_config
    assert log == ["shared experts are computed as one more expert (FP8MOE_MERGE_SHARED_EXPERT=0: separately)"]
    assert h.same_bits(block.run(), block.expected())


def test_a_gate_that_is_loaded_again_is_read(ranks, monkeypatch):  # noqa: F811
    block = Block(monkeypatch)
    before = block.run()
    block.module.shared_expert_gate.weight.data.neg_()
    assert not h.same_bits(block.run(), before)
    assert h.same_bits(block.run(), block.expected())


def test_logits_that_our_router_does_not_read(ranks, monkeypatch):  # noqa: F811
    """vLLM's router reads them; the weights of the shared expert are ours nevertheless."""
    block = Block(monkeypatch)
    monkeypatch.setattr(FusedRouter, "takes", lambda self, logits: False)
    logits = torch.nn.functional.linear(block.x, block.module.gate.weight)
    choice = choose_experts(logits, TOPK)
    monkeypatch.setattr(block.runner.router, "select_experts", lambda **_: choice)
    assert h.same_bits(block.run(), block.expected())


def test_experts_that_vllm_chooses_keep_it_apart(ranks, monkeypatch, log):  # noqa: F811
    block = Block(monkeypatch, router=lambda layer, experts: None)
    assert block.runner.shared_experts is not None
    assert log == ["shared experts with a gate are not merged: the other experts are chosen by vLLM's router"]


def test_code_compiled_with_it_apart_is_not_taken_from_vllms_cache(ranks, monkeypatch):  # noqa: F811
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
def test_a_gate_of_another_kind_keeps_it_apart(ranks, monkeypatch, log, change, reason):  # noqa: F811
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
def test_a_merged_shared_expert_computes_what_the_runner_computed(ranks, monkeypatch, make):  # noqa: F811
    apart = Block(monkeypatch, make, router=lambda layer, experts: None)
    monkeypatch.setattr(
        apart.runner.router, "select_experts", lambda *_, **given: choose_experts(given["router_logits"], TOPK)
    )
    merged = Block(monkeypatch, make)
    assert merged.runner.shared_experts is None is not apart.runner.shared_experts
    assert 0 < h.relative_l2(merged.run(), apart.run()) < 0.01
