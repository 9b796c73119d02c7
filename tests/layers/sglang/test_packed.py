"""Experts that stay in MXFP4 in SGLang: each rank holds exactly its part of the checkpoint's weights, packed."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.layers.moe.token_dispatcher import DeepEPLLDispatchOutput

from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import CHUNK_BYTES, MXFP4, PACKED_MXFP4
from fp8moe_plugin.formats.spec import SCALE, QuantSpec
from fp8moe_plugin.layers import pack, recode
from fp8moe_plugin.layers.recode import to_device
from fp8moe_plugin.layers.sglang import moe
from fp8moe_plugin.layers.sglang.loads import Loads
from tests import helpers as h
from tests.layers.cached import cached_tensors
from tests.layers.experts import EXPERTS, HIDDEN, TOPK, Checkpoint
from tests.layers.packed import assert_equal, assert_holds, exponents_of, part_of, wanted_of, weights_of, wide
from tests.layers.sglang import layers
from tests.layers.sglang.layers import Layer, called, in_mxfp4

pytestmark = pytest.mark.seam
PACKED = QuantSpec(PACKED_MXFP4, recoded_from=MXFP4)
INTERMEDIATE = 256


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The options of SGLang's command line."""
    args = SimpleNamespace(enable_eplb=False)
    monkeypatch.setattr(moe, "get_server_args", lambda: args)
    monkeypatch.setattr(layers.QUANT, "spec", PACKED)
    monkeypatch.setattr(layers.QUANT, "loads", Loads(SCALE))
    return args


def second() -> Checkpoint:
    return {name: tensors[::-1] for name, tensors in in_mxfp4(INTERMEDIATE).items()}


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize(("intermediate", "ranks", "part"), [(256, 1, 256), (512, 2, 256), (320, 2, 256)])
def test_ranks_hold_their_part(intermediate, ranks, part, widened):
    checkpoint = in_mxfp4(intermediate)
    if widened:
        checkpoint = wide(wide(checkpoint, 1, "w3", "w2"), 2, "w1")
    backwards = dict(reversed(checkpoint.items()))  # exponents before the codes
    for rank, given in itertools.product(range(ranks), (checkpoint, backwards)):
        layer = Layer(intermediate, ranks, rank).load(given)
        layer.finish()
        for expert in range(EXPERTS):
            assert_equal(weights_of(layer, expert), part_of(checkpoint, expert, rank, part, ranks))
        layers.QUANT.loads.finish()


@pytest.mark.parametrize("half", ["w1_weight", "w1_weight_scale_inv"])
def test_a_call_of_the_model_that_fails_leaves_no_half(half):
    layer, halves = Layer(INTERMEDIATE, 1, 0), layers.QUANT.loads.halves

    def load_weights(weights):
        list(weights)
        layer.load({half: in_mxfp4(INTERMEDIATE)[half][:1]})
        assert halves.waiting
        raise OSError("disk")

    model = SimpleNamespace(load_weights=load_weights, named_modules=list)
    layers.QUANT.loads.follow(model)
    with pytest.raises(CheckpointError, match="disk"):
        model.load_weights([])
    assert not halves.waiting


def slow_to_device(*args, copy=False):
    time.sleep(0.002)
    return to_device(*args, copy=copy)


@pytest.mark.parametrize("spec", [PACKED, QuantSpec(FP8_BLOCK, recoded_from=MXFP4)])
def test_tensors_may_arrive_on_several_threads(monkeypatch, spec):
    """SGLang's DeepSeek-V4 passes tensors on the host to a pool of threads, each on its own."""
    monkeypatch.setattr(layers.QUANT, "spec", spec)
    for module in (recode, pack):
        monkeypatch.setattr(module, "to_device", slow_to_device)  # other threads run meanwhile
    checkpoint = in_mxfp4(INTERMEDIATE)
    for _ in range(3):
        layer = Layer(INTERMEDIATE, 1, 0)
        halves = [(name, expert) for expert in range(EXPERTS) for name in sorted(checkpoint)]
        with ThreadPoolExecutor(8) as pool:
            parts = [{name: [None] * expert + [checkpoint[name][expert]]} for name, expert in halves]
            list(pool.map(layer.load, parts))
        layer.finish()
        layers.QUANT.loads.finish()
        if spec is PACKED:
            assert_holds(layer, checkpoint)


@pytest.mark.parametrize("spec", [PACKED, QuantSpec(FP8_BLOCK, recoded_from=MXFP4)])
def test_no_cached_tensor_outlives_a_load(monkeypatch, spec):
    """SGLang may release what was allocated while it loaded weights, without a backup."""
    monkeypatch.setattr(layers.QUANT, "spec", spec)
    Layer(INTERMEDIATE, 1, 0).load(in_mxfp4(INTERMEDIATE)).finish()
    assert not list(cached_tensors())


def test_parameters_without_weights_are_valid():
    """An engine may load none, and kernels read tables by the bytes of exponents."""
    layer = Layer(INTERMEDIATE, 1, 0)
    for weight in (layer.w13_weight, layer.w2_weight):
        assert not weight.any()
    assert layer.w13_weight_scale_inv.isnan().all()


