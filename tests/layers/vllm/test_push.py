"""Whether a layer under vLLM stores tokens into the windows of other ranks, and in which steps."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.layers.vllm import push
from fp8moe_plugin.layers.vllm.push import PushedExperts, pushed_experts
from fp8moe_plugin.plan.keys import SM90
from tests import helpers as h
from tests.checkpoint.test_model import V3, describe
from tests.layers.vllm.one_rank import step_of
from warmup.all_to_all import all_to_all

pytestmark = pytest.mark.seam


def engine(elastic: bool = False, sleeps: bool = False) -> SimpleNamespace:
    parallel, model = SimpleNamespace(enable_elastic_ep=elastic), SimpleNamespace(enable_sleep_mode=sleeps)
    return SimpleNamespace(parallel_config=parallel, model_config=model)


ENGINE = engine()
LAYER = SimpleNamespace(apply_router_weight_on_input=False, expert_map=torch.tensor([0, -1]))
NO_PARALLEL = FusedMoEParallelConfig.make_no_parallel()
TWO = dataclasses.replace(NO_PARALLEL, dp_size=2, ep_size=2, use_ep=True, all2all_backend="allgather_reducescatter")


@pytest.fixture
def switched_on():
    with h.environment("FP8MOE_EP", "push"):
        yield


@pytest.mark.parametrize(
    ("parallel", "changes", "why"),
    [
        (NO_PARALLEL, {}, "no data parallelism with --enable-expert-parallel"),
        (dataclasses.replace(TWO, all2all_backend="deepep_low_latency"), {}, "no data parallelism with"),
        (dataclasses.replace(TWO, ep_size=4), {}, "a group of which several ranks have the same tokens"),
        (TWO, {"engine": engine(elastic=True)}, "elastic expert"),
        (TWO, {"engine": engine(sleeps=True)}, "sleep mode"),
        (TWO, {"layer": SimpleNamespace(apply_router_weight_on_input=True)}, "a router whose weights multiply"),
        (TWO, {}, "a device without our CUDA kernels"),
    ],
)
def test_vllms_all_to_all_is_used_and_the_log_says_why(switched_on, plugin_log, parallel, changes, why):
    layer, moe = changes.get("layer", LAYER), SimpleNamespace(moe_parallel_config=parallel)
    assert pushed_experts(layer, moe, SimpleNamespace(), changes.get("engine", ENGINE)) is None
    assert plugin_log.messages[-1].startswith(
        f"fp8moe: FP8MOE_EP=push: vLLM's all-to-all is used, because there is {why}"
    )


def test_the_log_says_what_ranks_wait_for(switched_on, plugin_log, monkeypatch):
    """A rank without the variable leaves the others waiting."""
    said = []
    monkeypatch.setattr(push, "backend_of", lambda tensor: SimpleNamespace(target=SM90, tuning=None))
    monkeypatch.setattr(push, "get_ep_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(push, "window_refusal", lambda *_: said.extend(plugin_log.messages) or "a reason")
    plugin_log.set_level("INFO", logger="fp8moe")
    experts = SimpleNamespace(spec=SimpleNamespace(shape=SimpleNamespace(hidden=256)))
    assert pushed_experts(LAYER, SimpleNamespace(moe_parallel_config=TWO), experts, ENGINE) is None
    assert said == ["fp8moe: FP8MOE_EP=push: waiting for all ranks. If no other line follows, one has not set it"]


def test_it_is_off_by_default(plugin_log):
    assert pushed_experts(LAYER, None, SimpleNamespace(), ENGINE) is None
    assert not plugin_log.messages


@pytest.mark.parametrize(("sizes", "fits"), [([8, 1], True), ([9, 1], False)])
def test_all_ranks_agree_on_the_steps_that_fit(monkeypatch, sizes, fits):
    step_of(monkeypatch, sizes)
    experts = PushedExperts(SimpleNamespace(), SimpleNamespace(rows=8), torch.zeros(0))
    assert [experts.fits(tokens) for tokens in sizes] == [fits, fits]


@pytest.mark.parametrize(("sizes", "rows"), [([0, 3], 3), ([0, 0], 1)])
def test_all_ranks_call_with_the_longest_of_them(monkeypatch, sizes, rows):
    step_of(monkeypatch, sizes)
    experts = SimpleNamespace(run_pushed=lambda window, owners, rows, *tensors: rows)
    called = PushedExperts(experts, SimpleNamespace(rows=8), torch.zeros(0)).run(*[torch.zeros(0)] * 4)
    assert called == rows


def test_owners_of_experts_that_are_dealt_out_in_turn(monkeypatch):
    monkeypatch.setattr(push, "get_ep_group", lambda: SimpleNamespace(world_size=2, cpu_group=None))

    def gather_maps(maps, mine, group):
        maps[:] = [mine, ~mine]

    monkeypatch.setattr(push.dist, "all_gather_object", gather_maps)
    assert push._owners(torch.tensor([0, -1, 1, -1], dtype=torch.int32)).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("tp", [1, 2])
def test_explain_says_which_windows_are_opened(switched_on, plugin_log, monkeypatch, tmp_path, tp):
    """One for all layers of these sizes."""
    opened = []
    group = SimpleNamespace(world_size=8, device_group=object(), cpu_group=None)
    monkeypatch.setattr(push, "get_ep_group", lambda: group)
    monkeypatch.setattr(push, "open_group_window", lambda *sizes: opened.append(sizes[2:6]) or len(opened))
    monkeypatch.setattr(push, "_windows", {})
    plugin_log.set_level("INFO", logger="fp8moe")
    options = engine()
    options.parallel_config.tensor_parallel_size = tp
    options.scheduler_config = SimpleNamespace(max_num_batched_tokens=4096)
    assert [push._window(7168, 8, 256, torch.device("cpu"), options) for _ in range(2)] == [1, 1]
    found = all_to_all(read_model(describe(tmp_path, V3)), Parallel(tp, 8 // tp, ep=8), 4096)
    assert opened == [(found.window_rows, 7168, 8, 256)]
    (message,) = plugin_log.messages
    assert f"{found.why.rstrip('.')}. ".startswith(f"{message.removeprefix('fp8moe: ')}. ")
