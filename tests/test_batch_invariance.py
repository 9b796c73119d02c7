"""Under VLLM_BATCH_INVARIANT=1, no order of summation depends on the number of tokens."""

import os

import pytest

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.plan.sm90.catalog import dense_gemm_few_rows_key
from fp8moe_plugin.plan.sm90.dense import plan_dense
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, SortedStep
from fp8moe_plugin.plan.spec import MoeShape, Output
from fp8moe_plugin.settings import BATCH_INVARIANT, batch_invariant
from fp8moe_plugin.testing import invariance
from tests import helpers as h


def test_by_default_sums_are_divided():
    with invariance(False):
        assert isinstance(h.plan_step(MoeShape(8, 7168, 256, 256, 256), 1), SmallBatchStep)
        step = h.plan_step(MoeShape(8, 7168, 2048, 4, 256), 20)
        assert isinstance(step, SortedStep)
        assert step.k_splits > 1
    dense = plan_dense(1, 2112, 7168, Output.BF16)
    assert dense.kernel == dense_gemm_few_rows_key()
    assert dense.cluster > 1


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
