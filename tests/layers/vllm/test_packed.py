"""Experts that stay in MXFP4: each rank holds exactly its part of the checkpoint's weights, packed."""

import itertools

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.layers.vllm.config import moe_method
from fp8moe_plugin.layers.vllm.entry import Entry
from fp8moe_plugin.layers.vllm.pack import PackedMoeMethod
from fp8moe_plugin.ops.mxfp4 import CHUNK_BYTES, dequantize, further_steps
from tests.helpers import environment
from tests.layers.experts import EXPERTS, HIDDEN, Checkpoint, make_mxfp4
from tests.layers.test_recode import dequantized
from tests.layers.vllm import loaded_model
from tests.layers.vllm.loaded_model import INTERMEDIATE, Model, first, second
from tests.layers.vllm.one_rank import PACKED, Layer
from tests.layers.vllm.test_config import CHECKPOINT
from tests.layers.vllm.test_expert_format import described

pytestmark = pytest.mark.seam
no_engine = loaded_model.no_engine


def wide(checkpoint: Checkpoint, expert: int, *shards: str) -> Checkpoint:
    """Returns a checkpoint in which a block of an expert spans 30 binades; it has further groups of small exponents."""
    found = {name: [tensor.clone() for tensor in tensors] for name, tensors in checkpoint.items()}
    for shard in shards:
        found[f"{shard}_weight_scale"][expert].view(torch.uint8)[3::40, 2] = 90
    return found


def weights_of(layer: torch.nn.Module, expert: int) -> dict[str, torch.Tensor]:
    """Returns the exact weights of the projections."""
    w13, w2 = (
        (getattr(layer, f"{w}_weight")[expert], getattr(layer, f"{w}_weight_scale")[expert]) for w in ("w13", "w2")
    )
    w1, w3 = dequantize(*w13, gate_up=True).chunk(2)
    return {"w1": w1, "w3": w3, "w2": dequantize(*w2, gate_up=False)}


def wanted_of(checkpoint: Checkpoint, expert: int) -> dict[str, torch.Tensor]:
    pairs = {name: (checkpoint[f"{name}_weight"], checkpoint[f"{name}_weight_scale"]) for name in ("w1", "w3", "w2")}
    return {name: dequantized(w[expert], s[expert].view(torch.uint8)) for name, (w, s) in pairs.items()}


def assert_holds(layer: torch.nn.Module, checkpoint: Checkpoint) -> None:
    for expert in range(EXPERTS):
        found = weights_of(layer, expert)
        for name, wanted in wanted_of(checkpoint, expert).items():
            assert torch.equal(found[name].double(), wanted), (name, expert)


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize(("intermediate", "ranks", "part"), [(256, 1, 256), (512, 2, 256), (320, 2, 256)])
def test_ranks_hold_their_part(intermediate, ranks, part, widened):
    checkpoint = make_mxfp4(intermediate)
    if widened:
        checkpoint = wide(wide(checkpoint, 1, "w3", "w2"), 2, "w1")
    backwards = dict(reversed(checkpoint.items()))  # exponents before the codes
    for rank, given in itertools.product(range(ranks), (checkpoint, backwards)):
        layer = Layer(intermediate, ranks, rank, PACKED).load(given)
        here = slice(rank * part, (rank + 1) * part)
        for expert in range(EXPERTS):
            found, wanted = weights_of(layer, expert), wanted_of(checkpoint, expert)
            padded = (0, part * ranks - intermediate)
            for name in ("w1", "w3"):
                rows = torch.nn.functional.pad(wanted[name], (0, 0, *padded))[here]
                assert torch.equal(found[name].double(), rows)
            assert torch.equal(found["w2"].double(), torch.nn.functional.pad(wanted["w2"], padded)[:, here])


def test_experts_are_rows_of_the_parameters():
    """EPLB moves an expert by its index of the first dimension; its bytes do not depend on the others."""
    layer = Layer(INTERMEDIATE, 1, 0, PACKED).load(first("packed"))
    shapes = {name: list(parameter.shape) for name, parameter in layer.named_parameters()}
    k_blocks, rows = HIDDEN // 128, INTERMEDIATE // 128
    assert shapes == {
        "w13_weight": [EXPERTS, 2 * rows, k_blocks * CHUNK_BYTES],
        "w13_weight_scale": [EXPERTS, 2 * rows, k_blocks],
        "w2_weight": [EXPERTS, k_blocks, rows * CHUNK_BYTES],
        "w2_weight_scale": [EXPERTS, k_blocks, rows],
    }


def test_a_missing_expert_is_noticed():
    checkpoint = first("packed")
    checkpoint["w3_weight"][1] = checkpoint["w3_weight_scale"][1] = None
    with pytest.raises(CheckpointError, match=r"w13_weight_scale of local expert 1: a tensor is missing"):
        Model("packed").start(checkpoint)


@pytest.mark.parametrize("load", [Model.reload, Model.load])
def test_the_next_weights_may_need_fewer_steps(load):
    before = wide(first("packed"), 1, "w1", "w2")
    model = Model("packed").start(before)
    assert_holds(model.experts, before)
    tensors = [parameter.data_ptr() for parameter in model.experts.parameters()]
    load(model, second("packed"))
    model.step()
    assert_holds(model.experts, second("packed"))
    assert [parameter.data_ptr() for parameter in model.experts.parameters()] == tensors
    load(model, before)
    model.step()
    assert_holds(model.experts, before)


@pytest.mark.parametrize("load", [Model.reload, Model.load])
@pytest.mark.parametrize("shard", ["w1", "w2"])
def test_the_next_weights_may_not_need_more_steps(load, shard):
    model = Model("packed").start(first("packed"))
    with pytest.raises(CheckpointError, match=r"need [12] further steps of K, but the running layer has room for 0"):
        load(model, wide(first("packed"), 1, shard))


def test_load_balancing_refuses_further_steps():
    layer = Layer(INTERMEDIATE, 1, 0, PACKED, enable_eplb=True)
    layer.load(first("packed"))
    assert not further_steps(layer.w2_weight, layer.w2_weight_scale)
    with pytest.raises(UnsupportedError, match=r"w2 of expert 1.*Restart without --enable-eplb"):
        layer.load(wide(first("packed"), 1, "w2"))


def test_exponents_that_are_nan_are_refused():
    checkpoint = first("packed")
    checkpoint["w2_weight_scale"][0].view(torch.uint8)[5, 5] = 0xFF
    with pytest.raises(CheckpointError, match="the scales"):
        Layer(INTERMEDIATE, 1, 0, PACKED).load(checkpoint)


def test_a_variable_keeps_experts_in_mxfp4(tmp_path):
    with environment("FP8MOE_FP4_EXPERTS", "mxfp4"):
        config = Entry.from_config(CHECKPOINT | {"quant_method": "deepseek_v4_fp8"})
        config.maybe_update_config(str(tmp_path), hf_config=described(expert_dtype="fp4"))
    assert moe_method(config.spec) is PackedMoeMethod
