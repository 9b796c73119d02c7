"""How ranks share experts and MLPs of any size: in whole scale blocks, loaded by SGLang's loader; without an engine."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.distributed import utils
from sglang.srt.layers import linear, parameter
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe_layer
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import (
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    DeepEPNormalCombineInput,
    DeepEPNormalDispatchOutput,
    StandardDispatchOutput,
)
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend

from fp8moe_plugin.checkpoint.quantization import SCALE
from fp8moe_plugin.checkpoint.shapes import GROUP
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers import kernels
from fp8moe_plugin.layers.sglang import compat, moe
from fp8moe_plugin.layers.sglang.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.sglang.moe import PARAMETERS, Fp8MoeMethod
from fp8moe_plugin.ops import fused_moe, per_token_group_quant_fp8
from tests import helpers as h
from tests.checkpoint.test_shapes import SHARES
from tests.layers.experts import EXPERTS, HIDDEN, TOPK, Checkpoint, make_checkpoint

pytestmark = pytest.mark.seam

QUANT = SimpleNamespace(
    ue8m0=False, online=False, scale=SCALE, weight_block_size=[GROUP, GROUP], get_name=lambda: "fp8moe"
)
KINDS = ("weight", "weight_scale_inv")


@pytest.fixture(params=["as on a CPU", "as on a GPU"], autouse=True)
def slicing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's loaders slice tensors in one way on a CPU and in another elsewhere."""
    for module in (linear, parameter, fused_moe_layer):
        monkeypatch.setattr(module, "_is_cpu", request.param == "as on a CPU")


class Layer(fused_moe_layer.FusedMoE):
    """A layer of experts on one rank, with the loaders of SGLang's."""

    layer_id = 0
    quant_config = QUANT
    uses_expert_location = use_presharded_weights = use_triton_kernels = use_flashinfer_trtllm_moe = False
    should_fuse_routed_scaling_factor_in_topk = _has_fused_shared = False
    moe_ep_rank = _expert_storage_rank = 0
    num_local_experts = _num_local_routed = _num_global_routed = num_experts = EXPERTS

    def __init__(self, intermediate: int, ranks: int, rank: int, experts: int = EXPERTS) -> None:
        torch.nn.Module.__init__(self)
        self.moe_tp_size, self.moe_tp_rank = ranks, rank
        self.moe_runner_config = MoeRunnerConfig(routed_scaling_factor=2.5)
        self.quant_method = Fp8MoeMethod(QUANT, "L", "warmup")
        self.quant_method.create_weights(
            layer=self,
            num_experts=experts,
            hidden_size=HIDDEN,
            intermediate_size_per_partition=intermediate // ranks,
            params_dtype=torch.bfloat16,
            weight_loader=self.weight_loader,
            with_bias=False,
            moe_intermediate_size=intermediate,
        )
        self.quant_method.create_moe_runner(self, self.moe_runner_config)

    def load(self, checkpoint: Checkpoint) -> "Layer":
        for name, tensors in checkpoint.items():
            shard, _, kind = name.partition("_")
            param = getattr(self, f"{'w2' if shard == 'w2' else 'w13'}_{kind}")
            for i, tensor in enumerate(tensors):
                if tensor is not None:
                    param.weight_loader(param, tensor, f"L.{kind}", shard_id=shard, expert_id=i)
        return self

    def finish(self) -> None:
        self.quant_method.process_weights_after_loading(self)

    def parts(self) -> dict[str, torch.Tensor]:
        """Like a checkpoint, of this rank's channels."""
        found = {}
        for kind in KINDS:
            found[f"w1_{kind}"], found[f"w3_{kind}"] = getattr(self, f"w13_{kind}").data.chunk(2, 1)
            found[f"w2_{kind}"] = getattr(self, f"w2_{kind}").data
        return found


