"""FP8MOE_DEBUG=1 detects rows that a layer does not write, or computes from uninitialized memory."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.errors import InvalidInputError, WrongResultError
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.ops import checks, reference, workspace
from fp8moe_plugin.ops.fp4_blocks import SPAN
from tests import helpers as h
from tests.mxfp4 import random_experts

EXPERTS, TOPK, HIDDEN, INTERMEDIATE, TOKENS = 4, 2, 256, 128, 5


@pytest.fixture(autouse=True)
def scratch_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not poisoned by the tests, so that it is FP8MOE_DEBUG that notices."""
    for name in ("empty", "scratch"):
        monkeypatch.setattr(workspace, name, inspect.unwrap(getattr(workspace, name)))
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)


@pytest.fixture
def debug() -> Iterator[None]:
    with h.environment("FP8MOE_DEBUG", "1"):
        yield


@pytest.fixture
def gen(device: torch.device) -> torch.Generator:
    return h.seeded(0, device)


def call_of_layer(gen: torch.Generator) -> list[torch.Tensor]:
    x, layer = h.random_tokens(gen, TOKENS, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    return [x, *layer, *h.random_routing(gen, "distinct", TOKENS, TOPK, EXPERTS)]


def call_of_slabs(gen: torch.Generator) -> list[torch.Tensor]:
    counts = torch.tensor([3, 0, 5, 1], dtype=torch.int32, device=gen.device)
    return [*h.random_quantized(gen, EXPERTS, 6, HIDDEN), *h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE), counts]


def call_of_linear(gen: torch.Generator) -> list[torch.Tensor]:
    return [h.random_tokens(gen, 2, 3, HIDDEN), *h.random_weights(gen, 64, HIDDEN)]


def batched_experts(*call: torch.Tensor, out: torch.Tensor | None = None, **form: Any) -> torch.Tensor:
    """Zeros in the rows past the count, which are not written, unless they are in `out`."""
    zeros = torch.zeros(call[0].shape, dtype=torch.bfloat16, device=call[0].device)
    return ops.batched_experts(*call, expected_m=3, out=zeros if out is None else out, **form)


def call_of_packed_layer(gen: torch.Generator) -> list[torch.Tensor]:
    x, *_, weights, ids = call_of_layer(gen)
    return [x, *packed(gen), weights, ids]


def call_of_packed_slabs(gen: torch.Generator) -> list[torch.Tensor]:
    q, scales, *_, counts = call_of_slabs(gen)
    return [q, scales, *packed(gen), counts]


def packed(gen: torch.Generator) -> h.Layer:
    layer = random_experts(h.seeded(0, torch.device("cpu")), EXPERTS, HIDDEN, INTERMEDIATE, SPAN).packed()
    return h.Layer(*(tensor.to(gen.device) for tensor in layer))


OPS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., list[torch.Tensor]]]] = {
    "fused_moe": (ops.fused_moe, call_of_layer),
    "batched_experts": (batched_experts, call_of_slabs),
    "fused_moe of packed weights": (partial(ops.fused_moe, weights=PACKED_MXFP4), call_of_packed_layer),
    "batched_experts of packed weights": (partial(batched_experts, weights=PACKED_MXFP4), call_of_packed_slabs),
    "fp8_linear": (ops.fp8_linear, call_of_linear),
}


@pytest.mark.parametrize("op", OPS)
def test_a_right_result_is_the_same(gen, op):
    run, make = OPS[op]
    call = make(gen)
    plain = run(*call)
    with h.environment("FP8MOE_DEBUG", "1"):
        watched = run(*call)
    assert plain.isfinite().all()
    assert h.same_bits(watched, plain)


def skips_row(monkeypatch: pytest.MonkeyPatch, name: str, out_at: int, row: tuple[int, ...]) -> None:
    """Let the reference of a layer leave a row of its result unwritten."""
    layer = getattr(reference, name)

    def faulty(*args: torch.Tensor) -> object:
        out = args[out_at]
        before = out[row].clone()
        result = layer(*args)
        out[row] = before
        return result

    monkeypatch.setattr(reference, name, faulty)


def test_a_router_that_chooses_the_shared_expert_is_refused(debug):
    """Its id is the first that is too large for a routed expert."""
    *call, ids = call_of_layer(h.seeded(0, torch.device("cpu")))
    shared = len(call[1]) - 1
    ids[3, 1] = shared
    ops.fused_moe(*call, ids)
    with pytest.raises(InvalidInputError, match=f"topk_ids .*{shared}"):
        ops.fused_moe(*call, ids, shared_expert=True)


def test_a_token_that_is_not_written_is_named_with_its_experts(debug, monkeypatch):
    call = call_of_layer(h.seeded(0, torch.device("cpu")))
    skips_row(monkeypatch, "combine", 3, (3,))
    experts = call[-1][3].tolist()
    with pytest.raises(WrongResultError) as caught:
        ops.fused_moe(*call)
    assert str(caught.value).startswith(f"fused_moe: token 3 (experts {experts}) comes out as NaN, one of 1 rows of 5,")


def test_what_is_made_of_unwritten_scratch_is_noticed(debug, monkeypatch):
    """Let `combine` read all rows, although the products of ids out of range are not written."""
    call = call_of_layer(h.seeded(0, torch.device("cpu")))
    call[-1][2, 1] = -1
    combine = reference.combine
    monkeypatch.setattr(reference, "combine", lambda rows, here, *rest: combine(rows, torch.ones_like(here), *rest))
    with pytest.raises(WrongResultError, match="fused_moe: token 2"):
        ops.fused_moe(*call)


