"""Ops launch what their plans say, and only kernels that a layer loads when serving starts."""

import pytest
import torch

from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.jit.launch import Launch, TensorMap
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.launches.operands import LayerAddresses
from fp8moe_plugin.launches.sm90.layer import layer_launches
from fp8moe_plugin.ops import batched_experts, fp8_linear, fused_moe, routed_moe, router_gemm
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.sm90.catalog import (
    choose_experts_key,
    combine_key,
    count_experts_key,
    pack_mxfp4_key,
)
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, SortedStep
from fp8moe_plugin.plan.spec import Arrival, MoeShape
from fp8moe_plugin.plan.tuning import DENSE_WAVE_K, EARLY_FROM, GATHER_UP_TO, LONG_K
from tests import helpers as h
from tests.mxfp4 import random_experts

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 128, 4, 2
COPIES_FROM = GATHER_UP_TO + 128  # channels of experts that read copies of their tokens
CPU = torch.device("cpu")
ADDRESSES = LayerAddresses(*(2**40 + i * 2**36 for i in range(len(LayerAddresses._fields))))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> h.Recorder:
    recorder = h.Recorder()
    h.serve(monkeypatch, recorder)
    return recorder


def launches_of(device: h.Recorder, step: SortedStep | SmallBatchStep) -> dict[str, Launch]:
    """Returns the launches of a layer by kernel name; that of GEMM 1 is "gate_up"."""
    launches = layer_launches(step, ADDRESSES, False)
    names = ("gate_up" if launch.key == step.gate_up else launch.key.source for launch in launches)
    return dict(zip(names, launches, strict=True))


@pytest.mark.parametrize("tokens", [17, 48, 383, 384, 1000])
@pytest.mark.parametrize("intermediate", [INTERMEDIATE, EARLY_FROM, COPIES_FROM])
def test_kernels_that_start_early_follow_those_they_may_overlap(device, tokens, intermediate):
    """GEMM 2 overlaps with GEMM 1, which counts finished rows; quantize overlaps with route if GEMM 1 gathers."""
    step = h.plan_step(MoeShape(TOPK, HIDDEN, intermediate, EXPERTS, EXPERTS), tokens)
    assert isinstance(step, SortedStep)
    launches = launches_of(device, step)
    first, second = launches["gate_up"], launches[step.down.source]
    pdl = {name for name, launch in launches.items() if launch.pdl}
    expected = {"route"}  # waits before it does anything, unless it follows count_experts
    expected |= {"quantize"} if step.gathers else set()
    expected |= {step.down.source} if step.pdl_down else set()
    expected |= {"gate_up", "combine"} if step.tile.streams_weights else set()
    assert pdl == expected
    assert (first.args.done_counters != 0) == (second.args.done_counters != 0) == step.pdl_down
    assert launches["route"].args.done_counters
    assert first.args.done_counters in (0, launches["route"].args.done_counters)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_layers_launch_what_their_plan_names_and_nothing_else(device, ue8m0):
    gen = h.seeded(0, CPU)
    hiddens = (HIDDEN, 2048, 4096, 4224)  # one for each small-batch kernel
    for hidden, intermediate in (*((hidden, INTERMEDIATE) for hidden in hiddens), (HIDDEN, COPIES_FROM)):
        layer = h.random_layer(gen, EXPERTS, hidden, intermediate)
        for tokens in (1, 7, 9, 16, 64, 128, 129, 1000):
            x = h.random_tokens(gen, tokens, hidden)
            weights, ids = torch.rand(tokens, TOPK), torch.zeros(tokens, TOPK, dtype=torch.int32)
            fused_moe(x, *layer, weights, ids, ue8m0=ue8m0)
            fused_moe(x, *layer, weights, ids.long(), ue8m0=ue8m0)
            routed_moe(x, *layer, torch.zeros(tokens, EXPERTS), TOPK, ue8m0=ue8m0)
            router_gemm(x, torch.zeros(EXPERTS, hidden).bfloat16())
    assert device.keys == set(h.moe_kernels(ue8m0))


