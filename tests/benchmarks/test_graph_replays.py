"""Inputs, order and verdicts of benchmarks.layer.graph_replays."""

import itertools
import random

import pytest
import torch

from benchmarks.layer.graph_replays import KINDS, Shape, draw, faults, turns

SHAPE = Shape(experts=32, hidden=256, intermediate=128, topk=4)
CLEAN = {
    "graphs": [
        {
            "shape": "a",
            "tokens": 3,
            "steps": 9,
            "wrong": 0,
            "repeated": 0,
            "nodes": {"kernel": 5},
            "allocations_in_replays": 0,
        }
    ],
    "memory_growth": {"allocated": 0, "reserved": 2, "device": 2, "segments_asked_for": 1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 65])
def test_a_step_is_what_the_op_takes(kind, tokens):
    x, weights, ids = draw(torch.Generator().manual_seed(0), SHAPE, tokens, kind)
    assert (x.shape, x.dtype) == ((tokens, SHAPE.hidden), torch.bfloat16)
    assert (weights.shape, weights.dtype) == ((tokens, SHAPE.topk), torch.float32)
    assert (ids.shape, ids.dtype) == (weights.shape, torch.int32)
    assert ids.max() < SHAPE.experts
    assert ids.min() >= (0 if kind in ("uniform", "skewed") else -1)


def test_kinds_differ():
    tokens = 512
    drawn = {kind: draw(torch.Generator().manual_seed(0), SHAPE, tokens, kind)[2] for kind in KINDS}
    counts = {kind: ids[ids >= 0].bincount(minlength=SHAPE.experts) for kind, ids in drawn.items()}
    assert counts["skewed"].max() > 1.5 * counts["uniform"].max()
    assert 0.2 < (drawn["some_missing"] < 0).float().mean() < 0.4
    assert (drawn["padded"][tokens // 2 :] == -1).all()
    assert (drawn["padded"][: tokens // 2] >= 0).all()


def test_a_round_takes_each_graph_once_and_the_next_another_routing():
    taken = list(itertools.islice(turns(5, random.Random(0)), 5 * 40))
    rounds = [taken[i : i + 5] for i in range(0, len(taken), 5)]
    assert all(sorted(graph for graph, _ in each) == list(range(5)) for each in rounds)
    assert all({kind for _, kind in each} == {KINDS[i % len(KINDS)]} for i, each in enumerate(rounds))
    assert len({tuple(graph for graph, _ in each) for each in rounds}) > 10
    assert taken == list(itertools.islice(turns(5, random.Random(0)), 5 * 40))


def test_clean_steps_have_no_fault():
    assert faults(CLEAN) == []


@pytest.mark.parametrize(
    "change",
    [{"wrong": 1}, {"repeated": 1}, {"allocations_in_replays": 1}, {"nodes": {"kernel": 5, "mem_alloc": 1}}],
)
def test_a_fault_of_a_graph_is_reported_with_its_size(change):
    (fault,) = faults(CLEAN | {"graphs": [CLEAN["graphs"][0] | change]})
    assert "a, 3 tokens" in fault


@pytest.mark.parametrize("change", [{"allocated": 512}, {"device": 4}, {"reserved": 0}])
def test_memory_that_grows_is_a_fault(change):
    assert len(faults(CLEAN | {"memory_growth": CLEAN["memory_growth"] | change})) == 1
