"""vLLM's second level of sleep discards all that was allocated while weights were loaded: a reload needs none of it."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from fp8moe_plugin.ops import tables
from fp8moe_plugin.ops.fp4_blocks import bases
from tests.layers.cached import cached_tensors, discard_cached
from tests.layers.vllm import loaded_model
from tests.layers.vllm.loaded_model import KINDS, Model, equal, first, second

no_engine = loaded_model.no_engine


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_reloaded_after_sleep(kind):
    model = Model(kind).start(first(kind))
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(0x5A)
    discard_cached()
    model.reload(second(kind))
    assert equal(model, Model(kind).start(second(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_cached_tensor_outlives_a_load(kind):
    Model(kind).start(first(kind))
    assert not list(cached_tensors())


def test_cached_tensors_are_found():
    tables.forget_tables()
    bases(torch.zeros(1, 1, dtype=torch.int32))
    assert len(list(cached_tensors())) == 1