def assert_assembled(parts: list[dict[str, torch.Tensor]], checkpoint: dict[str, torch.Tensor], dims: int) -> None:
    """The ranks' parts are the checkpoint's bit by bit, and zeros after it."""
    for name, whole in checkpoint.items():
        dim = dims - 1 if name.startswith("w2") else dims - 2
        assembled, size = torch.cat([part[name] for part in parts], dim), whole.shape[dim]
        assert torch.equal(assembled.narrow(dim, 0, size).float(), whole.float())
        assert not assembled.narrow(dim, size, assembled.shape[dim] - size).float().any()


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), [*SHARES, (512, 2, 256)])
def test_the_ranks_parts_are_the_checkpoint_bit_by_bit_and_zeros_after_it(intermediate, ranks, channels):
    checkpoint, layers = make_checkpoint(intermediate), []
    for rank in range(ranks):
        layers.append(Layer(intermediate, ranks, rank))
        for _ in range(2):  # the second time it is updated
            layers[-1].load(checkpoint).finish()
    assert all(layer.w2_weight.shape == (EXPERTS, HIDDEN, channels) for layer in layers)
    whole = {name: torch.stack(tensors) for name, tensors in checkpoint.items()}
    assert_assembled([layer.parts() for layer in layers], whole, 3)


@pytest.mark.parametrize("name", list(make_checkpoint(256)))
@pytest.mark.parametrize("rank", [0, 7])
def test_a_missing_tensor_is_noticed_on_ranks_of_padding_too(name, rank):
    checkpoint = make_checkpoint(1536)
    checkpoint[name].pop()
    kind = name.partition("_")[2]
    layer = Layer(1536, 8, rank).load(checkpoint)
    with pytest.raises(CheckpointError, match=rf"L\.w.*_{kind} of local expert 2: a tensor is missing"):
        layer.finish()


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", list(make_checkpoint(256)))
def test_a_tensor_of_another_size_or_dtype_is_refused(name, ranks):
    """SGLang's loaders would cut it, pad it or cast it."""
    layer = Layer(1536, ranks, 0)
    for intermediate in (768, 3072):
        with pytest.raises(CheckpointError, match=r"\(w. of expert 0\) has shape .* for 1536 intermediate channels"):
            layer.load({name: make_checkpoint(intermediate)[name]})
    halves = [tensor.half() for tensor in make_checkpoint(1536)[name]]
    with pytest.raises(CheckpointError, match=r"has dtype torch\.float16"):
        layer.load({name: halves})


