"""Under VLLM_BATCH_INVARIANT=1 the number of tokens decides nothing that the order of a sum depends on."""

import importlib
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.layer.batch_invariance import invariance
from fp8moe_plugin import plan
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.jit.launcher import Launch
from fp8moe_plugin.ops.linear import fp8_linear
from fp8moe_plugin.settings import BATCH_INVARIANT, batch_invariant
from tests import helpers as h
from tests.test_plan import replace_everywhere

layer_ops = importlib.import_module("fp8moe_plugin.ops.fused_moe")  # the op has taken its name
ADDRESSES = layer_ops.LayerAddresses(*range(1024, 1024 * (len(layer_ops.LayerAddresses._fields) + 1), 1024))
SPLITS = -2  # where gate_up_few_rows is told into how many parts K is divided
# topk, hidden, intermediate, local and global experts: DeepSeek-V3 whole, of 8 ranks, Qwen3-30B, and a rank with few
SHAPES = [
    (8, 7168, 2048, 256, 256),
    (8, 7168, 256, 256, 256),
    (8, 7168, 2048, 32, 256),
    (8, 2048, 768, 128, 128),
    (8, 7168, 2048, 4, 256),
]
token_counts = st.one_of(st.integers(1, 64), st.integers(1, 20_000))


@pytest.fixture(scope="module", autouse=True)
def launched() -> Iterator[list[plan.KernelKey]]:
    """The keys of launches, which are recorded in place of being made."""
    keys: list[plan.KernelKey] = []
    with pytest.MonkeyPatch.context() as patch:
        replace_everywhere(patch, "launch", lambda key, *_, **__: keys.append(key))
        replace_everywhere(patch, "uses_sm90", lambda _: True)
        replace_everywhere(patch, "multiprocessors", lambda _: 132)
        replace_everywhere(patch, "tensor_map", lambda *_: None)
        yield keys


def launches_of(tokens: int, shape: tuple[int, int, int, int, int]) -> list[Launch]:
    return layer_ops._layer_launches.__wrapped__(ADDRESSES, (tokens, *shape), False, False, -2)


@pytest.mark.parametrize("shape", SHAPES)
@given(tokens=token_counts)
def test_a_layer_makes_whole_sums_at_any_number_of_tokens(shape, tokens):
    with invariance(True):
        launches = launches_of(tokens, shape)
    assert not any("small_batch" in launch.key.source for launch in launches)
    assert all(launch.args[SPLITS] == 1 for launch in launches if launch.key.source == "gate_up_few_rows")


@given(n=st.sampled_from((8, 576, 2112, 24576)), k=st.sampled_from((128, 1536, 7168, 18432)))
def test_blocks_of_a_dense_layer_make_whole_sums(n, k):
    with invariance(True):
        assert plan.dense_key(1, n, k, plan.Output.BF16, 132) in map(plan.dense_gemm_key, plan.DENSE_TILE_M)


def test_by_default_sums_are_divided():
    with invariance(False):
        assert "small_batch" in launches_of(1, SHAPES[1])[0].key.source
        assert max(launch.args[SPLITS] for launch in launches_of(20, SHAPES[4]) if "gate_up" in launch.key.source) > 1
        assert plan.dense_key(1, 2112, 7168, plan.Output.BF16, 132) == plan.dense_gemm_few_rows_key()


@pytest.mark.parametrize("tokens", [1, 9, 64, 300, 2000])
def test_the_kernels_are_among_those_that_a_model_loads(launched, tokens):
    loaded = {*plan.moe_kernels(False, batched=False), *plan.linear_kernels(False)}
    weight = h.random_weights(h.seeded(0, torch.device("cpu")), 256, 128)
    launched.clear()
    with invariance(True):
        fp8_linear(torch.zeros(tokens, 128).bfloat16(), *weight)
        launches = launches_of(tokens, SHAPES[1])
    assert len(launched) == 2
    assert loaded >= {*launched, *(launch.key for launch in launches)}


@pytest.mark.parametrize(("value", "wanted"), [(None, False), ("0", False), ("1", True)])
def test_the_variable_is_read_as_vllm_reads_it(monkeypatch, value, wanted):
    envs = pytest.importorskip("vllm.envs", reason="needs vLLM")
    with invariance(False):  # forgets what is read here
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
