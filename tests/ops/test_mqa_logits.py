"""The ops for the logits of an indexer: their forms of call, and each wrong call says what is wrong with it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.errors import InvalidInputError
from tests import helpers as h
from tests.indexer import (
    OPS,
    PAGE,
    RANGES,
    assert_decode,
    assert_prefill,
    decode,
    poisoned_results,
    prefill,
    spoilt_decode,
    spoilt_prefill,
)
from tests.ops.test_bad_input import first, meta, misaligned, narrow, second, short, strided

PREFILL, PAGED, METADATA = "fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"
Call = dict[str, Any]


def right_calls(device: torch.device) -> dict[str, Call]:
    gen = h.seeded(0, device)
    a, b = prefill(gen, 6, 40), decode(gen, [70, 0, 130], 2)
    lens = b.context_lens
    return {
        PREFILL: {
            "q": a.q,
            "kv": a.kv,
            "weights": a.weights,
            "cu_seq_len_k_start": a.starts,
            "cu_seq_len_k_end": a.ends,
            "clean_logits": False,
            "max_seqlen_k": 0,
            "logits_dtype": torch.float32,
        },
        PAGED: {
            "q": (b.q, None),
            "kv_cache": b.kv_cache,
            "weights": b.weights,
            "context_lens": lens,
            "block_table": b.block_table,
            "schedule_meta": ops.get_paged_mqa_logits_metadata(lens, PAGE, 4),
            "max_context_len": 200,
            "clean_logits": False,
            "logits_dtype": torch.float32,
            "indices": None,
        },
        METADATA: {"context_lens": lens, "block_kv": PAGE, "num_sms": 132, "indices": None},
    }


def with_heads(heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda q: q.new_zeros(*q.shape[:-2], heads, q.shape[-1])


def with_dim(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda q: q.new_zeros(*q.shape[:-1], dim)


def pages_apart(distance: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(cache: torch.Tensor) -> torch.Tensor:
        memory = cache.new_zeros(len(cache) * distance + PAGE * cache.shape[-1])
        return memory.as_strided(cache.shape, (distance, *cache.stride()[1:]))

    return change


# op, argument, what is done to it, words of the message
WRONG_CALLS = {
    "q-float32": (PREFILL, "q", torch.Tensor.float, "q has dtype torch.float32, needs torch.float8_e4m3fn"),
    "q-two-dimensions": (PREFILL, "q", lambda q: q[0], "q has shape [64, 128], needs [any, any, any]"),
    "q-strided": (PREFILL, "q", strided, "q has strides (16384, 256, 2)"),
    "q-misaligned": (PREFILL, "q", misaligned, "q starts at an address that is not a multiple of 16"),
    "q-of-three": (PREFILL, "q", lambda q: (q, None, None), "q has 3 parts, needs (values, None)"),
    "q-with-scales": (PREFILL, "q", lambda q: (q, q), "q has scales, as FP4 queries have"),
    "q-other-heads": (PREFILL, "q", with_heads(16), "q's number of heads is 16, needs 32 or 64"),
    "q-other-dim": (PREFILL, "q", with_dim(256), "q's head dimension is 256, needs 32, 64 or 128"),
    "q-short": (PREFILL, "q", short, "weights has shape [6, 64], needs [5, 64]"),
    "kv-not-a-pair": (PREFILL, "kv", lambda kv: kv[0], "kv is no pair"),
    "kv-of-three": (PREFILL, "kv", lambda kv: (*kv, kv), "kv is no pair"),
    "kv-bf16": (PREFILL, "kv", first(torch.Tensor.bfloat16), "kv has dtype torch.bfloat16"),
    "kv-other-dim": (PREFILL, "kv", first(with_dim(64)), "kv has shape [40, 64], needs [any, 128]"),
    "kv-elsewhere": (PREFILL, "kv", first(meta), "kv is on meta, the other tensors on"),
    "scales-short": (PREFILL, "kv", second(short), "kv's scales has shape [39], needs [40]"),
    "scales-of-groups": (PREFILL, "kv", second(lambda s: s[:, None]), "kv's scales has shape [40, 1], needs [40]"),
    "scales-float16": (PREFILL, "kv", second(torch.Tensor.half), "kv's scales has dtype torch.float16"),
    "scales-strided": (PREFILL, "kv", second(strided), "kv's scales has strides (2,), needs a contiguous layout"),
    "weights-bf16": (PREFILL, "weights", torch.Tensor.bfloat16, "weights has dtype torch.bfloat16"),
    "weights-narrow": (PREFILL, "weights", narrow, "weights has shape [6, 63], needs [6, 64]"),
    "weights-column-major": (PREFILL, "weights", h.column_major, "weights has strides (1, 6), needs (any, 1)"),
    "weights-with-gradient": (PREFILL, "weights", lambda w: w.requires_grad_(), "weights requires a gradient"),
    "start-int64": (PREFILL, "cu_seq_len_k_start", torch.Tensor.long, "cu_seq_len_k_start has dtype torch.int64"),
    "end-short": (PREFILL, "cu_seq_len_k_end", short, "cu_seq_len_k_end has shape [5], needs [6]"),
    "end-elsewhere": (PREFILL, "cu_seq_len_k_end", meta, "cu_seq_len_k_end is on meta"),
    "end-strided": (PREFILL, "cu_seq_len_k_end", strided, "cu_seq_len_k_end has strides (2,)"),
    "width-a-tensor": (PREFILL, "max_seqlen_k", torch.tensor, "max_seqlen_k is a Tensor, not an int"),
    "width-negative": (PREFILL, "max_seqlen_k", lambda _: -1, "max_seqlen_k is -1, needs 0 or more"),
    "sixth-negative": (PREFILL, "clean_logits", lambda _: -7, "max_seqlen_k is -7, needs 0 or more"),
    "sixth-none": (PREFILL, "clean_logits", lambda _: None, "max_seqlen_k is a NoneType, not an int"),
    "logits-float16": (PREFILL, "logits_dtype", lambda _: torch.float16, "logits_dtype is torch.float16, needs"),
    "paged-q-three-dimensions": (PAGED, "q", first(lambda q: q[:, 0]), "q has shape [3, 64, 128], needs [any, any"),
    "paged-q-two-dimensions": (PAGED, "q", first(lambda q: q[0, 0]), "q has shape [64, 128], needs [any, any"),
    "paged-five-tokens": (PAGED, "q", first(lambda q: q.new_zeros(3, 5, 64, 128)), "q's next_n is 5, needs 1, 2, 3 or"),
    "paged-no-tokens": (PAGED, "q", first(lambda q: q[:, :0]), "q's next_n is 0, needs 1, 2, 3 or 4"),
    "cache-int8": (PAGED, "kv_cache", lambda c: c.view(torch.int8), "kv_cache has dtype torch.int8"),
    "cache-pages-of-32": (PAGED, "kv_cache", lambda c: c[:, :32], "needs [any, 64, 1, 132]"),
    "cache-without-scales": (PAGED, "kv_cache", lambda c: c[..., :128], "needs [any, 64, 1, 132]"),
    "cache-rows-apart": (PAGED, "kv_cache", lambda c: torch.cat([c, c], 3)[..., :132], "kv_cache has strides"),
    "cache-misaligned": (PAGED, "kv_cache", misaligned, "kv_cache starts at an address that is not a multiple of 16"),
    "cache-pages-odd": (
        PAGED,
        "kv_cache",
        pages_apart(8456),
        "kv_cache's pages are 8456 bytes apart, needs a multiple",
    ),
    "cache-pages-overlap": (PAGED, "kv_cache", pages_apart(4224), "kv_cache's pages are 4224 bytes apart, needs"),
    "paged-weights-by-request": (PAGED, "weights", lambda w: w[:3], "weights has shape [3, 64], needs [6, 64]"),
    "lengths-one-dimension": (
        PAGED,
        "context_lens",
        lambda t: t[:, 0].contiguous(),
        "context_lens has shape [3], needs [3, 2]",
    ),
    "lengths-int64": (PAGED, "context_lens", torch.Tensor.long, "context_lens has dtype torch.int64"),
    "lengths-elsewhere": (PAGED, "context_lens", meta, "context_lens is on meta"),
    "table-int64": (PAGED, "block_table", torch.Tensor.long, "block_table has dtype torch.int64"),
    "table-short": (PAGED, "block_table", short, "block_table has shape [2, 5], needs [3, any]"),
    "table-column-major": (PAGED, "block_table", h.column_major, "block_table has strides (1, 3), needs (any, 1)"),
    "schedule-int64": (PAGED, "schedule_meta", torch.Tensor.long, "schedule_meta has dtype torch.int64"),
    "schedule-flat": (PAGED, "schedule_meta", torch.Tensor.flatten, "schedule_meta has shape [10], needs [any, 2]"),
    "schedule-empty": (PAGED, "schedule_meta", lambda t: t[:1], "schedule_meta has 1 rows, needs 2 or more"),
    "schedule-none": (PAGED, "schedule_meta", lambda _: None, "schedule_meta is a NoneType"),
    "longest-a-tensor": (PAGED, "max_context_len", torch.tensor, "max_context_len is a Tensor, not an int"),
    "longest-zero": (PAGED, "max_context_len", lambda _: 0, "max_context_len is 0, needs 1 or more"),
    "paged-clean": (PAGED, "clean_logits", lambda _: True, "clean_logits is True, needs False"),
    "paged-indices": (PAGED, "indices", lambda _: torch.zeros(1), "indices are given"),
    "metadata-one-dimension": (
        METADATA,
        "context_lens",
        lambda t: t[0],
        "context_lens has shape [2], needs [any, any]",
    ),
    "metadata-no-tokens": (METADATA, "context_lens", lambda t: t[:, :0], "context_lens has no column"),
    "metadata-float": (METADATA, "context_lens", torch.Tensor.float, "context_lens has dtype torch.float32"),
    "metadata-pages-of-32": (METADATA, "block_kv", lambda _: 32, "block_kv is 32, needs 64"),
    "metadata-no-runs": (METADATA, "num_sms", lambda _: 0, "num_sms is 0, needs 1 or more"),
    "metadata-runs-a-float": (METADATA, "num_sms", float, "num_sms is a float, not an int"),
    "metadata-indices": (METADATA, "indices", lambda _: torch.zeros(1), "indices are given"),
}

# the same, of values that only FP8MOE_DEBUG=1 looks at
WRONG_VALUES = {
    "start-negative": (
        PREFILL,
        "cu_seq_len_k_start",
        lambda t: t.fill_(-1),
        "cu_seq_len_k_start holds -1, needs 0 to 40",
    ),
    "end-too-large": (PREFILL, "cu_seq_len_k_end", lambda t: t.fill_(41), "cu_seq_len_k_end holds 41, needs 0 to 40"),
    "range-too-long": (PREFILL, "max_seqlen_k", lambda _: 39, "a row's range holds 40, needs 0 to 39"),
    "length-too-large": (PAGED, "context_lens", lambda t: t.fill_(201), "context_lens holds 201, needs 0 to 200"),
    "length-negative": (PAGED, "context_lens", lambda t: t.fill_(-1), "context_lens holds -1, needs 0 to 200"),
    "page-too-large": (PAGED, "block_table", lambda t: t.fill_(8), "block_table holds 8, needs 0 to 7"),
    "page-negative": (PAGED, "block_table", lambda t: t.fill_(-1), "block_table holds -1, needs 0 to 7"),
    "run-of-no-request": (
        PAGED,
        "schedule_meta",
        lambda t: t.fill_(4),
        "schedule_meta's requests holds 4, needs 0 to 3",
    ),
    "run-of-no-split": (PAGED, "schedule_meta", lambda t: t.fill_(-1), "schedule_meta's requests holds -1"),
}


@pytest.fixture
def debug():
    with h.environment("FP8MOE_DEBUG", "1"):
        yield


def assert_refused(device: torch.device, op: str, argument: str, change: Callable[[Any], Any], words: str) -> None:
    call = right_calls(device)[op]
    call[argument] = change(call[argument])
    with pytest.raises(InvalidInputError) as caught:
        getattr(ops, op)(**call)
    assert words in str(caught.value)


def test_every_op_of_an_indexer_is_called(device):
    called = {*right_calls(device), *(case[0] for case in WRONG_CALLS.values())}
    assert {getattr(ops, op) for op in called} == {getattr(ops, op) for op in OPS}


@pytest.mark.parametrize("op", [PREFILL, PAGED, METADATA])
def test_the_unchanged_call_is_taken(device, op, debug):
    getattr(ops, op)(**right_calls(device)[op])


@pytest.mark.parametrize("case", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_says_what_is_wrong(device, case):
    assert_refused(device, *case)


@pytest.mark.parametrize("case", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_wrong_value_says_what_is_wrong_in_debug_mode(device, case, debug):
    assert_refused(device, *case)


@pytest.mark.parametrize(("op", "argument"), [(PREFILL, "weights"), (PAGED, "weights"), (PAGED, "block_table")])
def test_other_strides_are_checked_after_a_right_call(device, op, argument):
    call = right_calls(device)[op]
    getattr(ops, op)(**call)
    with pytest.raises(InvalidInputError, match=f"{argument} has strides"):
        getattr(ops, op)(**call | {argument: h.column_major(call[argument])})


def test_a_compressed_result_cannot_be_cleaned(device):
    call = right_calls(device)[PREFILL] | {"clean_logits": True, "max_seqlen_k": 40}
    with pytest.raises(InvalidInputError, match="clean_logits is 7, and max_seqlen_k 40"):
        ops.fp8_mqa_logits(**call | {"clean_logits": 7})
    with pytest.raises(InvalidInputError, match="max_seqlen_k and clean_logits exclude each other"):
        ops.fp8_mqa_logits(**call)


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize(("options", "width"), [({}, 0), ({"clean_logits": False}, 0), ({"clean_logits": 50}, 50)])
def test_logits_of_contiguous_kv(device, ranges, options, width):
    call = prefill(h.seeded(1, device), 9, 150, ranges=ranges)
    with poisoned_results() as memory:
        logits = call.run(**options)
    assert_prefill(call, logits, memory[0], width=width, clean=not options)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_logits_of_paged_kv(device, next_n):
    call = decode(h.seeded(1, device), [0, 300, 64, 1, 0], next_n)
    with poisoned_results() as memory:
        logits = call.run(runs=5)
    assert_decode(call, logits, memory[-1])


@pytest.mark.parametrize(("heads", "next_n"), [(32, 1), (64, 2), (64, 3), (64, 4)])
def test_nan_reaches_the_logits(device, heads, next_n):
    contiguous, spoilt = spoilt_prefill(h.seeded(0, device), heads)
    assert torch.equal(contiguous.run().isnan(), spoilt)
    paged, spoilt = spoilt_decode(h.seeded(0, device), next_n)
    assert torch.equal(paged.run(runs=3).isnan(), spoilt)


def test_both_spellings_and_both_forms_of_a_query_are_the_same(device):
    calls = right_calls(device)
    prefill_call, paged_call = calls[PREFILL] | {"clean_logits": True}, calls[PAGED] | {"max_context_len": 200}
    pair = prefill_call | {"q": (prefill_call["q"], None)}
    assert h.same_bits(ops.fp8_mqa_logits(**prefill_call), ops.fp8_fp4_mqa_logits(**pair))
    values = paged_call | {"q": paged_call["q"][0]}
    logits = ops.fp8_paged_mqa_logits(**values), ops.fp8_fp4_paged_mqa_logits(**paged_call)
    for i, length in enumerate(values["context_lens"][:, -1].tolist()):
        rows = slice(2 * i, 2 * i + 2)
        assert h.same_bits(logits[0][rows, :length], logits[1][rows, :length])


def test_deepgemms_positions_of_the_arguments(device):
    """`clean_logits` is the sixth up to 2.6, `max_seqlen_k` from 2.8 on."""
    call = prefill(h.seeded(2, device), 4, 40, ranges="causal")
    arguments = call.q, call.kv, call.weights, call.starts, call.ends
    whole = ops.fp8_mqa_logits(*arguments, False, 0)
    compressed = ops.fp8_mqa_logits(*arguments, 40)
    assert whole.shape == compressed.shape == (4, 40)
    assert ops.fp8_mqa_logits(*arguments, 0).shape == (4, 0)
    for i, (start, end) in enumerate(torch.cat(call.ranges, 1).tolist()):
        assert h.same_bits(whole[i, start:end].contiguous(), compressed[i, : end - start].contiguous())


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0)])
def test_nothing_to_do(device, m, n):
    call = prefill(h.seeded(0, device), m, n)
    assert call.run().shape == (m, n)
    assert call.run(clean_logits=7).shape == (m, 7)
    nobody = decode(h.seeded(0, device), [])
    assert nobody.run(runs=3).shape == (0, 1)
