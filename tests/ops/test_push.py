"""Wrong calls of `push_moe` and `open_window`. The emulator runs the right ones: tests/emulator/test_ranks.py."""

import dataclasses
from typing import Any

import pytest
import torch

from fp8moe_plugin.errors import InvalidInputError, UnsupportedError
from fp8moe_plugin.ops import open_window, push_moe
from fp8moe_plugin.ops.window import Window
from fp8moe_plugin.plan.sm90.push import window_layout
from tests import helpers as h

EXPERTS, HIDDEN, TOPK, ROWS = 4, 256, 2, 3
CPU = torch.device("cpu")


def make_window(
    hidden: int = HIDDEN,
    ranks: int = 2,
    spare: int = 0,
    experts: int = EXPERTS,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.uint8, torch.int32),
    rank: int = 0,
    rows: int = ROWS,
    away: int = 0,
) -> Window:
    memory = torch.zeros(window_layout(2, ROWS, hidden, TOPK, EXPERTS).nbytes + spare, dtype=dtypes[0])
    lost = torch.zeros(1, dtype=dtypes[1])
    return open_window(memory, [memory.data_ptr() + away] * ranks, rank, rows, hidden, TOPK, experts, lost, 1)


def call(
    rows: int = ROWS, tokens: int = 2, window: Window | None = None, owners: int = EXPERTS, local: int = EXPERTS // 2
) -> torch.Tensor:
    gen = h.seeded(0, CPU)
    layer, x = h.random_layer(gen, local, HIDDEN, 128), h.random_tokens(gen, tokens, HIDDEN)
    weights, ids = h.random_routing(gen, "distinct", tokens, TOPK, EXPERTS)
    of_experts = torch.zeros(owners, dtype=torch.int32)
    expert_map = torch.arange(EXPERTS, dtype=torch.int32)
    expert_map[local:] = -1
    return push_moe(window or make_window(), of_experts, rows, x, *layer, weights, ids, expert_map)


ELSEWHERE = dataclasses.replace(make_window(), memory=torch.empty(1, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 1}, "rows is 1, needs the largest number of tokens of a rank: from 2, those of this one, to 3"),
        ({"rows": 4}, "rows is 4"),
        ({"rows": 2.0}, "rows"),
        ({"owners": 3}, "owners"),
        ({"local": 3}, "This rank has 3 of 4 experts, may have 2: the 2 ranks need equal shares"),
        ({"window": make_window(384)}, "The window is for 384 channels and 2 of 4 experts per token, the call has 256"),
        ({"window": make_window(experts=8)}, "2 of 8 experts per token, the call has 256 and 2 of 4"),
        ({"window": ELSEWHERE}, "The window is on meta, the tensors on cpu"),
    ],
)
def test_a_wrong_call(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call(**wrong)


def test_there_is_no_reference() -> None:
    with pytest.raises(UnsupportedError, match="no reference"):
        call()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 9}, "a group of 9 ranks, of which the kernels support up to 8"),
        ({"hidden": 2**15 + 128}, "a hidden size of 32896"),
        ({"hidden": 100}, "hidden is 100, needs a multiple of 128"),
        ({"experts": 0}, "experts is 0, needs 1 or more"),
        ({"rows": 0}, "rows is 0, needs 1 or more"),
        ({"rows": 2.5}, "rows is a float, not an int"),
        ({"rank": 2}, "rank is 2, needs one of the 2 ranks that have an address, from 0 on"),
        ({"rank": -1}, "rank is -1"),
        ({"away": 256}, r"addresses\[0\] is not that of the memory. Pass each rank its own memory"),
        ({"spare": -256}, "bytes, needs"),
        ({"dtypes": (torch.int64, torch.int32)}, "memory has dtype torch.int64, needs torch.uint8"),
        ({"dtypes": (torch.uint8, torch.int64)}, "lost has dtype torch.int64, needs torch.int32"),
    ],
)
def test_a_window_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_window(**wrong)
