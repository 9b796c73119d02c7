"""vLLM's `DeepseekV2MoE` and its runner, with and without a merged shared expert; no model around it and no engine."""

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMulWithClamp
from vllm.model_executor.models import deepseek_v2
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLP, DeepseekV2MoE

from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig
from fp8moe_plugin.layers.vllm.router import FusedRouter
from fp8moe_plugin.ops import choose_experts, fused_moe
from tests import helpers as h
from tests.layers.experts import EXPERTS, HIDDEN, TOPK, make_checkpoint
from tests.layers.vllm.moe_block import PREFIX, TOKENS, MoeBlock
from tests.layers.vllm.one_rank import load_experts, load_mlp

pytestmark = pytest.mark.seam

INTERMEDIATE, SCALE = 256, 2.5
CHECKPOINT = make_checkpoint(INTERMEDIATE)
MODEL = SimpleNamespace(
    routed_scaling_factor=SCALE,
    n_routed_experts=EXPERTS,
    n_shared_experts=1,
    hidden_act="silu",
    hidden_size=HIDDEN,
    moe_intermediate_size=INTERMEDIATE,
    num_experts_per_tok=TOPK,
    norm_topk_prob=True,
    n_group=1,
    topk_group=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)


class Block(MoeBlock):
    """A block whose router always chooses the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: SimpleNamespace = MODEL) -> None:
        options: dict[str, bool] = {}
        if "apply_routed_scale_to_output" in inspect.signature(DeepseekV2MoE).parameters:  # 0.25.1 always does
            options["apply_routed_scale_to_output"] = True

        def make(config: VllmConfig, quantized: Fp8MoeConfig) -> torch.nn.Module:
            return DeepseekV2MoE(model, config.parallel_config, quant_config=quantized, prefix=PREFIX, **options)

        super().__init__(monkeypatch, make, "shared_experts")
        self.routing = h.random_routing(self.gen, "distinct", TOKENS, TOPK, EXPERTS)
        monkeypatch.setattr(self.module.gate, "forward", lambda x: (x[:, :EXPERTS], None))  # made for engines
        monkeypatch.setattr(self.runner.router, "select_experts", lambda *_, **__: self.routing)

    def load(self) -> None:
        load_experts(self.experts, CHECKPOINT)
        width = self.mlp.down.weight.shape[1] // INTERMEDIATE
        wide = {
            name: [torch.cat([t] * width, 1 if name.startswith("w2") else 0) for t in ts]
            for name, ts in CHECKPOINT.items()
        }
        load_mlp(self.mlp, wide, 1)

    def expected(self) -> torch.Tensor:
        return fused_moe(self.x, *self.tensors(), *self.routing, shared_expert=True, routed_scale=SCALE)


def test_the_runner_returns_what_the_experts_compute(ranks, monkeypatch):
    block = Block(monkeypatch)
    assert block.runner.shared_experts is None
    assert block.config.additional_config
    assert h.same_bits(block.run(), block.expected())


def test_a_setting_leaves_the_shared_expert_to_the_runner(ranks, monkeypatch):
    with h.environment("FP8MOE_MERGE_SHARED_EXPERT", "0"):
        block = Block(monkeypatch)
    assert block.runner.shared_experts is not None
    assert not block.config.additional_config
    assert 0 < h.relative_l2(block.run(), block.expected()) < 0.005


def test_a_shared_expert_with_another_limit_is_left_to_the_runner(ranks, monkeypatch):
    """As vLLM's `DeepseekV2MoE` passes no limit to the experts."""

    def limited(**options: object) -> DeepseekV2MLP:
        mlp = DeepseekV2MLP(**options)
        mlp.act_fn = SiluAndMulWithClamp(10.0)
        return mlp

    monkeypatch.setattr(deepseek_v2, "DeepseekV2MLP", limited)
    block = Block(monkeypatch)
    assert block.runner.shared_experts is not None
    assert 0 < h.relative_l2(block.run(), block.expected()) < 0.005


def test_two_shared_experts_are_left_to_the_runner(ranks, monkeypatch):
    block = Block(monkeypatch, SimpleNamespace(**vars(MODEL) | {"n_shared_experts": 2}))
    assert block.runner.shared_experts is not None
    assert block.run().isfinite().all()


@pytest.mark.parametrize("part", ["experts", "mlp"])
def test_parameters_that_were_moved_are_left_to_the_runner(ranks, monkeypatch, part):
    load = Block.load

    def moved(block: Block) -> None:
        parameter = block.experts.w2_weight if part == "experts" else block.mlp.down.weight
        parameter.data = parameter.data.clone()
        load(block)

    monkeypatch.setattr(Block, "load", moved)
    block = Block(monkeypatch)
    assert block.runner.shared_experts is not None
    assert h.relative_l2(block.run(), block.expected()) < 0.005


def test_a_runner_of_another_kind_keeps_its_shared_expert(ranks, monkeypatch):
    load = Block.load

    def changed(block: Block) -> None:
        block.runner.__class__ = type("OtherRunner", (type(block.runner),), {})
        load(block)

    monkeypatch.setattr(Block, "load", changed)
    block = Block(monkeypatch)
    assert block.runner.shared_experts is not None
    assert h.relative_l2(block.run(), block.expected()) < 0.005


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])  # it does not read float16
def test_the_runner_leaves_the_choice_of_experts_to_our_kernel(ranks, monkeypatch, dtype):
    block = Block(monkeypatch, SimpleNamespace(**vars(MODEL) | {"n_shared_experts": 2}))  # these stay apart
    logits, router, method = (
        block.x[:, :EXPERTS].contiguous().to(dtype),
        block.runner.router,
        block.experts.quant_method,
    )
    monkeypatch.setattr(block.module.gate, "forward", lambda x: (logits, None))
    by_router, by_kernel = block.routing, choose_experts(logits.bfloat16(), TOPK, renormalize=False)
    block.routing = by_kernel if dtype == torch.bfloat16 else by_router
    expected = block.run()
    block.routing = by_router
    assert not h.same_bits(by_kernel[0], by_router[0])
    softmax = {"top_k": TOPK, "renormalize": False, "global_num_experts": EXPERTS}
    ours = FusedRouter(method.local_experts, SimpleNamespace(**softmax, select_experts=router.select_experts))
    monkeypatch.setattr(method, "router", ours)
    assert block.runner.is_monolithic
    assert h.same_bits(block.run(), expected)
