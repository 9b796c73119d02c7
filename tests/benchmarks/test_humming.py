"""What Humming is given by benchmarks.layer.humming, without Humming and without a GPU."""

import pytest
import torch

from benchmarks.layer.grouped_gemm import line_beside_humming
from benchmarks.layer.humming import CONTIGUOUS, INDEXED, even_rows, tunings

DEFAULT = {"block_shape": (80, 256, 128), "warp_shape": (80, 64, 128), "num_stages": 4}


@pytest.mark.parametrize(("rows", "tile"), [(1, 8), (8, 8), (9, 16), (64, 64), (256, 64)])
def test_tiles_are_cut_to_the_rows(rows, tile):
    found = tunings(DEFAULT, rows)
    assert found["default"] == DEFAULT
    assert found["cut"] == DEFAULT | {"block_shape": (tile, 256, 128), "warp_shape": (tile, 64, 128)}


def test_a_tile_that_fits_is_not_cut():
    default = DEFAULT | {"block_shape": (24, 256, 128)}
    assert tunings(default, 20) == {"default": default}


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_indexed_tiles_hold_rows_of_one_expert(rows):
    operands = even_rows(INDEXED, {"block_shape": (8, 256, 128)}, 3, rows, "cpu")
    tiles = operands["sorted_ids"].view(-1, 8)
    assert len(tiles) == len(operands["expert_ids"])
    assert operands["num_tokens_padded"].tolist() == [tiles.numel()]
    taken = [(e, i) for e, ids in zip(operands["expert_ids"].tolist(), tiles.tolist(), strict=True) for i in ids]
    assert [pair for pair in taken if pair[1] < 3 * rows] == [(i // rows, i) for i in range(3 * rows)]
    assert all(tensor.dtype == torch.int32 for tensor in operands.values())


def test_contiguous_rows_begin_where_those_before_end():
    assert even_rows(CONTIGUOUS, {}, 3, 5, "cpu")["expert_layout"].tolist() == [0, 5, 10, 15]


def test_the_line_names_the_best_of_humming_and_each_failure():
    results = {
        "masked": {"us": 12.0},
        "psum": {"us": 10.0},
        "humming a": {"error": "OSError: no"},
        "humming b": {"us": 9},
    }
    assert (
        line_beside_humming(results) == "masked 12.0 us, psum 10.0 us, humming b 9.0 us: x0.900; humming a: OSError: no"
    )