def test_a_row_of_a_slab_is_named_with_its_expert(debug, monkeypatch):
    call = call_of_slabs(h.seeded(0, torch.device("cpu")))
    skips_row(monkeypatch, "batched_experts", 4, (2, 4))
    with pytest.raises(WrongResultError, match="batched_experts: row 4 of expert 2 comes out as NaN"):
        batched_experts(*call)


def test_a_row_of_a_dense_layer_is_named(debug, monkeypatch):
    call, gemm = call_of_linear(h.seeded(0, torch.device("cpu"))), reference.gemm

    def faulty(*operands: h.Quantized) -> torch.Tensor:
        product = gemm(*operands)
        product[5] = float("nan")
        return product

    monkeypatch.setattr(reference, "gemm", faulty)
    with pytest.raises(WrongResultError, match="fp8_linear: row 5 comes out as NaN"):
        ops.fp8_linear(*call)


@pytest.mark.parametrize("op", OPS)
def test_nan_that_went_in_may_come_out(gen, debug, op):
    run, make = OPS[op]
    call = make(gen)
    h.bits(call[0]).view(-1)[3] = -1  # e4m3, or bfloat16: NaN
    assert run(*call).isnan().any()


def test_rows_past_the_count_are_not_touched(gen, debug):
    call = call_of_slabs(gen)
    out = torch.full((EXPERTS, 6, HIDDEN), 7.0, dtype=torch.bfloat16, device=gen.device)
    batched_experts(*call, out=out)
    past = torch.arange(6, device=gen.device) >= call[-1][:, None]
    assert (out[past] == 7).all()


def test_a_layer_may_write_where_its_tokens_are(gen, debug):
    call = call_of_layer(gen)
    expected = ops.fused_moe(*call)
    ops.fused_moe(*call, out=call[0])
    assert h.same_bits(call[0], expected)


@pytest.mark.parametrize("rows", [0, 1, 3, TOKENS])
@pytest.mark.parametrize("mode", ["0", "1"])
def test_a_layer_may_write_partly_where_its_tokens_are(gen, mode, rows):
    x, *others = call_of_layer(gen)
    expected = ops.fused_moe(x, *others)
    memory = torch.cat([x, x])  # the result begins `rows` rows after the first token
    with h.environment("FP8MOE_DEBUG", mode):
        actual = ops.fused_moe(memory[:TOKENS], *others, out=memory[rows : rows + TOKENS])
    assert h.same_bits(actual, expected)


def test_a_token_that_is_not_written_in_place_is_noticed(debug, monkeypatch):
    call = call_of_layer(h.seeded(0, torch.device("cpu")))
    skips_row(monkeypatch, "combine", 3, (3,))
    with pytest.raises(WrongResultError, match="fused_moe: token 3"):
        ops.fused_moe(*call, out=call[0])


@pytest.mark.parametrize("argument", range(1, 7))
def test_an_out_that_overlaps_with_another_argument_is_refused(gen, debug, argument):
    call = call_of_layer(gen)
    call[argument], out = overlapping(call[argument], call[0].shape)
    name = ("w13", "w13_scale", "w2", "w2_scale", "topk_weights", "topk_ids")[argument - 1]
    with pytest.raises(InvalidInputError, match=f"out shares memory with {name}, which is still read"):
        ops.fused_moe(*call, out=out)


@pytest.mark.parametrize("argument", range(7))
def test_an_out_of_slabs_that_overlaps_with_an_argument_is_refused(gen, debug, argument):
    call = call_of_slabs(gen)
    shape = call[0].shape
    call[argument], out = overlapping(call[argument], shape)
    with pytest.raises(InvalidInputError, match=r"out shares memory with .*, which is still read"):
        batched_experts(*call, out=out)


def overlapping(tensor: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a contiguous copy of a tensor, and bfloat16 of this shape whose memory ends 16 bytes into the copy."""
    before = 2 * shape.numel() - 16
    memory = torch.empty(before + tensor.nbytes, dtype=torch.uint8, device=tensor.device)
    copy = memory[before:].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy, memory[: before + 16].view(torch.bfloat16).view(shape)


def test_an_out_beside_its_arguments_is_taken(gen, debug):
    call = call_of_layer(gen)
    memory = torch.empty(2, TOKENS, HIDDEN, dtype=torch.bfloat16, device=gen.device)
    memory[0] = call[0]
    expected = ops.fused_moe(*call)
    assert h.same_bits(ops.fused_moe(memory[0], *call[1:], out=memory[1]), expected)


@pytest.mark.parametrize("mode", ["0", "1"])
def test_scratch_is_poisoned_in_debug_mode_alone(mode):
    with h.environment("FP8MOE_DEBUG", mode):
        x = workspace.empty((3, 128), torch.bfloat16, torch.device("cpu"))
        scratch = workspace.scratch(256, x)
    for room in (x, scratch.view(torch.bfloat16)):
        assert h.untouched(room) if mode == "1" else (room == 0).all()


def test_graphs_are_not_checked_and_one_line_says_so(debug, monkeypatch, plugin_log):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not checks.debugs(on_gpu=True)
    assert not checks.debugs(on_gpu=True)
    assert checks.debugs(on_gpu=False)
    (line,) = plugin_log.messages
    assert "FP8MOE_DEBUG=1 checks nothing in CUDA graphs" in line