def called(layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    topk = StandardTopKOutput(weights, ids, torch.empty(0))
    return layer.quant_method.apply(layer, StandardDispatchOutput(x, None, topk)).hidden_states


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_the_experts_compute_what_the_checkpoint_says(tokens, ids):
    layer = Layer(384, 2, 1).load(make_checkpoint(384))
    gen = h.seeded(0, torch.device("cpu"))
    x = h.random_tokens(gen, tokens, HIDDEN)
    before = x.clone()
    weights, experts = h.random_routing(gen, "distinct", tokens, TOPK, EXPERTS)
    experts[1:, 0] = -1  # on another rank
    wanted = fused_moe(x, *(getattr(layer, name) for name in PARAMETERS), weights, experts)
    assert h.same_bits(called(layer, x, weights, experts.to(ids)), wanted)
    assert torch.equal(x, before)


def test_rows_that_pad_the_steps_of_other_ranks_are_zeros_and_change_no_other():
    """With DP attention the experts get the rows of all ranks; the ids of those that pad a rank's are -1."""
    layer = Layer(256, 1, 0).load(make_checkpoint(256))
    gen = h.seeded(5, torch.device("cpu"))
    x, (weights, ids) = h.random_tokens(gen, 8, HIDDEN), h.random_routing(gen, "distinct", 8, TOPK, EXPERTS)
    alone = called(layer, x[:3], weights[:3], ids[:3])
    x[3:], ids[3:] = torch.nan, -1  # what is in such rows is undefined
    padded = called(layer, x, weights, ids)
    assert h.same_bits(padded[:3], alone)
    assert not padded[3:].any()


@pytest.mark.parametrize(("on_gpu", "in_topk", "factor"), [(True, False, 2.5), (True, True, 1), (False, False, 1)])
def test_the_experts_scale_their_result_on_a_gpu_unless_the_router_has(monkeypatch, on_gpu, in_topk, factor):
    """On a CPU SGLang's models do. That they do nowhere else is for a GPU to show."""
    monkeypatch.setattr(moe, "is_cuda", lambda: on_gpu)
    layer = Layer(256, 1, 0).load(make_checkpoint(256))
    layer.should_fuse_routed_scaling_factor_in_topk = in_topk
    gen = h.seeded(1, torch.device("cpu"))
    x, (weights, ids) = h.random_tokens(gen, 5, HIDDEN), h.random_routing(gen, "distinct", 5, TOPK, EXPERTS)
    wanted = fused_moe(x, *(getattr(layer, name) for name in PARAMETERS), weights * factor, ids)
    assert h.same_bits(called(layer, x, weights, ids), wanted)


def test_rows_of_deepep_in_normal_mode_are_summed(monkeypatch):
    """Rows that this rank has received, with local ids and -1; the model applies the factor."""
    monkeypatch.setattr(moe, "is_cuda", lambda: True)
    layer = Layer(256, 1, 0).load(make_checkpoint(256))
    gen = h.seeded(2, torch.device("cpu"))
    x, (weights, ids) = h.random_tokens(gen, 7, HIDDEN), h.random_routing(gen, "some_missing", 7, TOPK, EXPERTS)
    received = DeepEPNormalDispatchOutput(x, None, ids.long(), weights, [])
    found = layer.quant_method.apply(layer, received)
    assert type(found) is DeepEPNormalCombineInput
    wanted = fused_moe(x, *(getattr(layer, name) for name in PARAMETERS), weights, ids)
    assert h.same_bits(found.hidden_states, wanted)
    assert (found.topk_ids is received.topk_ids, found.topk_weights is weights) == (True, True)


def test_slabs_of_deepep_in_low_latency_mode_are_computed_per_expert():
    """What is past the counts is uninitialized, and scales are column-major."""
    layer = Layer(256, 1, 0).load(make_checkpoint(256))
    slab, counts = 6, torch.tensor([6, 0, 3], dtype=torch.int32)
    x = h.random_tokens(h.seeded(3, torch.device("cpu")), EXPERTS * slab, HIDDEN)
    q, scales = per_token_group_quant_fp8(x)
    rows = q.view(EXPERTS, slab, HIDDEN)
    columns = scales.view(EXPERTS, slab, -1).mT.contiguous().mT
    for expert, count in enumerate(counts.tolist()):
        h.bits(rows)[expert, count:], columns[expert, count:] = 0x7F, torch.nan
    ids, weights = torch.zeros(4, TOPK, dtype=torch.int64), torch.ones(4, TOPK)
    found = layer.quant_method.apply(layer, DeepEPLLDispatchOutput(rows, columns, ids, weights, counts, 3))
    assert type(found) is DeepEPLLCombineInput
    assert found.hidden_states.shape == (EXPERTS, slab, HIDDEN)
    one = torch.ones(1, 1)
    for expert, count in enumerate(counts.tolist()):
        tensors = [getattr(layer, name)[expert : expert + 1] for name in PARAMETERS]
        for row in range(count):
            token = x[expert * slab + row][None]
            wanted = fused_moe(token, *tensors, one, torch.zeros(1, 1, dtype=torch.int32))
            assert (found.hidden_states[expert, row] - wanted).norm() < 0.005 * wanted.norm()


@pytest.mark.parametrize(
    ("mode", "differ", "wanted"),
    [
        ("auto", True, {"normal_dispatcher_output_dtype": "bf16", "low_latency_dispatcher_output_dtype": "fp8"}),
        ("normal", False, {"dispatcher_output_dtype": "bf16"}),
        ("low_latency", False, {"dispatcher_output_dtype": "fp8"}),
    ],
)
def test_deepep_is_asked_for_the_rows_of_each_mode(monkeypatch, plugin_log, mode, differ, wanted):
    for module in (moe, compat):
        monkeypatch.setattr(module, "get_deepep_mode", lambda: DeepEPMode(mode))
    monkeypatch.setattr(moe, "get_moe_a2a_backend", lambda: MoeA2ABackend("deepep"))
    monkeypatch.setattr(compat, "rows_differ_by_mode", lambda: differ)
    monkeypatch.setattr(kernels, "_announced", set())
    layer, asked = Layer(256, 1, 0).load(make_checkpoint(256)), []
    layer.dispatcher = SimpleNamespace(set_quant_config=asked.append)
    with plugin_log.at_level("INFO"):
        layer.finish()
    assert asked == [wanted]
    layouts = {"normal": ["contiguous"], "low_latency": ["masked"], "auto": ["contiguous", "masked"]}[mode]
    assert [line for line in plugin_log.messages if "serves the experts" in line and "layout" in line] == [
        f"fp8moe serves the experts: backend reference, layout {layout}, 0 kernels loaded in 0.00 s (none needed)"
        for layout in layouts
    ]


class Quantized(SimpleNamespace):
    """A checkpoint's configuration, for layers outside of a model."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Fp8MoeLinearMethod:
        return Fp8MoeLinearMethod(QUANT, prefix, "warmup")


@pytest.fixture
def make_mlp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes the `gate_up_proj` and `down_proj` of an MLP on one rank of several."""

    def make(intermediate: int, ranks: int, rank: int) -> tuple[torch.nn.Module, torch.nn.Module]:
        of_rank = {"tp_rank": rank, "tp_size": ranks}
        if hasattr(utils, "get_group_rank_size"):  # SGLang 0.5.22
            of_rank = {}
            for module in (utils, linear):
                monkeypatch.setattr(module, "get_group_rank_size", lambda group: (rank, ranks))
            monkeypatch.setattr(linear, "_resolve_linear_group", lambda group: SimpleNamespace(world_size=ranks))
        options = {"quant_config": Quantized(), "bias": False, "params_dtype": torch.bfloat16, **of_rank}
        gate_up = linear.MergedColumnParallelLinear(HIDDEN, [intermediate] * 2, prefix="mlp.gate_up_proj", **options)
        return gate_up, linear.RowParallelLinear(intermediate, HIDDEN, prefix="mlp.down_proj", **options)

    return make


def load_mlp(mlp: tuple[torch.nn.Module, torch.nn.Module], checkpoint: Checkpoint) -> None:
    """Expert 0 of a checkpoint, as the MLP."""
    gate_up, down = mlp
    for name, tensors in checkpoint.items():
        shard, _, kind = name.partition("_")
        param = getattr(down if shard == "w2" else gate_up, kind)
        if tensors[0] is not None:
            param.weight_loader(param, tensors[0], *{"w1": [0], "w3": [1], "w2": []}[shard])


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), [*SHARES, (512, 2, 256)])
def test_the_ranks_of_an_mlp_hold_the_checkpoint_bit_by_bit_and_zeros_after_it(make_mlp, intermediate, ranks, channels):
    checkpoint, parts = make_checkpoint(intermediate), []
    for rank in range(ranks):
        gate_up, down = mlp = make_mlp(intermediate, ranks, rank)
        for _ in range(2):  # the second time it is updated
            load_mlp(mlp, checkpoint)
            for half in mlp:
                half.quant_method.process_weights_after_loading(half)
        assert gate_up.weight.shape == (2 * channels, HIDDEN)
        parts.append({f"w2_{kind}": getattr(down, kind).data for kind in KINDS})
        for kind in KINDS:
            parts[-1][f"w1_{kind}"], parts[-1][f"w3_{kind}"] = getattr(gate_up, kind).data.chunk(2)
    assert_assembled(parts, {name: tensors[0] for name, tensors in checkpoint.items()}, 2)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_tensor_of_an_mlp_of_another_size_is_refused(make_mlp, ranks):
    for name, intermediate in itertools.product(make_checkpoint(256), (256, 1024)):
        with pytest.raises(CheckpointError, match=r"mlp\.(gate_up|down)_proj.* has shape .*Check that config"):
            load_mlp(make_mlp(512, ranks, ranks - 1), {name: make_checkpoint(intermediate)[name]})


@pytest.mark.parametrize("name", list(make_checkpoint(256)))
def test_a_missing_tensor_of_an_mlp_is_noticed(make_mlp, name):
    checkpoint = make_checkpoint(256)
    checkpoint[name][0] = None
    gate_up, down = mlp = make_mlp(256, 1, 0)
    load_mlp(mlp, checkpoint)
    half, kind = down if name.startswith("w2") else gate_up, name.partition("_")[2]
    with pytest.raises(CheckpointError, match=rf"mlp\..*\.{kind}: a tensor is missing"):
        half.quant_method.process_weights_after_loading(half)
