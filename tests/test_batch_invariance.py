"""Under VLLM_BATCH_INVARIANT=1, no order of summation depends on the number of tokens."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.launches.operands import LayerAddresses
from fp8moe_plugin.launches.sm90.layer import layer_launches
from fp8moe_plugin.ops import fp8_linear
from fp8moe_plugin.plan.sm90.catalog import DENSE_TILE_ROWS, dense_gemm_few_rows_key, dense_gemm_key
from fp8moe_plugin.plan.sm90.dense import plan_dense
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, SortedStep
from fp8moe_plugin.plan.spec import MoeShape, Output
from fp8moe_plugin.settings import BATCH_INVARIANT, batch_invariant
from fp8moe_plugin.testing import invariance
from tests import helpers as h

ADDRESSES = LayerAddresses(*range(1024, 1024 * (len(LayerAddresses._fields) + 1), 1024))
# DeepSeek-V3 whole, on 8 ranks in both ways, Qwen3-30B, and a rank with few experts
SHAPES = [
    MoeShape(8, 7168, 2048, 256, 256),
    MoeShape(8, 7168, 256, 256, 256),
    MoeShape(8, 7168, 2048, 32, 256),
    MoeShape(8, 2048, 768, 128, 128),
    MoeShape(8, 7168, 2048, 4, 256),
]
token_counts = st.one_of(st.integers(1, 64), st.integers(1, 20_000))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(tokens=token_counts)
def test_a_layer_makes_whole_sums_at_any_number_of_tokens(shape, tokens):
    with invariance(True):
        step = h.plan_step(shape, tokens)
    assert isinstance(step, SortedStep)
    assert step.k_splits == 1
    launches = layer_launches(step, ADDRESSES, False)
    assert all(launch.args.splits == 1 for launch in launches if launch.key.source == "gate_up_few_rows")


@given(n=st.sampled_from((8, 576, 2112, 24576)), k=st.sampled_from((128, 1536, 7168, 18432)))
def test_blocks_of_a_dense_layer_make_whole_sums(n, k):
    plan = plan_dense(1, n, k, Output.BF16, batch_invariant=True)
    assert plan.kernel in map(dense_gemm_key, DENSE_TILE_ROWS)
    assert plan.cluster == 1


def test_by_default_sums_are_divided():
    with invariance(False):
        assert isinstance(h.plan_step(SHAPES[1], 1), SmallBatchStep)
        step = h.plan_step(SHAPES[4], 20)
        assert isinstance(step, SortedStep)
        assert step.k_splits > 1
    dense = plan_dense(1, 2112, 7168, Output.BF16)
    assert dense.kernel == dense_gemm_few_rows_key()
    assert dense.cluster > 1


@pytest.mark.parametrize("tokens", [1, 9, 64, 300, 2000])
def test_the_kernels_are_among_those_that_a_model_loads(monkeypatch, tokens):
    weight, device = h.random_weights(h.seeded(0, torch.device("cpu")), 256, 128), h.Recorder()
    h.serve(monkeypatch, device)
    with invariance(True):
        fp8_linear(torch.zeros(tokens, 128).bfloat16(), *weight)
        launches = layer_launches(h.plan_step(SHAPES[1], tokens), ADDRESSES, False)
    assert len(device.launches) == 2
    assert device.keys <= set(h.linear_kernels(False))
    assert {launch.key for launch in launches} <= set(h.moe_kernels(False, batched=False))


@pytest.mark.parametrize(("value", "wanted"), [(None, False), ("0", False), ("1", True)])
def test_the_variable_is_read_as_vllm_reads_it(monkeypatch, value, wanted):
    envs = pytest.importorskip("vllm.envs", reason="needs vLLM")
    with invariance(False):  # drops the values read here
        if value is None:
            monkeypatch.delenv(BATCH_INVARIANT)
        else:
            monkeypatch.setenv(BATCH_INVARIANT, value)
        batch_invariant.cache_clear()
        assert batch_invariant() is wanted
        assert envs.environment_variables[BATCH_INVARIANT]() is wanted
        monkeypatch.undo()


def test_another_value_is_refused(monkeypatch):
    with invariance(False):
        monkeypatch.setenv(BATCH_INVARIANT, "yes")
        batch_invariant.cache_clear()
        with pytest.raises(
            UnsupportedError, match=r"VLLM_BATCH_INVARIANT is 'yes'\. It should be 0 or 1\. Change or unset"
        ):
            batch_invariant()
        monkeypatch.undo()


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_the_mode_ends_with_its_block(monkeypatch, before):
    if before is None:
        monkeypatch.delenv(BATCH_INVARIANT, raising=False)
    else:
        monkeypatch.setenv(BATCH_INVARIANT, before)
    batch_invariant.cache_clear()
    with invariance(True):
        assert batch_invariant()
    assert os.environ.get(BATCH_INVARIANT) == before
    assert batch_invariant() == (before == "1")
    batch_invariant.cache_clear()
