"""The layout of logits and the kernels of an indexer."""

import pytest
import torch

from fp8moe_plugin.plan.sm90.indexer import blocks_per_run, full_logits_pitch, logits_pitch
from fp8moe_plugin.plan.sm90.kernel_sets import indexer_kernels
from tests import helpers as h
from tests.indexer import decode, prefill

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("columns", "element_size", "pitch", "full"),
    [(1, 4, 256, 512), (256, 4, 256, 512), (257, 4, 512, 768), (256, 2, 512, 512), (8192, 4, 8192, 8448)],
)
def test_rows_are_a_multiple_of_a_kib_apart(columns, element_size, pitch, full):
    assert logits_pitch(columns, element_size) == pitch
    assert full_logits_pitch(columns, element_size) == full


@pytest.mark.parametrize(("next_n", "runs", "blocks"), [(4, 66, 2), (4, 67, 1), (4, 132, 1), (2, 66, 1), (1, 1, 1)])
def test_four_tokens_have_two_blocks_a_run_where_there_is_room(next_n, runs, blocks):
    assert blocks_per_run(next_n, runs, 132) == blocks


@pytest.mark.parametrize("heads", [32, 64])
def test_an_indexer_launches_its_kernels_and_nothing_else(monkeypatch, heads):
    device = h.Recorder()
    h.serve(monkeypatch, device)
    gen = h.seeded(0, CPU)
    for dim in (32, 64, 128):
        prefill(gen, 5, 20, heads, dim).run()
        for next_n in (1, 2, 3, 4):
            decode(gen, [5, 300], next_n, heads, dim).run(runs=132)
    assert device.keys == set(indexer_kernels(heads))


def test_a_row_of_weights_may_be_any_distance_from_the_next(monkeypatch):
    device = h.Recorder()
    h.serve(monkeypatch, device)
    call = prefill(h.seeded(0, CPU), 5, 20)
    call.run()
    assert device.launches[0].args.weights_pitch == call.weights.stride(0) == 69
