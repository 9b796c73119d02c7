"""Loading experts in MXFP4 costs little beside the copies of their tensors, which the engine makes as well."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from tests.layers.experts import EXPERTS, make_mxfp4
from tests.layers.operations import counted
from tests.layers.vllm import loaded_model
from tests.layers.vllm.loaded_model import INTERMEDIATE
from tests.layers.vllm.one_rank import FP8, ONLINE, PACKED, RECODED, Layer

pytestmark = pytest.mark.seam
no_engine = loaded_model.no_engine

PROJECTIONS = 3 * EXPERTS
LAUNCHES = 15  # of a projection, with its copies and what is done on the host
PACKED_LAUNCHES = 16  # in plain torch


@pytest.mark.parametrize(("quant", "launches"), [(RECODED, LAUNCHES), (PACKED, PACKED_LAUNCHES)])
def test_a_projection_takes_few_launches(quant, launches):
    checkpoint = make_mxfp4(INTERMEDIATE)
    Layer(INTERMEDIATE, 1, 0, quant).load(checkpoint)  # makes the tables
    layer = Layer(INTERMEDIATE, 1, 0, quant)
    with counted("cpu") as operations:
        layer.load(checkpoint)
    assert operations.launches <= launches * PROJECTIONS
    assert operations.waits == PROJECTIONS  # on the host, see tests/layers/test_waits.py


@pytest.mark.parametrize("quant", [FP8, RECODED, PACKED, ONLINE])
def test_experts_of_other_ranks_are_looked_up_once(monkeypatch, quant):
    """With expert parallelism, vLLM's map is on the GPU: each look-up waits for it."""
    layer, looked_up = Layer(INTERMEDIATE, 1, 0, quant), []
    monkeypatch.setattr(
        layer, "_map_global_expert_id_to_local_expert_id", lambda expert: looked_up.append(expert) or -1
    )
    load, tensor = layer.w13_weight.weight_loader, torch.empty(1)
    assert load(layer.w13_weight, tensor, "w", shard_id="w1", expert_id=7, return_success=True) is False
    assert load(layer.w13_weight, tensor, "w", shard_id="w1", expert_id=8) is None
    assert looked_up == [7, 8]