def test_a_rank_of_whole_experts_holds_its_own(monkeypatch):
    """With expert parallelism; wide experts of other ranks cost it nothing."""
    for name in ("num_local_experts", "_num_local_routed", "_expert_storage_rank", "moe_ep_rank"):
        monkeypatch.setattr(Layer, name, 1)
    checkpoint = wide(in_mxfp4(INTERMEDIATE), 0, "w1", "w2")
    layer = Layer(INTERMEDIATE, 1, 0, experts=1).load(checkpoint)
    layers.QUANT.loads.finish()
    assert_equal(weights_of(layer, 0), wanted_of(checkpoint, 1))
    assert layer.w2_weight.shape == (1, HIDDEN // 128, INTERMEDIATE // 128 * CHUNK_BYTES)


@pytest.mark.parametrize("widened", [False, True])
def test_a_layer_computes_as_in_block_fp8(monkeypatch, widened):
    """Bit by bit; with wide blocks, which block FP8 does not represent, as close as float32 math."""
    checkpoint = in_mxfp4(INTERMEDIATE)
    gen = h.seeded(0, torch.device("cpu"))
    x, (weights, ids) = h.random_tokens(gen, 9, HIDDEN), h.random_routing(gen, "distinct", 9, TOPK, EXPERTS)
    given = wide(checkpoint, 1, "w1", "w2") if widened else checkpoint
    found = called(Layer(INTERMEDIATE, 1, 0).load(given), x, weights, ids)
    if not widened:
        monkeypatch.setattr(layers.QUANT, "spec", QuantSpec(FP8_BLOCK, recoded_from=MXFP4))
        assert h.same_bits(found, called(Layer(INTERMEDIATE, 1, 0).load(checkpoint), x, weights, ids))
        return
    exact = [{name: weight.float() for name, weight in wanted_of(given, expert).items()} for expert in range(EXPERTS)]
    wanted = torch.zeros_like(x, dtype=torch.float32)
    for token, chosen in enumerate(ids.tolist()):
        for weight, expert in zip(weights[token], chosen, strict=True):
            gate, up = (exact[expert][name] @ x[token].float() for name in ("w1", "w3"))
            wanted[token] += weight * (exact[expert]["w2"] @ (torch.nn.functional.silu(gate) * up))
    assert h.relative_l2(found, wanted) < 0.06


def test_slabs_of_deepep_are_computed_as_in_block_fp8(monkeypatch):
    """In its low-latency mode."""
    counts, slab = torch.tensor([6, 0, 3], dtype=torch.int32), 6
    rows, scales = h.random_quantized(h.seeded(0, torch.device("cpu")), EXPERTS, slab, HIDDEN)
    ids, weights = torch.zeros(4, TOPK, dtype=torch.int64), torch.ones(4, TOPK)
    received = DeepEPLLDispatchOutput(rows, scales.mT.contiguous().mT, ids, weights, counts, 3)
    found = []
    for spec in (PACKED, QuantSpec(FP8_BLOCK, recoded_from=MXFP4)):
        monkeypatch.setattr(layers.QUANT, "spec", spec)
        layer = Layer(INTERMEDIATE, 1, 0).load(in_mxfp4(INTERMEDIATE))
        layer.finish()
        found.append(layer.quant_method.apply(layer, received).hidden_states)
    for expert, count in enumerate(counts.tolist()):
        assert h.same_bits(*(out[expert, :count] for out in found))


@pytest.mark.parametrize("name", ["w1_weight", "w2_weight_scale_inv"])
def test_a_missing_half_is_noticed(name):
    checkpoint = in_mxfp4(INTERMEDIATE)
    checkpoint[name][1] = None
    layer = Layer(INTERMEDIATE, 1, 0).load(checkpoint)
    with pytest.raises(CheckpointError, match=r"_weight_scale_inv of local expert 1: a tensor is missing"):
        layer.finish()


def test_half_a_projection_in_an_update_is_refused():
    Layer(INTERMEDIATE, 1, 0).load(in_mxfp4(INTERMEDIATE)).load({"w1_weight": in_mxfp4(INTERMEDIATE)["w1_weight"][:1]})
    with pytest.raises(CheckpointError, match=r"w1 of expert 0\): .* in MXFP4 arrived without .*once more after both"):
        layers.QUANT.loads.finish()


def served(checkpoint: Checkpoint) -> Layer:
    layer = Layer(INTERMEDIATE, 1, 0).load(checkpoint)
    layers.QUANT.loads.finish_load(torch.nn.ModuleList([layer]))
    return layer


def test_the_next_weights_may_need_fewer_steps():
    before = wide(in_mxfp4(INTERMEDIATE), 1, "w1", "w2")
    layer = served(before)
    tensors = [parameter.data_ptr() for parameter in layer.parameters()]
    for checkpoint in (second(), before):
        layer.load(checkpoint)
        layers.QUANT.loads.finish()
        assert_holds(layer, checkpoint)
    assert [parameter.data_ptr() for parameter in layer.parameters()] == tensors


@pytest.mark.parametrize("shard", ["w1", "w2"])
def test_the_next_weights_may_not_need_more_steps(shard):
    layer = served(in_mxfp4(INTERMEDIATE))
    with pytest.raises(CheckpointError, match=r"need [12] further steps of K, but the running layer has room for 0"):
        layer.load(wide(in_mxfp4(INTERMEDIATE), 1, shard))


def test_load_balancing_refuses_further_steps(packed):
    packed.enable_eplb = True
    layer = Layer(INTERMEDIATE, 1, 0).load(in_mxfp4(INTERMEDIATE))
    with pytest.raises(UnsupportedError, match=r"L \(w2 of expert 1.*Restart without --enable-eplb"):
        layer.load(wide(in_mxfp4(INTERMEDIATE), 1, "w2"))


def test_exponents_that_are_nan_are_refused():
    checkpoint = in_mxfp4(INTERMEDIATE)
    exponents_of(checkpoint, "w2")[0].view(torch.uint8)[5, 5] = 0xFF
    with pytest.raises(CheckpointError, match="the scales"):
        Layer(INTERMEDIATE, 1, 0).load(checkpoint)
