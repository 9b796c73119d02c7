"""Which of vLLM's routers our kernel replaces."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.model_executor.layers.fused_moe.router import fused_topk_router
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.layers import vllm
from fp8moe_plugin.layers.experts import Experts
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.router import FusedRouter, fused_router
from fp8moe_plugin.ops import devices
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from tests import helpers as h

pytestmark = pytest.mark.seam

EXPERTS, HIDDEN, TOPK = 32, 2048, 6


OURS = Experts(LayerSpec(MoeShape(TOPK, HIDDEN, 768, EXPERTS, EXPERTS)), {}, ())


def moe_config(pcp_size: int = 1) -> Any:
    return SimpleNamespace(moe_parallel_config=SimpleNamespace(pcp_size=pcp_size))


class OtherRouter(FusedTopKRouter):
    """A subclass, which may choose in any way."""


@pytest.fixture(autouse=True)
def taken_over(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layers whose gate has been taken over."""
    layers: list[Any] = []
    monkeypatch.setattr(vllm.router, "replace_gate", lambda layer, multiprocessors: layers.append(layer))
    return layers


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    h.serve(monkeypatch, h.Recorder())
    monkeypatch.setattr(compat, "returns_routed_experts", lambda: False)


def chosen(
    monkeypatch: pytest.MonkeyPatch, vllms: Any = None, experts: int = EXPERTS, ours: Experts = OURS, **changes: object
) -> FusedRouter | None:
    vllms = vllms or FusedTopKRouter(TOPK, experts)
    monkeypatch.setattr(compat, "runner_of", lambda layer: SimpleNamespace(router=vllms))
    weight = torch.empty(experts, HIDDEN, 768, device="meta")
    plain = {"w2_weight": weight, "expert_map": None, "apply_router_weight_on_input": False}
    return fused_router(SimpleNamespace(**plain | {"moe_config": moe_config()} | changes), ours)


@pytest.mark.parametrize("renormalize", [True, False])
def test_it_stands_in_for_softmax_of_all_experts(monkeypatch, plugin_log, taken_over, renormalize):
    plugin_log.set_level("INFO")
    vllms = FusedTopKRouter(TOPK, EXPERTS, renormalize=renormalize)
    assert chosen(monkeypatch, vllms) == FusedRouter(OURS, vllms)
    assert "experts are chosen by our kernel" in plugin_log.text
    assert len(taken_over) == 1


GROUPS = {"num_expert_group": 8, "topk_group": 2}
OTHER_ROUTERS = {
    "groups": GroupedTopKRouter(TOPK, EXPERTS, **GROUPS),
    "a bias": FusedTopKBiasRouter(TOPK, EXPERTS, e_score_correction_bias=torch.zeros(EXPERTS)),
    "sigmoid": FusedTopKRouter(TOPK, EXPERTS, scoring_func="sigmoid"),
    "a subclass": OtherRouter(TOPK, EXPERTS),
    "load balancing": FusedTopKRouter(TOPK, EXPERTS, eplb_state=SimpleNamespace()),
    "too many choices": FusedTopKRouter(33, EXPERTS),
    "logical experts": FusedTopKRouter(TOPK, EXPERTS - 1),
}


@pytest.mark.parametrize("router", OTHER_ROUTERS.values(), ids=OTHER_ROUTERS)
def test_other_routers_choose_themselves(monkeypatch, taken_over, router):
    assert chosen(monkeypatch, router) is None
    assert not taken_over


def test_ranks_that_share_a_prompt_choose_themselves(monkeypatch):
    assert chosen(monkeypatch, moe_config=moe_config(pcp_size=2)) is None


OTHER_LAYERS = {
    "an expert map": {"expert_map": torch.arange(2)},
    "weights on tokens": {"apply_router_weight_on_input": True},
    "more experts than the kernel takes": {"experts": 520},
}


@pytest.mark.parametrize("changed", OTHER_LAYERS.values(), ids=OTHER_LAYERS)
def test_vllms_router_chooses_for_other_layers(monkeypatch, changed):
    assert chosen(monkeypatch, **changed) is None


def test_the_kernel_chooses_for_layers_without_small_batches(monkeypatch):
    assert chosen(monkeypatch, w2_weight=torch.empty(EXPERTS, 16384, 768, device="meta"))


def test_vllms_router_chooses_if_results_may_not_depend_on_the_batch(monkeypatch):
    ours = Experts(OURS.spec._replace(batch_invariant=True), {}, ())
    assert chosen(monkeypatch, ours=ours) is None


def test_vllms_router_and_gate_stay_if_ours_is_switched_off(monkeypatch, plugin_log, taken_over):
    plugin_log.set_level("INFO")
    with h.environment("FP8MOE_ROUTER", "0"):
        assert chosen(monkeypatch) is None
        assert chosen(monkeypatch) is None
        assert chosen(monkeypatch, expert_map=torch.arange(2)) is None  # which ours would not serve anyway
    assert not taken_over
    assert plugin_log.messages == ["fp8moe: experts are chosen by vLLM's router and gate (FP8MOE_ROUTER=0)"]


def test_vllms_router_chooses_if_vllm_reports_the_experts(monkeypatch):
    monkeypatch.setattr(compat, "returns_routed_experts", lambda: True)
    assert chosen(monkeypatch) is None


@pytest.mark.parametrize("target", [None, "sm_89"])
def test_vllms_router_chooses_where_our_kernel_does_not_run(monkeypatch, target):
    device = target and SimpleNamespace(backend=BACKENDS[target], multiprocessors=132)
    monkeypatch.setattr(devices, "device_of", lambda tensor: device)
    assert chosen(monkeypatch) is None


def test_the_kernel_takes_logits_that_it_knows():
    ours = FusedRouter(OURS, FusedTopKRouter(TOPK, EXPERTS))
    logits = torch.zeros(16, EXPERTS)
    assert ours.takes(logits)
    assert ours.takes(logits.bfloat16()[:3])
    assert ours.takes(torch.zeros(4096, EXPERTS))
    others = logits.half(), logits[:, 1:].contiguous(), torch.zeros(9, 64)[:, ::2]
    others += (torch.zeros(9 * EXPERTS + 1, dtype=torch.bfloat16)[1:].view(9, EXPERTS),)
    assert not any(ours.takes(other) for other in others)


@pytest.mark.parametrize("place", ["model_config", "aux_output_config"])
def test_both_places_say_whether_experts_are_reported(monkeypatch, place):
    monkeypatch.undo()
    for wanted in (True, False):
        config = SimpleNamespace(model_config=SimpleNamespace())
        setattr(config, place, SimpleNamespace(enable_return_routed_experts=wanted))
        monkeypatch.setattr(compat, "get_current_vllm_config", lambda config=config: config)
        assert compat.returns_routed_experts() == wanted


def test_padding_is_what_vllms_router_takes_for_it(monkeypatch):
    if not hasattr(fused_topk_router, "_get_padding_mask"):  # of an older version
        assert compat.padding_of(3) is None
        return
    context = SimpleNamespace(is_padding=torch.arange(9) > 1)
    monkeypatch.setattr(fused_topk_router, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(fused_topk_router, "get_forward_context", lambda: context)
    assert compat.padding_of(3).tolist() == [False, False, True]
    context.is_padding = None
    assert compat.padding_of(3) is None