@pytest.mark.parametrize(("tokens", "small"), [(1, True), (16, True), (17, False), (1000, False)])
def test_a_small_batch_starts_while_its_experts_are_chosen(device, tokens, small):
    layer, x = h.random_layer(h.seeded(0, CPU), EXPERTS, 2048, INTERMEDIATE), torch.zeros(tokens, 2048).bfloat16()
    routed_moe(x, *layer, torch.zeros(tokens, EXPERTS), TOPK)
    choice, first, *others = device.launches
    last = others[-1]
    assert (choice.key, choice.pdl, choice.grid) == (choose_experts_key(), True, -(-tokens // 4))
    assert (first.pdl, [launch.pdl for launch in others] == [True]) == (first.key != count_experts_key(), small)
    for launch in (first, *others):
        assert getattr(launch.args, "ids", choice.args.ids) == choice.args.ids
    weights = first.args.topk_weights if small else last.args.weights
    assert (weights, last.key == combine_key()) == (choice.args.weights, not small)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_batched_experts_launch_what_their_plan_names_and_nothing_else(device, ue8m0):
    layer = h.random_layer(h.seeded(0, CPU), EXPERTS, HIDDEN, INTERMEDIATE)
    tokens = torch.zeros(EXPERTS, 8, HIDDEN).to(h.FP8), torch.ones(EXPERTS, 8, HIDDEN // 128)
    for expected_m in (1, 64, 65, 1000):
        counts = torch.zeros(EXPERTS, dtype=torch.int32)
        batched_experts(*tokens, *layer, counts, expected_m=expected_m, ue8m0=ue8m0)
    many_channels = h.random_layer(h.seeded(0, CPU), EXPERTS, HIDDEN, COPIES_FROM)
    batched_experts(*tokens, *many_channels, counts, expected_m=1000, ue8m0=ue8m0)
    assert device.keys == set(h.moe_kernels(ue8m0, Arrival.BATCHED))


def test_batched_packed_experts_launch_what_their_plan_names_and_nothing_else(device):
    layer = random_experts(h.seeded(0, CPU), EXPERTS, HIDDEN, INTERMEDIATE, 0).packed()
    tokens = torch.zeros(EXPERTS, 8, HIDDEN).to(h.FP8), torch.ones(EXPERTS, 8, HIDDEN // 128)
    counts = torch.zeros(EXPERTS, dtype=torch.int32)
    for expected_m in (1, 1000):
        batched_experts(*tokens, *layer, counts, expected_m=expected_m, weights=PACKED_MXFP4)
    kernels = BACKENDS[SM90].layer_kernels(h.layer_spec(weights=PACKED_MXFP4), Arrival.BATCHED)
    assert device.keys == set(kernels) - {pack_mxfp4_key()}  # which runs while weights are loaded
    assert len(kernels) == 6


@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_linear_layer_launches_what_its_plan_names_and_nothing_else(device, ue8m0):
    gen = h.seeded(0, CPU)
    for n, k in ((64, LONG_K), (4096, 128), (16384, 128)):
        weight = h.random_weights(gen, n, k)
        for tokens in (1, 64, 65, 1024):
            fp8_linear(h.random_tokens(gen, tokens, k), *weight, ue8m0=ue8m0)
    for tokens, n in ((2048, 2112), (4096, 2112), (3072, 2112), (1024, 4096)):  # one for each tile of clusters
        weight = h.random_weights(gen, n, DENSE_WAVE_K)
        fp8_linear(h.random_tokens(gen, tokens, DENSE_WAVE_K), *weight, ue8m0=ue8m0)
    assert device.keys == set(h.linear_kernels(ue8m0))


@pytest.mark.parametrize(
    ("tokens", "hidden", "fetched"),
    [(1, 7168, (128, 128)), (64, 2048, (128, 128)), (64, 7168, (256, 128)), (8192, 2048, (256, 256))],
)
def test_l2_fetches_single_lines_of_weights_that_are_read_once(device, tokens, hidden, fetched):
    """Except for long rows that a block reads from end to end."""
    step = h.plan_step(MoeShape(8, hidden, 256, 128, 128), tokens)
    maps = [arg for launch in layer_launches(step, ADDRESSES, False) for arg in launch.args]
    by_address = {arg.address: arg.l2_fetch for arg in maps if isinstance(arg, TensorMap)}
    assert (by_address[ADDRESSES.w13], by_address[ADDRESSES.w2]) == fetched


def test_launches_name_each_argument_of_their_kernel(device):
    key = combine_key()
    arguments = {"rows": 1, "slots": 2, "weights": 3, "out": 4, "vectors": 5, "topk": 6, "weight_columns": 0}
    arguments["routed_scale"] = 7
    assert key.arguments(**arguments) == (1, 2, 3, 4, 5, 6, 0, 7)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'topk'"):
        key.arguments(**{name: value for name, value in arguments.items() if name != "topk"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'hidden'"):
        key.arguments(**arguments, hidden=7)
