"""The emulator sees faults: each of these, put into the kernels' sources, fails a run within a few schedules."""

import ctypes
import functools
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.launches.kernel_sets import EXAMPLE
from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.ops.transpose_scales import transpose_scales
from fp8moe_plugin.plan.sm90 import layer
from fp8moe_plugin.plan.sm90.catalog import (
    add_rows_key,
    add_sums_key,
    choose_experts_key,
    combine_key,
    dense_gemm_few_rows_key,
    dense_gemm_key,
    dense_gemm_many_rows_key,
    dense_variant,
    down_small_batch_key,
    gate_up_few_rows_key,
    gate_up_key,
    gate_up_small_batch_key,
    grouped_gemm_few_rows_key,
    grouped_gemm_key,
    k_grouped_gemm_key,
    pack_mxfp4_key,
    permute_key,
    push_sums_key,
    push_tokens_key,
    pushed,
    quantize_key,
    route_key,
    router_gemm_key,
    silu_mul_quant_key,
    tiles_of_counts_key,
    transpose_scales_key,
)
from fp8moe_plugin.plan.sm90.constants import Layout
from fp8moe_plugin.plan.sm90.dense import few_rows, splits_k
from fp8moe_plugin.plan.sm90.indexer import mqa_logits_key, paged_mqa_logits_key, paged_mqa_metadata_key
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, PACKED_WIDE, SHARED
from fp8moe_plugin.plan.spec import LayerSpec, Output
from fp8moe_plugin.plan.tuning import EARLY_BELOW, LONG_K
from tests import faults
from tests import helpers as h
from tests.emulator import activations, biases
from tests.emulator.build import CSRC, Kernels
from tests.emulator.conftest import MULTIPROCESSORS
from tests.emulator.device import SHARED_BYTES, Device, EmulatorError
from tests.emulator.first_kernels import (
    choice_behind_dense_layer,
    gate_behind_dense_layer,
    layer_behind_choice,
    layer_behind_dense_layer,
    masked_gemm_behind_choice,
)
from tests.emulator.inputs import assert_product, empty_rows, slabs
from tests.emulator.layers import (
    MOST_ERROR,
    packed_moe,
    run_dense_layer,
    run_layers,
    run_packed_layer,
    run_quantized_tokens,
    run_routed_layers,
)
from tests.emulator.ranks import run_calls
from tests.indexer import assert_decode, assert_prefill, decode, poisoned_results, prefill
from tests.k_grouped import gradients
from tests.mxfp4 import garbage, pack_close, random_experts, random_projections
from tests.steps import gate_up, grouped_gemm, tiles_of_counts

SCHEDULES = 32
CLUSTERS = 24  # multiprocessors, for kernels of clusters
WRONG_RESULT = "elements are wrong"
BEHIND = "deadlock|livelock|a phase behind"
BEHIND_OR_WRONG = f"AssertionError|more arrivals|{BEHIND}"
DELAY = "        for (int i = 0; i < 1000; ++i) load_acquire(tokens_written);\n"  # of a warp
COUNTS, WIDTH = [144, 130, 64], 256
MANY = [650, 300]


def second_gemm(emulator: Device, seed: int) -> None:
    gen = h.seeded(0, torch.device("cpu"))
    rows = slabs(gen, COUNTS, 512)
    b, out = h.random_weights(gen, len(COUNTS), WIDTH, 512), empty_rows(rows, WIDTH)
    emulator.execute(seed, lambda: grouped_gemm(rows.a, b, out, tiles_of_counts(rows.masked_m, rows.max_m, MANY_ROWS)))
    assert_product(out, rows, rows.a, b)


def both_gemms(emulator: Device, seed: int) -> None:
    gen = h.seeded(0, torch.device("cpu"))
    rows = slabs(gen, COUNTS, 256)
    w13, w2 = h.random_weights(gen, len(COUNTS), 2 * WIDTH, 256), h.random_weights(gen, len(COUNTS), WIDTH, WIDTH)
    out = empty_rows(rows, WIDTH)

    def ops() -> h.Quantized:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, MANY_ROWS)
        inner = gate_up(rows.a, w13, tiles)
        grouped_gemm(inner, w2, out, tiles, after_gate_up=True)
        return inner

    assert_product(out, rows, emulator.execute(seed, ops), w2)


def second_gemm_that_keeps_weights(emulator: Device, seed: int) -> None:
    gen = h.seeded(0, torch.device("cpu"))
    rows = slabs(gen, MANY, WIDTH)
    b, out = h.random_weights(gen, len(MANY), 2 * WIDTH, WIDTH), empty_rows(rows, 2 * WIDTH)

    def op() -> None:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, MANY_ROWS)
        grouped_gemm(rows.a, b, out, tiles.for_experts(EARLY_BELOW, WIDTH))

    emulator.execute(seed, op)
    assert_product(out, rows, rows.a, b)


def transposed_scales(emulator: Device, seed: int) -> None:
    """More tiles than blocks."""
    counts = [2500, 0, 70]
    scales = torch.rand(len(counts), max(counts), 40, generator=h.seeded(0, torch.device("cpu")))
    out = h.poisoned(len(counts), 40, max(counts), dtype=torch.float32, device=scales.device).mT
    masked_m = torch.tensor(counts, dtype=torch.int32)
    emulator.execute(seed, lambda: transpose_scales(scales, out, masked_m))
    here = torch.arange(max(counts)) < masked_m[:, None]
    assert h.same_bits(out[here], scales[here]), WRONG_RESULT
    assert h.untouched(out[~here]), WRONG_RESULT


def packing(emulator: Device, seed: int) -> None:
    """Of gate and down projections of two experts, in tensors with room for further steps."""
    for shard_id, exponents in (("w1", "random"), ("w2", "near zero")):
        given = random_projections(h.seeded(seed, torch.device("cpu")), 2, 200, 224, exponents)
        to = garbage(2, shard_id, (2, 2), further=1)
        wanted = [tensor.clone() for tensor in to]
        pack_close(*wanted, shard_id, *given)
        emulator.execute(seed, lambda to=to, shard_id=shard_id, given=given: pack_close(*to, shard_id, *given))
        assert all(h.same_bits(tensor, its) for tensor, its in zip(to, wanted, strict=True)), WRONG_RESULT


def ranks_that_push(emulator: Device, seed: int) -> None:
    """Calls of a layer in which two ranks store into each other's windows."""
    error = run_calls(emulator, seed, [[3, 2], [2, 2], [1, 3]], inputs=0)
    assert error <= MOST_ERROR, WRONG_RESULT


def ranks_with_many_blocks(emulator: Device, seed: int) -> None:
    """The last of them counts for all."""
    assert run_calls(emulator, seed, [[3, 2], [2, 2], [1, 3]], inputs=0, few_blocks=0) <= MOST_ERROR, WRONG_RESULT


def ranks_with_many_tokens(emulator: Device, seed: int) -> None:
    """More tokens than blocks."""
    assert run_calls(emulator, seed, [[30, 30]], inputs=0) <= MOST_ERROR, WRONG_RESULT


def ranks_that_push_rows(emulator: Device, seed: int) -> None:
    with h.rows_pushed_from(2):
        assert run_calls(emulator, seed, [[41, 41]], inputs=0) <= MOST_ERROR, WRONG_RESULT


def dense_layer(emulator: Device, seed: int, n: int = 128, k: int = LONG_K) -> None:
    gen, m = h.seeded(0, torch.device("cpu")), 5
    assert splits_k(n, k) == (k >= LONG_K), "blocks of a cluster share columns"
    assert k < LONG_K or few_rows(m, n).blocks <= emulator.multiprocessors, "the plan takes them"
    run_dense_layer(emulator, seed, gen, m, n, k)


def dense_tiles(emulator: Device, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        h.force_dense_tile(patch, 64, 112)
        dense_layer(emulator, seed, 2112, 384)


def dense_tiles_of_clusters(emulator: Device, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        h.force_dense_clusters(patch, 192)
        run_dense_layer(emulator, seed, h.seeded(0, torch.device("cpu")), 400, 576, 640)


def layer_of_few_tokens(emulator: Device, seed: int) -> None:
    gen, tokens = h.seeded(0, torch.device("cpu")), 9
    x, layer = h.random_tokens(gen, tokens, 256), h.random_layer(gen, 3, 256, 256)
    weights, ids = h.random_routing(gen, "some_missing", tokens, 2, 3)
    out = emulator.execute(seed, lambda: fused_moe(x, *layer, weights, ids))
    error = h.relative_l2(out, h.layer_reference(x, layer, weights, ids, quantized=True))
    assert error <= 1e-2, f"{WRONG_RESULT}: relative L2 {error}"


def tokens_that_arrive_quantized(emulator: Device, seed: int) -> None:
    quantized, bfloat16 = run_quantized_tokens(emulator, seed, 9, 256, 256, copies=False)
    assert h.same_bits(quantized, bfloat16), WRONG_RESULT


def copies_of_quantized_tokens(emulator: Device, seed: int) -> None:
    quantized, bfloat16 = run_quantized_tokens(emulator, seed, 40, 256, 256, copies=True)
    assert h.same_bits(quantized, bfloat16), WRONG_RESULT


def small_batch(emulator: Device, seed: int) -> None:
    errors = run_layers(emulator, seed, 5, 384, 512, layers=2, inputs=0, small_batch=8)
    assert max(errors) <= MOST_ERROR, f"{WRONG_RESULT}: relative L2 of each layer {errors}"


def small_batch_that_chooses_experts(emulator: Device, seed: int, **options: bool) -> None:
    errors = run_routed_layers(emulator, seed, 3, 1024, 128, **options)
    assert max(errors) <= MOST_ERROR, f"{WRONG_RESULT}: relative L2 of each layer {errors}"


small_batch_with_a_gate = functools.partial(small_batch_that_chooses_experts, gates=True)
small_batch_with_a_shared_gate = functools.partial(small_batch_that_chooses_experts, shared=True)


def first_kernel(run: Callable[[Device, int], float]) -> Callable[[Device, int], None]:
    def checked(emulator: Device, seed: int) -> None:
        error = run(emulator, seed)
        assert error <= MOST_ERROR, f"{WRONG_RESULT}: relative L2 {error}"

    return checked


behind_dense_layer = first_kernel(layer_behind_dense_layer)
behind_choice = first_kernel(layer_behind_choice)
choice_behind_dense = first_kernel(choice_behind_dense_layer)
gate_behind_dense = first_kernel(gate_behind_dense_layer)
masked_gemm_of_few_rows = first_kernel(masked_gemm_behind_choice)
masked_gemm_of_many_rows = first_kernel(functools.partial(masked_gemm_behind_choice, tokens=40))


def small_batch_of_whole_sums(emulator: Device, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "DOWN_BLOCKS", {8: 1, 16: 1})
        small_batch(emulator, seed)


def at_once(run: Callable[[Device, int], None]) -> Callable[[Device, int], None]:
    """The second GEMM does not wait for stages of the first."""

    def checked(emulator: Device, seed: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer, "STAGES_BEFORE_DOWN", 0)
            run(emulator, seed)

    return checked


small_batch_at_once = at_once(small_batch)
small_batch_that_chooses_at_once = at_once(small_batch_that_chooses_experts)


def one_token(emulator: Device, seed: int) -> None:
    run_layers(emulator, seed, 1, 256, 768, layers=2, inputs=0, small_batch=8)


def token_beside_nan(emulator: Device, seed: int) -> None:
    gen = h.seeded(0, torch.device("cpu"))
    x, layer = h.random_tokens(gen, 2, 256), h.random_layer(gen, 9, 256, 128)
    h.bits(layer.w2)[1] = 0x7F
    weights, ids = torch.ones(2, 3), torch.tensor([[5, 3, 7], [0, 1, 6]], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        h.force_step(patch, width=8)
        out = emulator.execute(seed, lambda: fused_moe(x, *layer, weights, ids))
    assert out[0].isfinite().all(), f"{WRONG_RESULT}: NaN of another token's expert"


def layers_in_a_row(emulator: Device, seed: int) -> None:
    errors = run_layers(emulator, seed, 1, 1024, 128, layers=6, inputs=0)
    assert max(errors) <= MOST_ERROR, f"{WRONG_RESULT}: relative L2 of each layer {errors}"


def logits_of_contiguous_kv(emulator: Device, seed: int) -> None:
    call = prefill(h.seeded(0, torch.device("cpu")), 120, 700, ranges="causal")
    with poisoned_results() as memory:
        logits = emulator.execute(seed, lambda: call.run(clean_logits=False))
    assert_prefill(call, logits, memory[0], clean=False)


def logits_of_paged_kv(emulator: Device, seed: int) -> None:
    call = decode(h.seeded(0, torch.device("cpu")), [3000, 60, 0, 70, 5, 900], 2)
    with poisoned_results() as memory:
        logits = emulator.execute(seed, lambda: call.run(runs=2))
    assert_decode(call, logits, memory[-1])


def weight_gradients(emulator: Device, seed: int) -> None:
    call = gradients(h.seeded(0, torch.device("cpu")), 150, 272, [768, 128, 0, 384])
    d = h.poisoned(*call.c.shape, dtype=torch.float32, device=torch.device("cpu"))
    emulator.execute(seed, lambda: call.run(d, call.c))
    call.assert_right(d)


def with_activation(kernel: str, activation: Activation) -> Callable[[Device, int], None]:
    return functools.partial(activations.KERNELS[kernel], activation=activation)


CLAMPED, OAI, STEP = h.MODIFIED
MODIFIED = LayerSpec(EXAMPLE, activation=CLAMPED)  # the kernels of all three
step_of_many_rows = with_activation("gate_up", STEP)
oai_of_few_rows = with_activation("gate_up_few_rows", OAI)
clamped_small_batch = with_activation("gate_up_small_batch", CLAMPED)
oai_by_itself = with_activation("silu_mul_quant", OAI)


def per_channel(kernel: str) -> Callable[[Device, int], None]:
    return functools.partial(activations.OF_EXPERTS[kernel], activation=CLAMPED, weights=FP8_CHANNEL)


def per_channel_dense(emulator: Device, seed: int, force: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        force(patch)
        run_dense_layer(emulator, seed, h.seeded(0, torch.device("cpu")), 30, 264, 384, FP8_CHANNEL)


scales_of_dense_tiles = functools.partial(
    per_channel_dense, force=functools.partial(h.force_dense_tile, tile_rows=64, tile_n=112)
)
scales_of_dense_clusters = functools.partial(
    per_channel_dense, force=functools.partial(h.force_dense_clusters, tile_n=256)
)
scales_of_narrow_dense = functools.partial(
    per_channel_dense, force=functools.partial(h.force_dense, plan=lambda m, n, _: few_rows(m, n, 2))
)


def packed_layer(emulator: Device, seed: int) -> None:
    assert run_packed_layer(emulator, seed) <= MOST_ERROR


def packed_layer_of_one_base(emulator: Device, seed: int) -> None:
    assert run_packed_layer(emulator, seed, span=SPAN) <= MOST_ERROR


def packed_tiles_of_64(emulator: Device, seed: int) -> None:
    """Of one base, with more K blocks than there are stages."""
    with pytest.MonkeyPatch.context() as patch:
        h.force_step(patch, tile=FEW_ROWS)
        assert run_packed_layer(emulator, seed, 60, SPAN, 1280) <= MOST_ERROR


def packed_short_tiles(emulator: Device, seed: int) -> None:
    """Of a K block and many tokens: the next tile is there before one is finished."""
    with pytest.MonkeyPatch.context() as patch:
        h.force_step(patch, tile=FEW_ROWS)
        assert run_packed_layer(emulator, seed, 60, SPAN, 128, 512) <= MOST_ERROR, WRONG_RESULT


def packed_parts(emulator: Device, seed: int) -> None:
    """Tiles of 120 tokens, multiplied in parts."""
    with pytest.MonkeyPatch.context() as patch:
        h.force_step(patch, tile=PACKED_WIDE)
        assert run_packed_layer(emulator, seed, 100, SPAN, 1280) <= MOST_ERROR


def packed_few_rows_of_copies(emulator: Device, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        h.force_step(patch, copies=True)
        assert run_packed_layer(emulator, seed, 13) <= MOST_ERROR


def packed_many_rows(emulator: Device, seed: int) -> None:
    """More K blocks than there are stages, further steps, and a tile that passes N."""
    with pytest.MonkeyPatch.context() as patch:
        h.force_step(patch, tile=SHARED)
        assert run_packed_layer(emulator, seed, 66, hidden=640) <= MOST_ERROR


def packed_tiles_of_one_step(emulator: Device, seed: int) -> None:
    """The second GEMM has K of one block."""
    with pytest.MonkeyPatch.context() as patch:
        h.force_step(patch, tile=SHARED)
        assert run_packed_layer(emulator, seed, 5, 11, hidden=640, intermediate=128) <= MOST_ERROR


def packed_shared_tiles(
    emulator: Device,
    seed: int,
    counts: tuple[int, ...] = (130, 3, 193),
    hidden: int = 512,
    intermediate: int = 256,
    biased: bool = False,
) -> None:
    """Tiles that blocks split and others in turns, of more K blocks than there are stages, then of fewer."""
    gen = h.seeded(0, torch.device("cpu"))
    x, layer = h.random_tokens(gen, sum(counts), hidden), random_experts(gen, len(counts), hidden, intermediate, 11)
    experts, routing = layer.packed(), h.routing_of_counts(gen, list(counts))
    biases = h.random_biases(gen, len(counts), hidden, intermediate) if biased else {}
    with pytest.MonkeyPatch.context() as patch:
        h.force_step(patch, tile=SHARED)
        out = emulator.execute(seed, lambda: packed_moe(x, experts, *routing, **biases))
    assert h.relative_l2(out, packed_moe(x, experts, *routing, **biases)) <= MOST_ERROR, WRONG_RESULT


packed_biased_tiles = functools.partial(packed_shared_tiles, counts=(130, 3), hidden=256, biased=True)
# Blocks split the third column of GEMM 1, and not the others.
packed_odd_columns = functools.partial(packed_shared_tiles, counts=(3, 2, 5, 1), hidden=256, intermediate=384)
# Of one expert: a cluster begins with GEMM 2 while the other is busy with GEMM 1, of one column or of many rows.
packed_early_rows = functools.partial(packed_shared_tiles, counts=(128,), hidden=128, intermediate=128)
packed_early_halves = functools.partial(packed_shared_tiles, counts=(200,), hidden=128)


def packed_small_batch(emulator: Device, seed: int, width: int = 8) -> None:
    """More K blocks than a block of the first GEMM has stages."""
    with pytest.MonkeyPatch.context() as patch:
        h.force_step(patch, width=width)
        error = run_packed_layer(emulator, seed, 8, SPAN, hidden=2048, intermediate=640)
    assert error <= MOST_ERROR


packed_batch_of_16 = functools.partial(packed_small_batch, width=16)
PER_CHANNEL = MODIFIED._replace(weights=FP8_CHANNEL)
scales_of_many_rows = per_channel("gate_up")
scales_of_few_rows = per_channel("gate_up_few_rows")
scales_of_small_batch = per_channel("gate_up_small_batch")

BIASED = LayerSpec(EXAMPLE, activation=OAI, bias=True)
bias_of_many_rows = functools.partial(activations.many_rows, activation=OAI, biased=True)
bias_of_few_rows = functools.partial(activations.few_rows, activation=OAI, biased=True)
bias_of_small_batch = functools.partial(activations.small_batch, activation=OAI, biased=True)

MANY = grouped_gemm_key(Output.BF16), tiles_of_counts_key()
NARROW = dense_gemm_few_rows_key(), quantize_key(False, Layout.K_MAJOR)
FEW = (
    grouped_gemm_few_rows_key(),
    gate_up_few_rows_key(h.layer_spec()),
    quantize_key(False, Layout.ROW_MAJOR),
    route_key(),
    combine_key(),
)
PACKED = (
    grouped_gemm_few_rows_key(PACKED_MXFP4),
    gate_up_few_rows_key(h.layer_spec()._replace(weights=PACKED_MXFP4)),
    *FEW[2:],
)
PACKED_PARTS = (
    grouped_gemm_few_rows_key(PACKED_MXFP4, tile_rows=PACKED_WIDE.rows),
    gate_up_few_rows_key(h.layer_spec()._replace(weights=PACKED_MXFP4), PACKED_WIDE.rows),
    *FEW[2:],
)
PACKED_MANY = (
    grouped_gemm_key(Output.BF16, weights=PACKED_MXFP4),
    gate_up_key(h.layer_spec()._replace(weights=PACKED_MXFP4), gather=False),
    quantize_key(False, Layout.PERMUTED),
    *FEW[3:],
)
PACKED_BIASED = (
    grouped_gemm_key(Output.BF16, weights=PACKED_MXFP4, bias=True),
    gate_up_key(h.layer_spec()._replace(weights=PACKED_MXFP4, bias=True), gather=False),
    *PACKED_MANY[2:],
)
SMALL_BATCH = gate_up_small_batch_key(h.layer_spec(), 8, 8), down_small_batch_key(h.layer_spec(), 8, 8)
PACKED_SPEC = h.layer_spec()._replace(weights=PACKED_MXFP4)
PACKED_SMALL_BATCH = gate_up_small_batch_key(PACKED_SPEC, 8, 8), down_small_batch_key(PACKED_SPEC, 8, 8)
PACKED_BATCH_OF_16 = gate_up_small_batch_key(PACKED_SPEC, 16, 4), down_small_batch_key(PACKED_SPEC, 16, 4)
BIASED_SMALL_BATCH = gate_up_small_batch_key(BIASED, 8, 8), down_small_batch_key(BIASED, 8, 8)
DENSE = dense_gemm_key(64), quantize_key(False, Layout.K_MAJOR)
KEEPS = grouped_gemm_key(Output.BF16, keep_b=True), tiles_of_counts_key()
KERNELS = {  # to be compiled ahead
    second_gemm: MANY,
    both_gemms: MANY,
    second_gemm_that_keeps_weights: KEEPS,
    dense_layer: NARROW,
    dense_tiles: DENSE,
    dense_tiles_of_clusters: (dense_gemm_many_rows_key(192), quantize_key(False, Layout.K_MAJOR)),
    layer_of_few_tokens: FEW,
    tokens_that_arrive_quantized: FEW,
    copies_of_quantized_tokens: (
        *FEW[2:],
        permute_key(),
        quantize_key(False, Layout.PERMUTED),
        gate_up_key(h.layer_spec(), gather=False),
        grouped_gemm_key(Output.BF16),
    ),
    ranks_that_push: (push_tokens_key(False, True), push_sums_key(), add_sums_key(), *FEW),
    ranks_with_many_blocks: (push_tokens_key(False, True), push_sums_key(), add_sums_key(), *FEW),
    ranks_with_many_tokens: (push_tokens_key(False, True), push_sums_key(), add_sums_key(), *FEW),
    ranks_that_push_rows: (
        push_tokens_key(False, True),
        push_sums_key(),
        add_rows_key(),
        route_key(),
        permute_key(),
        gate_up_key(h.layer_spec(), gather=False),
        pushed(grouped_gemm_key(Output.BF16)),
    ),
    packed_layer: PACKED,
    packed_layer_of_one_base: PACKED,
    packed_tiles_of_64: PACKED,
    packed_short_tiles: PACKED,
    packed_few_rows_of_copies: (*PACKED[:2], quantize_key(False, Layout.PERMUTED), *FEW[3:]),
    packed_parts: PACKED_PARTS,
    packed_many_rows: PACKED_MANY,
    packed_tiles_of_one_step: PACKED_MANY,
    packed_shared_tiles: PACKED_MANY,
    packed_odd_columns: PACKED_MANY,
    packed_biased_tiles: PACKED_BIASED,
    packed_early_rows: PACKED_MANY,
    packed_early_halves: PACKED_MANY,
    packed_small_batch: PACKED_SMALL_BATCH,
    packed_batch_of_16: PACKED_BATCH_OF_16,
    behind_dense_layer: (*DENSE, *FEW),
    behind_choice: (choose_experts_key(), *FEW),
    choice_behind_dense: (*DENSE, choose_experts_key()),
    gate_behind_dense: (*DENSE, router_gemm_key()),
    masked_gemm_of_few_rows: (choose_experts_key(), tiles_of_counts_key(), grouped_gemm_few_rows_key()),
    masked_gemm_of_many_rows: (choose_experts_key(), tiles_of_counts_key(), grouped_gemm_key(Output.BF16)),
    layers_in_a_row: FEW,
    small_batch: SMALL_BATCH,
    small_batch_that_chooses_experts: (choose_experts_key(), *SMALL_BATCH),
    small_batch_that_chooses_at_once: (choose_experts_key(), *SMALL_BATCH),
    small_batch_with_a_gate: (router_gemm_key(), choose_experts_key(), *SMALL_BATCH),
    small_batch_with_a_shared_gate: (choose_experts_key(), *SMALL_BATCH),
    small_batch_of_whole_sums: SMALL_BATCH,
    small_batch_at_once: SMALL_BATCH,
    one_token: SMALL_BATCH,
    token_beside_nan: SMALL_BATCH,
    logits_of_contiguous_kv: (mqa_logits_key(64),),
    logits_of_paged_kv: (paged_mqa_logits_key(64, 2), paged_mqa_metadata_key()),
    weight_gradients: (k_grouped_gemm_key(),),
    transposed_scales: (transpose_scales_key(),),
    packing: (pack_mxfp4_key(),),
    step_of_many_rows: (tiles_of_counts_key(), gate_up_key(MODIFIED, gather=False)),
    oai_of_few_rows: (tiles_of_counts_key(), gate_up_few_rows_key(MODIFIED)),
    clamped_small_batch: (gate_up_small_batch_key(MODIFIED, 8, 8), SMALL_BATCH[1]),
    oai_by_itself: (silu_mul_quant_key(False, OAI),),
    scales_of_dense_tiles: (dense_variant(DENSE[0], FP8_CHANNEL), DENSE[1]),
    scales_of_dense_clusters: (dense_variant(dense_gemm_many_rows_key(256), FP8_CHANNEL), DENSE[1]),
    scales_of_narrow_dense: (dense_variant(NARROW[0], FP8_CHANNEL), NARROW[1]),
    scales_of_many_rows: (tiles_of_counts_key(), gate_up_key(PER_CHANNEL, gather=False)),
    scales_of_few_rows: (tiles_of_counts_key(), gate_up_few_rows_key(PER_CHANNEL)),
    scales_of_small_batch: (gate_up_small_batch_key(PER_CHANNEL, 8, 8), down_small_batch_key(PER_CHANNEL, 8, 8)),
    bias_of_many_rows: (tiles_of_counts_key(), gate_up_key(BIASED, gather=False)),
    bias_of_few_rows: (tiles_of_counts_key(), gate_up_few_rows_key(BIASED)),
    bias_of_small_batch: BIASED_SMALL_BATCH,
    biases.of_many_rows: (grouped_gemm_key(Output.BF16, bias=True), tiles_of_counts_key()),
    biases.of_few_rows: (grouped_gemm_few_rows_key(bias=True), tiles_of_counts_key()),
    biases.small_batch: BIASED_SMALL_BATCH,
}


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in a source; `seen`: how a run then fails."""

    source: str
    old: str
    new: str
    run: Callable[[Device, int], None]
    seen: str
    shared_bytes: int = SHARED_BYTES  # of a multiprocessor
    multiprocessors: int = MULTIPROCESSORS

    def write_to(self, folder: Path) -> None:
        shutil.copytree(CSRC, folder)
        text = (folder / self.source).read_text()
        assert text.count(self.old) == 1, f"{self.source} has changed: {self.old!r} is not there once"
        (folder / self.source).write_text(text.replace(self.old, self.new))


FAULTS = {
    "scales are written before they have been read": Fault(
        "transpose_scales.cu",
        "        __syncthreads();\n\n        // Write K blocks.",
        "        // Write K blocks.",
        transposed_scales,
        WRONG_RESULT,
    ),
    "scales are read over those of the tile before": Fault(
        "transpose_scales.cu",
        "__syncthreads();  // the next tile is written to the same memory",
        "",
        transposed_scales,
        WRONG_RESULT,
    ),
    "scales of rows without a count are written": Fault(
        "transpose_scales.cu", "min(counts[group], rows)", "rows", transposed_scales, WRONG_RESULT
    ),
    "channels past a projection's last are packed": Fault(
        "pack_mxfp4.cu", "r < rows && g < groups", "r < rows", packing, WRONG_RESULT
    ),
    "exponents of the padding are further below than tables are": Fault(
        "pack_mxfp4.cu",
        "max(kLargestQ - (largest - exponent[i]), 0)",
        "kLargestQ - (largest - exponent[i])",
        packing,
        WRONG_RESULT,
    ),
    "further steps have exponents": Fault("pack_mxfp4.cu", "is_further ? 0 : max", "max", packing, WRONG_RESULT),
    "the K blocks of the other half's further steps are written": Fault(
        "pack_mxfp4.cu", "is_further && slot / (further / parts) == part", "is_further", packing, WRONG_RESULT
    ),
    "both signs of a byte are the first one's": Fault(
        "pack_mxfp4.cu", "signs(second) << 3", "signs(first) << 3", packing, WRONG_RESULT
    ),
    "a stage is read before it is full": Fault(
        "mma/row_tile.cuh",
        "ready = k + 1 < k_blocks && barrier_try_wait(shared.full(rings.tokens.stage), rings.tokens.phase);",
        "ready = true;",
        second_gemm,
        f"{WRONG_RESULT}|more arrivals",
    ),
    "a stage is never released": Fault(
        "mma/row_tile.cuh", "                release(shared, s);\n", "", second_gemm, "deadlock"
    ),
    "a product is read before it is there": Fault(
        "mma/row_tile.cuh",
        "            wgmma_finish(product);\n",
        "",
        second_gemm,
        f"{WRONG_RESULT}|without wgmma.fence|ended before its wgmma",
    ),
    "TMA reads stores that are not fenced": Fault(
        "epilogue/store_rows.cuh", "    fence_proxy_async();\n", "", second_gemm, "without fence.proxy.async"
    ),
    "a block ends before its stores have read": Fault(
        "grouped_gemm.cu",
        "if (threadIdx.x % kWarpgroup < storing_threads()) tma_store_wait();",
        ";",
        second_gemm,
        "ended before .* of its copies",
    ),
    "the second GEMM does not wait for rows of the first": Fault(
        "pipeline/done_counters.cuh", "__nanosleep(100);", "break;", both_gemms, WRONG_RESULT
    ),
    "weights are not found where the tile before has left them": Fault(
        "pipeline/row_tile.cuh",
        "if (kept) weights.go_back(k_blocks);",
        "",
        second_gemm_that_keeps_weights,
        WRONG_RESULT,
    ),
    "weights of other columns are taken for a tile's": Fault(
        "pipeline/row_tile.cuh", " && tile.column == column", "", second_gemm_that_keeps_weights, WRONG_RESULT
    ),
    "a block adds up the splits of a tile before all are there": Fault(
        "pipeline/split_k.cuh", "== splits - 1)", "== splits - 2)", layers_in_a_row, WRONG_RESULT
    ),
    "given tokens are read before routing has ended": Fault(
        "gate_up_few_rows.cu",
        "        wait_for_previous_kernel();\n",
        "",
        tokens_that_arrive_quantized,
        f"{WRONG_RESULT}|livelock",
    ),
    "routing does not wait for what quantizes the tokens": Fault(
        "route.cu", "if (gridDim.x == 1) wait_for_previous_kernel();", "", tokens_that_arrive_quantized, WRONG_RESULT
    ),
    "copies of a token have the scale of another K block": Fault(
        "quantize.cu", "* groups + group] : 0.0f", "* groups] : 0.0f", copies_of_quantized_tokens, WRONG_RESULT
    ),
    "tokens are loaded beside the kernel that quantizes them": Fault(
        "dense_gemm_few_rows.cu",
        "    wait_for_previous_kernel();\n",
        "",
        dense_layer,
        WRONG_RESULT,
        multiprocessors=CLUSTERS,
    ),
    "tiles take rows that are being quantized": Fault(
        "dense_gemm.cu", "    wait_for_previous_kernel();\n", "", dense_tiles, WRONG_RESULT
    ),
    "columns of a tile are scaled as those of the block of scales before": Fault(
        "dense_gemm.cu", "kBlocks > 1 && column >= scales.boundary", "false", dense_tiles, WRONG_RESULT
    ),
    "a tile is written over the one before": Fault(
        "dense_gemm.cu",
        "warpgroup_barrier(warpgroup);  // the previous tile has been stored",
        "",
        dense_tiles,
        WRONG_RESULT,
    ),
    "a tile is stored before it is there": Fault(
        "dense_gemm.cu", "warpgroup_barrier(warpgroup);  // this tile is staged", "", dense_tiles, WRONG_RESULT
    ),
    "a stage of a tile is given back before it is multiplied": Fault(
        "dense_gemm.cu",
        "    wgmma_wait();\n    __syncwarp();",
        "    __syncwarp();",
        dense_tiles,
        f"{WRONG_RESULT}|wgmma",
    ),
    "weights are loaded over those that the other block multiplies": Fault(
        "dense_gemm_many_rows.cu",
        "kFullArrivals, kMathWarps * CLUSTER)",
        "kFullArrivals, kMathWarps)",
        dense_tiles_of_clusters,
        f"{WRONG_RESULT}|more arrivals|deadlock",
    ),
    "a block ends before the other one has released its stages": Fault(
        "dense_gemm_many_rows.cu",
        "for (int s = 0; s < kStages; ++s, ring.advance()) barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);",
        "",
        dense_tiles_of_clusters,
        "has ended, whose shared memory is accessed",
    ),
    "a block loads weights before the other one has barriers": Fault(
        "dense_gemm_many_rows.cu",
        "    cluster_arrive();\n    cluster_wait();  // the other block has initialized its barriers\n",
        "",
        dense_tiles_of_clusters,
        "no mbarrier|has ended",
    ),
    "tiles of clusters are loaded while rows are being quantized": Fault(
        "dense_gemm_many_rows.cu",
        "    wait_for_previous_kernel();\n    fence_proxy_async_global();\n",
        "",
        dense_tiles_of_clusters,
        WRONG_RESULT,
    ),
    "columns of a product are scaled as those of the block of scales before": Fault(
        "dense_gemm_many_rows.cu", "column < kBoundary ? 0", "true ? 0", dense_tiles_of_clusters, WRONG_RESULT
    ),
    "a product is issued before its stage is full": Fault(
        "dense_gemm_many_rows.cu", "if (!ready)", "if (false)", dense_tiles_of_clusters, WRONG_RESULT
    ),
    "a tile of clusters is staged over the one before": Fault(
        "dense_gemm_many_rows.cu",
        "if (elected) tma_store_wait_read();",
        "",
        dense_tiles_of_clusters,
        WRONG_RESULT,
    ),
    "a block that has no cluster reads sums before all are there": Fault(
        "pipeline/cluster_sum.cuh", "named_barrier(1, kMathThreads);", ";", small_batch_of_whole_sums, WRONG_RESULT
    ),
    "a block reads sums before those of its cluster have come": Fault(
        "pipeline/cluster_sum.cuh",
        "barrier_wait(received, 0);",
        ";",
        dense_layer,
        f"{WRONG_RESULT}|ended before",
        multiprocessors=CLUSTERS,
    ),
    "the second GEMM of few rows does not wait for rows of the first": Fault(
        "pipeline/done_counters.cuh", "__nanosleep(100);", "break;", layer_of_few_tokens, WRONG_RESULT
    ),
    "the first GEMM of few rows does not await the bytes of its tokens": Fault(
        "gate_up_few_rows.cu", "kBytes + tokens.bytes()", "kBytes", layer_of_few_tokens, "deadlock"
    ),
    "all gathered rows of packed experts are those of the first token": Fault(
        "gate_up_few_rows.cu", "token[i], lane + j)", "token[i], lane)", packed_layer, "AssertionError"
    ),
    "each copy of few rows is a box of its own": Fault(
        "gate_up_few_rows.cu", "in.a_rows ? 1 : SWIZZLE_ROWS", "1", packed_few_rows_of_copies, "AssertionError|deadlock"
    ),
    "copies of few rows have the scales of other rows": Fault(
        "gate_up_few_rows.cu",
        "u32(token[i]) * row_stride",
        "u32(token[i] / 2) * row_stride",
        packed_few_rows_of_copies,
        "AssertionError",
    ),
    "a tile of few rows is staged over the one before": Fault(
        "epilogue/activated_rows.cuh",
        "        wait_by_warp(shared.template at<AllFinished>(0), phase);\n#pragma",
        "#pragma",
        packed_short_tiles,
        f"{WRONG_RESULT}|deadlock|livelock",
    ),
    "a tile of few rows is finished before all channels are there": Fault(
        "epilogue/activated_rows.cuh",
        "at<AllActivated>(0), math_warps);",
        "at<AllActivated>(0), math_warps / 2);",
        layer_of_few_tokens,
        f"{WRONG_RESULT}|deadlock|livelock",
    ),
    "a tile of few rows is counted before it is stored": Fault(
        "epilogue/activated_rows.cuh",
        "        finish_rows(shared, out, tile);\n",
        "        if (lane == 0) count_released(out.done.of_tile(tile));\n        finish_rows(shared, out, tile);\n",
        layer_of_few_tokens,
        WRONG_RESULT,
    ),
    "the second GEMM of few rows ends before the first one": Fault(
        "grouped_gemm_few_rows.cu",
        "        if (done_counters) wait_for_previous_kernel();  // then the next kernel follows both\n",
        "",
        layers_in_a_row,
        f"{WRONG_RESULT}|deadlock|livelock",
    ),
    "the second GEMM of few rows starts before its tiles are there": Fault(
        "gate_up_few_rows.cu",
        "        wait_for_previous_kernel();\n        let_next_kernel_start();",
        "        let_next_kernel_start();\n        wait_for_previous_kernel();",
        layers_in_a_row,
        f"{WRONG_RESULT}|deadlock|livelock",
        shared_bytes=2 * SHARED_BYTES,  # where both GEMMs have room at once, which no GPU has today
    ),
    "pairs take their rows before these are handed out": Fault(
        "route.cu",
        "    __syncthreads();\n    const int row =",
        "    const int row =",
        layer_of_few_tokens,
        f"{WRONG_RESULT}|bytes",
    ),
    "rows are added up before the second GEMM of few rows has written them": Fault(
        "epilogue/weighted_sum.cuh",
        "        wait_for_previous_kernel();  // as late",
        "        // as late",
        layers_in_a_row,
        f"{WRONG_RESULT}|deadlock|livelock",
    ),
    "sums of a tile are sent before those of the last one are taken": Fault(
        "gate_up_small_batch.cu",
        "        wait_by_warp(shared.at<Taken>(0), phase);\n",
        "",
        small_batch,
        f"{WRONG_RESULT}|deadlock|has ended",
        multiprocessors=CLUSTERS,
    ),
    "a lane that sends nothing falls a phase behind": Fault(
        "gate_up_small_batch.cu",
        "wait_by_warp(shared.at<Taken>(0), phase)",
        "barrier_wait(shared.at<Taken>(0), phase)",
        one_token,
        BEHIND,
        multiprocessors=CLUSTERS,
    ),
    "lanes fall a phase behind the one that fills stages": Fault(
        "pipeline/producer.cuh", "    __syncwarp();\n", "", second_gemm, BEHIND
    ),
    "lanes fall a phase behind the one that fills stages of few rows": Fault(
        "grouped_gemm_few_rows.cu",
        "fill_stages<wait_by_warp>",
        "fill_stages<barrier_wait>",
        layer_of_few_tokens,
        BEHIND,
    ),
    "each producer warp of few rows ends the tiles": Fault(
        "pipeline/producer.cuh",
        "        if (step == 0)\n            ::end_tiles<kFillers>(shared, ring);\n"
        "        else\n            finish_copies();",
        "        ::end_tiles<kFillers>(shared, ring);",
        layer_of_few_tokens,
        "ended before",
    ),
    "lanes fall a phase behind the one that loads a small batch's second GEMM": Fault(
        "down_small_batch.cu",
        "wait_by_warp(",
        "barrier_wait(",
        small_batch_of_whole_sums,
        BEHIND,
        multiprocessors=CLUSTERS,
    ),
    "lanes fall a phase behind the one that loads pages": Fault(
        "paged_mqa_logits.cu", "wait_by_warp(", "barrier_wait(", logits_of_paged_kv, BEHIND
    ),
    "sums are sent to blocks that have not begun": Fault(
        "gate_up_small_batch.cu",
        "        cluster_wait();  // the other blocks have initialized their barriers\n        compute",
        "        compute",
        small_batch,
        "no mbarrier|ended without waiting",
        multiprocessors=CLUSTERS,
    ),
    "a block is signalled after it has ended": Fault(
        "gate_up_small_batch.cu",
        " && tile + share.tile_stride < tiles",
        "",
        small_batch,
        "has ended",
        multiprocessors=CLUSTERS,
    ),
    "the second GEMM of a small batch reads what the first one has not written": Fault(
        "down_small_batch.cu",
        "load_acquire(tokens_written + lane * splits) < tokens",
        "false",
        small_batch,
        WRONG_RESULT,
        multiprocessors=CLUSTERS,
    ),
    "the first GEMM of a small batch tells what has not been written": Fault(
        "gate_up_small_batch.cu",
        "        barrier_wait(received, phase);\n",
        "        barrier_wait(received, phase);\n        if (lane == 0) atomicAdd(out.tokens_written + tile, 1);\n",
        small_batch,
        WRONG_RESULT,
        multiprocessors=CLUSTERS,
    ),
    "the experts of a small batch are listed before they are chosen": Fault(
        "gate_up_small_batch.cu",
        "    if (!math) wait_for_previous_kernel();",
        "    if (!math && warp != kLoadWarp) wait_for_previous_kernel();",
        small_batch_that_chooses_experts,
        f"{WRONG_RESULT}|bounds|livelock|deadlock",
        multiprocessors=CLUSTERS,
    ),
    "the second GEMM of a small batch starts before experts are chosen": Fault(
        "gate_up_small_batch.cu",
        "    if (!math) wait_for_previous_kernel();",
        "    if (warp == kLoadWarp) wait_for_previous_kernel();",
        small_batch_that_chooses_at_once,
        f"{WRONG_RESULT}|bounds|livelock|deadlock",
        multiprocessors=CLUSTERS,
    ),
    "experts are chosen before their logits are there": Fault(
        "choose_experts.cu",
        "    wait_for_previous_kernel();",
        "    ",
        small_batch_with_a_gate,
        f"{WRONG_RESULT}|bounds|livelock|deadlock|the logits are wrong",
        multiprocessors=CLUSTERS,
    ),
    "a shared expert has the weight that it has without a gate": Fault(
        "choose_experts.cu",
        "    return 1.f / (1.f + expf(-logit));",
        "    return 1.f;",
        small_batch_with_a_shared_gate,
        WRONG_RESULT,
        multiprocessors=CLUSTERS,
    ),
    "the weight of a shared expert is in the column of another": Fault(
        "choose_experts.cu",
        "weights[topk] = weight;",
        "weights[topk - 1] = weight;",
        small_batch_with_a_shared_gate,
        WRONG_RESULT,
        multiprocessors=CLUSTERS,
    ),
    "a small batch reads no weight of a shared expert": Fault(
        "gate_up_small_batch.cu",
        "lane < weight_columns ? topk_weights",
        "lane < size.topk - router.shared_expert ? topk_weights",
        small_batch_with_a_shared_gate,
        WRONG_RESULT,
        multiprocessors=CLUSTERS,
    ),
    "shared experts are weighed before the tokens are there": Fault(
        "choose_experts.cu",
        "    wait_for_previous_kernel();",
        "    if (!blockIdx.y) wait_for_previous_kernel();",
        choice_behind_dense,
        WRONG_RESULT,
    ),
    "logits are multiplied before the tokens are there": Fault(
        "router_gemm.cu",
        "    wait_for_previous_kernel();\n",
        "",
        gate_behind_dense,
        WRONG_RESULT,
    ),
    "experts are sorted before they are chosen": Fault(
        "route.cu",
        "    if (gridDim.x == 1) wait_for_previous_kernel();",
        "    ",
        behind_choice,
        f"{WRONG_RESULT}|bounds|livelock|deadlock",
    ),
    "groups are cut into tiles before their rows are counted": Fault(
        "tiles_of_counts.cu", "    wait_for_previous_kernel();\n", "", masked_gemm_of_few_rows, WRONG_RESULT
    ),
    "tiles of few rows are taken before they are cut": Fault(
        "grouped_gemm_few_rows.cu",
        "        if (!done_counters) wait_for_previous_kernel();",
        "            ",
        masked_gemm_of_few_rows,
        f"{WRONG_RESULT}|bounds|livelock|deadlock",
    ),
    "tiles of many rows are taken before they are cut": Fault(
        "grouped_gemm.cu",
        "        if (!done_counters) wait_for_previous_kernel();",
        "            ",
        masked_gemm_of_many_rows,
        f"{WRONG_RESULT}|bounds|livelock|deadlock",
    ),
    "a sorted layer starts before its tokens are there": Fault(
        "route.cu",
        "    if (gridDim.x == 1) wait_for_previous_kernel();",
        "    let_next_kernel_start();\n    if (gridDim.x == 1) wait_for_previous_kernel();",
        behind_dense_layer,
        WRONG_RESULT,
    ),
    "sums of the warps are added before they are there": Fault(
        "router_gemm.cu",
        "    __syncthreads();\n",
        "",
        small_batch_with_a_gate,
        f"{WRONG_RESULT}|the logits are wrong",
        multiprocessors=CLUSTERS,
    ),
    "what an earlier layer has told is taken for this one's": Fault(
        "gate_up_small_batch.cu",
        "tokens_written[tile] = 0;",
        ";",
        small_batch,
        f"{WRONG_RESULT}|livelock",
        multiprocessors=CLUSTERS,
    ),
    "the second GEMM of a small batch starts before counts are cleared": Fault(
        "gate_up_small_batch.cu",
        "    } else if (warp == kFinishWarp) {\n",
        f"    }} else if (warp == kFinishWarp) {{\n        let_next_kernel_start();\n{DELAY}",
        small_batch_at_once,
        f"{WRONG_RESULT}|livelock",
        multiprocessors=CLUSTERS,
    ),
    "the warp that loads weights starts the second GEMM before counts are cleared": Fault(
        "gate_up_small_batch.cu",
        "    } else if (warp == kFinishWarp) {\n",
        f"        let_next_kernel_start();\n    }} else if (warp == kFinishWarp) {{\n{DELAY}",
        small_batch,
        f"{WRONG_RESULT}|livelock",
        multiprocessors=CLUSTERS,
    ),
    "parts of sums are sent to blocks that have not begun": Fault(
        "down_small_batch.cu",
        "        cluster.wait();  // the other blocks have initialized their barriers\n",
        "",
        small_batch,
        "no mbarrier|ended without waiting",
        multiprocessors=CLUSTERS,
    ),
    "products of experts that a token does not have are added": Fault(
        "down_small_batch.cu",
        "if (!is_absent(scale)) ",
        "",
        token_beside_nan,
        WRONG_RESULT,
        multiprocessors=CLUSTERS,
    ),
    "scores of KV that has not arrived": Fault(
        "pipeline/logit_tiles.cuh",
        "                barrier_wait(shared.full(stage), ring.phase);\n",
        "",
        logits_of_paged_kv,
        "are wrong|more arrivals",
    ),
    "a page replaces one that is still read": Fault(
        "paged_mqa_logits.cu",
        "            wait_by_warp(shared.empty(stage), ring.phase ^ 1);\n",
        "",
        logits_of_paged_kv,
        "are wrong|more arrivals",
    ),
    "a tile replaces one that is still read": Fault(
        "pipeline/producer.cuh",
        "        kWait(shared.empty(ring.stage), ring.phase ^ 1);\n        fill(i",
        "        fill(i",
        logits_of_contiguous_kv,
        "are wrong|more arrivals",
    ),
    "a query is replaced while its scores are computed": Fault(
        "pipeline/logit_tiles.cuh",
        "        barrier_wait(shared.query_empty(ring.stage), ring.phase ^ 1);\n"
        "        if (lane_of_warp() != 0) return;\n        barrier_arrive_expect",
        "        if (lane_of_warp() != 0) return;\n        barrier_arrive_expect",
        logits_of_contiguous_kv,
        "are wrong|more arrivals|deadlock",
    ),
    "the last tile of some tokens is not stored": Fault(
        "pipeline/logit_tiles.cuh",
        "            rows.store();\n        }\n        first =",
        "        }\n        first =",
        logits_of_contiguous_kv,
        "are wrong",
    ),
    "warpgroups do not take turns": Fault(
        "pipeline/logit_tiles.cuh",
        "                if (lane == 0) barrier_arrive(shared.turn(warpgroup ^ 1));\n",
        "",
        logits_of_contiguous_kv,
        "deadlock",
    ),
    "a stage of a gradient is multiplied before it is full": Fault(
        "k_grouped_gemm.cu",
        "        barrier_wait(shared.full(stage), ring.phase);\n",
        "",
        weight_gradients,
        f"{WRONG_RESULT}|more arrivals",
    ),
    "a stage of a gradient is replaced while it is multiplied": Fault(
        "pipeline/producer.cuh",
        "        kWait(shared.empty(ring.stage), ring.phase ^ 1);\n        fill(i",
        "        fill(i",
        weight_gradients,
        f"{WRONG_RESULT}|more arrivals",
    ),
    "a stage of a gradient is given back while it is multiplied": Fault(
        "k_grouped_gemm.cu",
        "        wgmma_finish(product);\n        release(shared, stage);\n",
        "        release(shared, stage);\n        wgmma_finish(product);\n",
        weight_gradients,
        WRONG_RESULT,
    ),
    "the product of a gradient is read before it is there": Fault(
        "k_grouped_gemm.cu",
        "        wgmma_finish(product);\n",
        "",
        weight_gradients,
        f"{WRONG_RESULT}|without wgmma.fence|ended before its wgmma",
    ),
    "a group is scaled as the first one": Fault(
        "k_grouped_gemm.cu", "in.first_k_blocks.of[tile.group];", "0;", weight_gradients, WRONG_RESULT
    ),
    "warpgroups of a gradient take the same rows": Fault(
        "k_grouped_gemm.cu",
        "wgmma_start(product, shared.at<A>(stage, rows),",
        "wgmma_start(product, shared.at<A>(stage, 0),",
        weight_gradients,
        WRONG_RESULT,
    ),
    "codes 16 channels further on are those before": Fault(
        "device/fp4.cuh", "magnitudes >> 16", "magnitudes", packed_layer, "AssertionError"
    ),
    "signs 16 channels further on are those before": Fault(
        "device/fp4.cuh", "word << 4 & kSigns", "word & kSigns", packed_layer, "AssertionError"
    ),
    "small magnitudes are zero": Fault(
        "device/fp4.cuh", "(8 | mantissa) >> (1 - exponent)", "0", packed_layer, "AssertionError"
    ),
    "rows have the exponents of the rows before": Fault(
        "formats/weights_mxfp4.cuh",
        "row ? of_rows.y : of_rows.x",
        "of_rows.x",
        packed_layer,
        "AssertionError",
    ),
    "chunks have the bases of the first rows": Fault(
        "formats/mxfp4_chunks.cuh", "scales + block * pitch", "scales", packed_layer, "AssertionError"
    ),
    "further steps are left out": Fault(
        "formats/mxfp4_chunks.cuh",
        "return map.steps;",
        "return map.steps - map.further;",
        packed_layer,
        "AssertionError",
    ),
    "further steps are of other K blocks": Fault(
        "formats/mxfp4_chunks.cuh",
        "int(__ldg(further + step - k_blocks))",
        "0",
        packed_layer,
        "AssertionError",
    ),
    "channels have the chunks of those before": Fault(
        "formats/mxfp4_chunks.cuh", "block + block % map->groups", "block", packed_layer, "AssertionError|outside"
    ),
    "the second slab has the codes of the first": Fault(
        "formats/weights_mxfp4.cuh", "chunk + slab * kSlabCodes", "chunk", packed_layer, "AssertionError"
    ),
    "the first of two products is added before it is there": Fault(
        "mma/decoded_row_tile.cuh",
        "            wgmma_wait_for_earlier();\n            turns.pass();\n            wgmma_results_ready",
        "            turns.pass();\n            wgmma_results_ready",
        packed_shared_tiles,
        WRONG_RESULT,
    ),
    "nobody takes the last turn": Fault(
        "mma/decoded_row_tile.cuh", "if (warpgroup == 0) take();", "", packed_shared_tiles, "ended with threads at"
    ),
    "decoded weights are not fenced": Fault(
        "pipeline/decode_row_tile.cuh",
        "            fence_proxy_async();\n",
        "",
        packed_many_rows,
        "without fence.proxy.async",
    ),
    "a stage is full before its weights are decoded": Fault(
        "gate_up.cu", "kFullArrivals = 2 + kDecoderWarps;", "kFullArrivals = 2;", packed_many_rows, BEHIND_OR_WRONG
    ),
    "weights are decoded over those that are multiplied": Fault(
        "pipeline/decode_row_tile.cuh",
        "            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);\n",
        "",
        packed_many_rows,
        BEHIND_OR_WRONG,
    ),
    "chunks are loaded over those that are decoded": Fault(
        "pipeline/decode_row_tile.cuh",
        "                decoder[i].write(rows, first + i, shared.template at<WeightTables>(0));\n"
        "                __syncwarp();\n"
        "                if (lane == 0) barrier_arrive(empty[i]);\n",
        "                if (lane == 0) barrier_arrive(empty[i]);\n"
        "                decoder[i].write(rows, first + i, shared.template at<WeightTables>(0));\n"
        "                __syncwarp();\n",
        packed_many_rows,
        BEHIND_OR_WRONG,
    ),
    "chunks are decoded before they are there": Fault(
        "pipeline/decode_row_tile.cuh",
        "                barrier_wait(shared.template at<ChunksFull>(chunks.stage), chunks.phase);\n",
        "",
        packed_many_rows,
        "shared memory at",
    ),
    "the first warp passes tiles on over those before": Fault(
        "pipeline/shared_tiles.cuh",
        "        wait_by_warp(shared.template at<TileRead>(slot()), phase() ^ 1);\n",
        "",
        packed_tiles_of_one_step,
        BEHIND_OR_WRONG,
        multiprocessors=2,
    ),
    "a tile is passed on before the last warp has read the one before": Fault(
        "pipeline/shared_tiles.cuh",
        "kBlocksOfTile * (1 + kDecoderWarps) + 1;",
        "kBlocksOfTile * (1 + kDecoderWarps);",
        packed_tiles_of_one_step,
        BEHIND_OR_WRONG,
        multiprocessors=2,
    ),
    "lanes read a tile that others have": Fault(
        "pipeline/shared_tiles.cuh",
        "        __syncwarp();\n        if (lane_of_warp() == 0) {",
        "        if (lane_of_warp() == 0) {",
        packed_tiles_of_one_step,
        BEHIND_OR_WRONG,
        multiprocessors=2,
    ),
    "a block expects one tile": Fault(
        "pipeline/shared_tiles.cuh",
        "if (kExpects) barrier_arrive",
        "if (false) barrier_arrive",
        packed_many_rows,
        BEHIND,
    ),
    "the second block has a column that does not exist": Fault(
        "pipeline/shared_tiles.cuh",
        "tile.rows > kBlockM || (tile.column | 1) >= columns",
        "tile.rows > kBlockM",
        packed_odd_columns,
        "outside of the operands|AssertionError",
    ),
    "the weights of more tokens than a stage has room for are not split": Fault(
        "pipeline/shared_tiles.cuh",
        "tile.rows > kBlockM || (tile.column | 1) >= columns",
        "(tile.column | 1) >= columns",
        packed_shared_tiles,
        f"{BEHIND_OR_WRONG}|outside of the operands",
    ),
    "rows of split tiles are counted once": Fault(
        "pipeline/shared_tiles.cuh", "? kBlocksOfTile * columns", "? columns", packed_early_halves, "AssertionError"
    ),
    "rows of a column without a second one are counted once": Fault(
        "pipeline/shared_tiles.cuh",
        "columns + columns % kColumnsOfTile",
        "columns",
        packed_early_rows,
        "AssertionError",
    ),
    "the next tile is claimed in each column of a split one": Fault(
        "pipeline/decode_row_tile.cuh",
        "if (own.count == 1) prepare(step)",
        "prepare(step)",
        packed_shared_tiles,
        "AssertionError",
    ),
    "the second block decodes its chunk to the other one's place": Fault(
        "pipeline/decode_row_tile.cuh",
        "decode_tile<1>(steps, rank_of_block());",
        "decode_tile<1>(steps, 0);",
        packed_shared_tiles,
        "AssertionError|without fence.proxy.async",
    ),
    "further tokens are loaded over the second block's chunk": Fault(
        "pipeline/decode_row_tile.cuh",
        "further_tokens(shared, s, rank_of_block(), row)",
        "further_tokens(shared, s, 0, row)",
        packed_shared_tiles,
        "AssertionError|without fence.proxy.async",
    ),
    "a warpgroup has the other one's second block of tokens": Fault(
        "mma/decoded_row_tile.cuh", "kHasHalf ? 2 : block + 2", "2", packed_shared_tiles, "AssertionError"
    ),
    "the second block of tokens has the scales of the first": Fault(
        "mma/decoded_row_tile.cuh",
        "scales.read(shared, s, first + part.token(i), part.chunk + j);",
        "scales.read(shared, s, first + part.token(0), part.chunk + j);",
        packed_shared_tiles,
        "AssertionError",
    ),
    "the second warpgroup has tokens of a tile with at most 64": Fault(
        "mma/decoded_row_tile.cuh", "short_tile ? 0 : warpgroup", "warpgroup", packed_odd_columns, "AssertionError"
    ),
    "both warpgroups multiply the same half of a chunk": Fault(
        "mma/decoded_row_tile.cuh",
        "part.chunk * kHalfN + warpgroup * kHalfN / 2",
        "part.chunk * kHalfN",
        packed_shared_tiles,
        "AssertionError",
    ),
    "the gate projection has the scale of the up projection": Fault(
        "mma/decoded_row_tile.cuh",
        "scale_of_half(kPaired ? i : chunk)",
        "scale_of_half(kPaired ? 1 : chunk)",
        packed_shared_tiles,
        "AssertionError",
    ),
    "the other block's channels have no part in a scale": Fault(
        "epilogue/swiglu_chunks.cuh",
        "const uint2 sent = load_shared_8(at);",
        "const uint2 sent = {0, 0};",
        packed_shared_tiles,
        "AssertionError",
    ),
    "the other block's magnitudes are read before they are there": Fault(
        "epilogue/swiglu_chunks.cuh",
        "        barrier_wait(there, count / 2 % 2);\n",
        "",
        packed_shared_tiles,
        BEHIND_OR_WRONG,
    ),
    "magnitudes are sent over those that are read": Fault(
        "epilogue/swiglu_chunks.cuh",
        "count % 2 * kMathWarpgroups + warpgroup",
        "warpgroup",
        packed_shared_tiles,
        BEHIND_OR_WRONG,
    ),
    "the second block of tokens has the magnitudes of the first": Fault(
        "epilogue/swiglu_chunks.cuh",
        "block == 0 ? sent.x : sent.y",
        "sent.x",
        packed_shared_tiles,
        "AssertionError",
    ),
    "the other warpgroup's channels of the third block have no part in a scale": Fault(
        "epilogue/swiglu_chunks.cuh",
        "        if (Part::kHasHalf) exchange(shared, warpgroup, first, exchanges.buffer, amax[1]);\n",
        "",
        packed_shared_tiles,
        "AssertionError",
    ),
    "both warpgroups store the same channels of the third block": Fault(
        "epilogue/swiglu_chunks.cuh",
        "(Part::kHasHalf ? warpgroup * kSecondColumns : 0)",
        "0",
        packed_shared_tiles,
        "AssertionError",
    ),
    "biases of the gate and up projections are not in turns": Fault(
        "gate_up.cu",
        "turn % 2 * to_up + channel",
        "turn / 4 * to_up + row % kHalfN",
        packed_biased_tiles,
        "AssertionError",
    ),
    "half of a chunk has the biases of the other one": Fault(
        "gate_up.cu",
        "biases_at(warpgroup * kHalfN / 2), half",
        "biases_at(0), half",
        packed_biased_tiles,
        "AssertionError",
    ),
    "the owner of the queue ends before its last tiles are read": Fault(
        "pipeline/decode_row_tile.cuh",
        "        tiles.finish(shared);\n",
        "",
        packed_shared_tiles,
        "has ended, whose shared memory|ended before .* of its copies",
    ),
    "barriers are used before the other block has made them": Fault(
        "pipeline/decode_row_tile.cuh",
        "full_arrivals, math_warps);\n    cluster_arrive();\n    cluster_wait();\n",
        "full_arrivals, math_warps);\n",
        packed_shared_tiles,
        "no mbarrier is at",
    ),
    "codes of many rows are those of other threads": Fault(
        "formats/weights_mxfp4_decoded.cuh",
        "slot_of(row(), thread)",
        "(row() * 4 + thread)",
        packed_many_rows,
        "AssertionError",
    ),
    "codes of few rows are those of other threads": Fault(
        "formats/weights_mxfp4.cuh", "slot_of(thread / 4, thread % 4)", "thread", packed_layer, "AssertionError"
    ),
    "sums of few rows are not multiplied by their base": Fault(
        "mma/swap_ab.cuh", "*= base[row_index(e)]", "*= 1.f", packed_layer_of_one_base, "AssertionError"
    ),
    "tiles of 64 tokens release a stage twice": Fault(
        "mma/swap_ab.cuh",
        "if (step > 0) release(shared, before);",
        "release(shared, before);",
        packed_tiles_of_64,
        "AssertionError|more arrivals|deadlock|livelock",
    ),
    "sums of both projections have the base of the gate": Fault(
        "mma/swap_ab.cuh", ".scale(1) : base[0]", ".scale(0) : base[0]", packed_layer_of_one_base, "AssertionError"
    ),
    "tiles of 64 tokens keep their last stage": Fault(
        "mma/swap_ab.cuh",
        "        fence_proxy_async();\n        release(shared, s);\n    }\n#pragma",
        "    }\n#pragma",
        packed_tiles_of_64,
        "deadlock|livelock",
    ),
    "a part of the tokens is added before its product is there": Fault(
        "mma/swap_ab_parts.cuh",
        "            wgmma_wait_for_earlier();\n",
        "            ;\n",
        packed_parts,
        "AssertionError",
    ),
    "the last part is added before its product is there": Fault(
        "mma/swap_ab_parts.cuh",
        "            wgmma_wait();",
        "            wgmma_wait_for_earlier();",
        packed_parts,
        "AssertionError",
    ),
    "a stage is released while parts are being multiplied": Fault(
        "mma/swap_ab_parts.cuh",
        "        if constexpr (kLast) {\n            keep_weights();",
        "        if constexpr (kUnit == 0) {\n            keep_weights();",
        packed_parts,
        "AssertionError|more arrivals|wgmma",
    ),
    "all parts multiply the first tokens": Fault(
        "mma/swap_ab_parts.cuh", "Parts::begin(part(kUnit))), never", "0), never", packed_parts, "AssertionError"
    ),
    "the second slab is added to the sums of the first": Fault(
        "mma/swap_ab_parts.cuh", "sum[kUnit % kSlabs][kBegin", "sum[0][kBegin", packed_parts, "AssertionError"
    ),
    "a result is staged before the one before it has been read": Fault(
        "epilogue/store_transposed.cuh",
        "    warpgroup_barrier(warpgroup);  // the staging buffer is free\n",
        "",
        packed_tiles_of_64,
        "AssertionError",
    ),
    "threads exchange channels that they keep": Fault(
        "epilogue/store_transposed.cuh",
        "odd ? first : second, 1",
        "odd ? second : first, 1",
        packed_parts,
        "AssertionError",
    ),
    "the second slab has the rows of the first": Fault(
        "mma/swap_ab_parts.cuh", "row + kUnit * 64", "row", packed_parts, "AssertionError"
    ),
    "scales of tokens are not side by side": Fault(
        "gate_up_few_rows.cu",
        "Order::place(lane_of_warp())",
        "lane_of_warp()",
        packed_layer_of_one_base,
        "AssertionError",
    ),
    "packed codes are not in their slots": Fault(
        "pack_mxfp4.cu", "slot_of(place, thread)", "(place * 4 + thread)", packing, WRONG_RESULT
    ),
    "decoded rows are not swizzled": Fault(
        "formats/weights_mxfp4_decoded.cuh",
        "(group() * 2 ^ row()) * 16",
        "group() * 2 * 16",
        packed_many_rows,
        "AssertionError",
    ),
    "decoded rows have the exponents of the rows before": Fault(
        "formats/weights_mxfp4_decoded.cuh",
        "unit / 2 ? entries.y : entries.x",
        "entries.x",
        packed_many_rows,
        "AssertionError",
    ),
    "both chunks are decoded to the first half": Fault(
        "pipeline/decode_row_tile.cuh",
        "write(rows, first + i,",
        "write(rows, first,",
        packed_many_rows,
        "AssertionError",
    ),
    "small magnitudes are those of normal numbers": Fault(
        "device/fp4.cuh", "kLeastNormalFp4 = 24", "kLeastNormalFp4 = 0", packed_many_rows, "AssertionError"
    ),
    "normal magnitudes are those of other exponents": Fault(
        "device/fp4.cuh", "0x04081000", "0x04081800", packed_tiles_of_one_step, "AssertionError"
    ),
    "a further step of one half is one of the other": Fault(
        "pipeline/half_chunks.cuh", "half == is_second(step))", "true)", packed_many_rows, "AssertionError"
    ),
    "further steps have the tokens of the first half": Fault(
        "pipeline/half_chunks.cuh",
        "is_second(step) ? scales + to_next : scales",
        "scales",
        packed_many_rows,
        "AssertionError",
    ),
    "a tile that passes N reads what follows": Fault(
        "pipeline/half_chunks.cuh",
        "to_next = block + 1 < blocks ? pitch : 0;\n    }\n    DEVICE void start",
        "to_next = pitch;\n    }\n    DEVICE void start",
        packed_many_rows,
        "outside of the operands",
    ),
    "sums of odd channels are those of even ones": Fault(
        "mma/gate_up_rows.cuh",
        "make_float4(even.y, odd.y,",
        "make_float4(even.y, even.y,",
        packed_small_batch,
        "AssertionError",
        multiprocessors=CLUSTERS,
    ),
    "sums of both channels of two lanes have one place": Fault(
        "mma/gate_up_rows.cuh",
        "kStoredPaired ? lane / 4 % 2",
        "kStoredPaired ? 0",
        packed_small_batch,
        "AssertionError|deadlock",
        multiprocessors=CLUSTERS,
    ),
    "codes of the second pair of channels are those of the first": Fault(
        "mma/gate_up_rows.cuh",
        "second = codes >> 16",
        "second = codes",
        packed_small_batch,
        "AssertionError",
        multiprocessors=CLUSTERS,
    ),
    "both slabs of a stage are the first one": Fault(
        "gate_up_small_batch.cu",
        "slab % kSlabsOfStage * 64",
        "0",
        packed_batch_of_16,
        "AssertionError",
        multiprocessors=CLUSTERS,
    ),
    "a stage is released before its second slab is multiplied": Fault(
        "gate_up_small_batch.cu",
        "if (last) release(shared, s);",
        "if (first) release(shared, s);",
        packed_batch_of_16,
        "AssertionError|more arrivals|deadlock",
        multiprocessors=CLUSTERS,
    ),
    "both projections of a small batch have the scales of the gate": Fault(
        "mma/swap_ab.cuh",
        "half{weights.scale(0), weights.scale(1)}",
        "half{weights.scale(0), weights.scale(0)}",
        packed_small_batch,
        "AssertionError",
        multiprocessors=CLUSTERS,
    ),
    "tokens of all K blocks are those of the first": Fault(
        "gate_up_small_batch.cu",
        "return at<X>(step * kTokens);",
        "return at<X>(0);",
        packed_small_batch,
        "AssertionError",
        multiprocessors=CLUSTERS,
    ),
    "a team multiplies the units of the other": Fault(
        "down_small_batch.cu",
        "Ring<kStages> ring{team};",
        "Ring<kStages> ring;",
        packed_small_batch,
        "deadlock|livelock|AssertionError",
        multiprocessors=CLUSTERS,
    ),
    "the sums of one team are added up": Fault(
        "pipeline/cluster_sum.cuh",
        "from < splits * kTeams;",
        "from < splits;",
        packed_small_batch,
        "AssertionError",
        multiprocessors=CLUSTERS,
    ),
    "SiLU is not limited": Fault(
        "epilogue/activation.cuh",
        "alpha), activated_limit)",
        "alpha), gate_limit)",
        step_of_many_rows,
        "AssertionError",
    ),
    "the gate is not limited": Fault(
        "epilogue/activation.cuh", "at_most(gate, gate_limit)", "gate", oai_of_few_rows, "AssertionError"
    ),
    "the up projection is not limited": Fault(
        "epilogue/activation.cuh",
        "at_most_in_magnitude(up, up_limit)",
        "up",
        clamped_small_batch,
        "AssertionError",
        multiprocessors=CLUSTERS,
    ),
    "the up projection is limited on one side": Fault(
        "epilogue/activation.cuh", "min.NaN.xorsign.abs.f32", "min.NaN.f32", oai_by_itself, "AssertionError"
    ),
    "beta is not added": Fault("epilogue/activation.cuh", " + beta)", ")", oai_by_itself, "AssertionError"),
    "alpha is not applied": Fault(
        "epilogue/activation.cuh", "gate_limit), alpha)", "gate_limit))", oai_of_few_rows, "AssertionError"
    ),
    "sums of columns are not scaled": Fault(
        "formats/row_scales.cuh",
        "apply(sum[element_at(row, 2 * i + 1)], two.y);",
        ";",
        scales_of_many_rows,
        "AssertionError",
    ),
    "scales of columns are read before they are there": Fault(
        "formats/row_scales.cuh", "        copy_async_wait();\n", "", scales_of_many_rows, "AssertionError"
    ),
    "sums of a tail are not scaled": Fault(
        "gate_up.cu",
        "        scale_rows(scales_at(half, warpgroup * kWarpgroupM), tail[half]);\n",
        "",
        scales_of_many_rows,
        "AssertionError",
    ),
    "the up projection has the scales of the gate": Fault(
        "gate_up.cu", "half * out.channels + tile.column", "tile.column", scales_of_many_rows, "AssertionError"
    ),
    "the up projection of few rows has the scales of the gate": Fault(
        "gate_up_few_rows.cu",
        "(tile.expert * 2 + i % 2) * in.intermediate",
        "tile.expert * 2 * in.intermediate",
        scales_of_few_rows,
        "AssertionError",
    ),
    "sums are scaled by each split and once more": Fault(
        "gate_up_few_rows.cu",
        "    if (kWideTiles || in.splits.count == 1 ||",
        "    scales.scale(sum);\n    if (kWideTiles || in.splits.count == 1 ||",
        scales_of_few_rows,
        "AssertionError",
    ),
    "the up projection of a small batch has the scales of the gate": Fault(
        "gate_up_small_batch.cu",
        "* 2 + i / 4) * size.intermediate",
        "* 2) * size.intermediate",
        scales_of_small_batch,
        "AssertionError",
        multiprocessors=CLUSTERS,
    ),
    "sums of dense tiles are not scaled": Fault(
        "dense_gemm.cu",
        "        scale_columns(shared.row_scales(warp / 4), sum);\n",
        "",
        scales_of_dense_tiles,
        WRONG_RESULT,
    ),
    "both halves of a dense tile have the same scales": Fault(
        "dense_gemm_many_rows.cu",
        "scale_columns(row_scales + half * kHalfN * 4,",
        "scale_columns(row_scales,",
        scales_of_dense_clusters,
        WRONG_RESULT,
    ),
    "sums of a dense layer are scaled twice": Fault(
        "dense_gemm_few_rows.cu",
        "scales.scale(sum);",
        "scales.scale(sum), scales.scale(sum);",
        scales_of_narrow_dense,
        WRONG_RESULT,
        multiprocessors=CLUSTERS,
    ),
    "products of a small batch have the scales of another expert": Fault(
        "down_small_batch.cu",
        "list.experts[units.unit.i] * share.hidden;",
        "list.experts[0] * share.hidden;",
        scales_of_small_batch,
        "AssertionError",
        multiprocessors=CLUSTERS,
    ),
    "the first GEMM adds its bias to no rows": Fault(
        "gate_up.cu", "add_to_columns(biases_at(half, column), sum[half]);", "", bias_of_many_rows, "AssertionError"
    ),
    "the first GEMM adds its bias to no tail": Fault(
        "gate_up.cu",
        "add_to_rows(biases_at(half, warpgroup * kWarpgroupM), tail[half]);",
        "",
        bias_of_many_rows,
        "AssertionError",
    ),
    "the gate has the bias of the up projection": Fault(
        "gate_up.cu",
        "copy_biases(biases_at(half, 0),",
        "copy_biases(biases_at(1 - half, 0),",
        bias_of_many_rows,
        "AssertionError",
    ),
    "biases are read before they are there": Fault(
        "gate_up.cu", "\n    await_row_values(warpgroup);", "", bias_of_many_rows, "AssertionError"
    ),
    "few rows of the first GEMM have no bias": Fault(
        "gate_up_few_rows.cu", "biases.add_to(sum);", "", bias_of_few_rows, "AssertionError"
    ),
    "each split of the first GEMM adds its bias": Fault(
        "gate_up_few_rows.cu",
        "    if (kWideTiles || in.splits.count == 1",
        "    biases.add_to(sum);\n    if (kWideTiles || in.splits.count == 1",
        bias_of_few_rows,
        "AssertionError",
    ),
    "few rows have the bias of the other projection": Fault(
        "gate_up_few_rows.cu",
        "biases(out.bias, row);",
        "biases(out.bias, [&](int i) { return row(i ^ 1); });",
        bias_of_few_rows,
        "AssertionError",
    ),
    "the first kernel of a small batch adds no bias": Fault(
        "mma/gate_up_rows.cuh",
        "half[h].x += of[0], half[h].y += of[1], half[h].z += of[2], half[h].w += of[3];",
        "",
        bias_of_small_batch,
        "AssertionError",
    ),
    "a small batch has the bias of the other projection": Fault(
        "mma/gate_up_rows.cuh",
        "values.biases.of + h * 4",
        "values.biases.of + (1 - h) * 4",
        bias_of_small_batch,
        "AssertionError",
    ),
    "the second GEMM adds its bias to no rows": Fault(
        "grouped_gemm.cu",
        "add_to_columns(biases_at(first_half + half, 0), sum[half]);",
        "",
        biases.of_many_rows,
        WRONG_RESULT,
    ),
    "the second GEMM adds its bias to no tail": Fault(
        "grouped_gemm.cu",
        "add_to_rows(biases_at(half, warpgroup * kWarpgroupM), tail[half]);",
        "",
        biases.of_many_rows,
        WRONG_RESULT,
    ),
    "few rows of the second GEMM have no bias": Fault(
        "grouped_gemm_few_rows.cu", "biases.add_to(sum);", "", biases.of_few_rows, WRONG_RESULT
    ),
    "the second kernel of a small batch adds no bias": Fault(
        "down_small_batch.cu", "sum[0][e] += biases[e];", "sum[0][e] += 0.f;", biases.small_batch, "AssertionError"
    ),
    "each split of a small batch adds the bias": Fault(
        "down_small_batch.cu",
        "if (share.split == 0 && team == 0) weighted",
        "weighted",
        biases.small_batch,
        "AssertionError",
    ),
    "biases of a small batch have no weight": Fault(
        "epilogue/weighted_biases.cuh",
        "sum += weight[j] * value[j][0]",
        "sum += value[j][0]",
        biases.small_batch,
        "AssertionError",
    ),
    "only some experts of a token add their bias": Fault(
        "epilogue/weighted_biases.cuh",
        "begin < router.topk; begin += kAtOnce",
        "begin < 1; begin += kAtOnce",
        biases.small_batch,
        "AssertionError",
    ),
    "stores of a block are not ordered before its end, if another one counts for it": Fault(
        "ranks/window.cuh",
        "count_in_system(&window->blocks_done)",
        "atomicAdd(&window->blocks_done, 1)",
        ranks_with_many_blocks,
        WRONG_RESULT,
    ),
    "every block counts for all": Fault(
        "ranks/window.cuh", "        if (!last) return;\n", "", ranks_with_many_blocks, f"{WRONG_RESULT}|{BEHIND}"
    ),
    "blocks are counted on from the push before": Fault(
        "ranks/window.cuh", "    window->blocks_done = 0;\n", "", ranks_with_many_blocks, WRONG_RESULT
    ),
    "stores of a block are not ordered before its end": Fault(
        "ranks/window.cuh",
        "add_release_system(count, ",
        "atomicAdd(count, ",
        ranks_that_push,
        WRONG_RESULT,
    ),
    "a push does not wait for those of other ranks": Fault(
        "ranks/window.cuh",
        "while (int(load_acquire_system(window->arrived[rank]) - push) < 0)",
        "while (false)",
        ranks_that_push,
        WRONG_RESULT,
    ),
    "a push waits for this rank alone": Fault(
        "ranks/window.cuh",
        "load_acquire_system(window->arrived[rank])",
        "load_acquire_system(window->arrived[window->rank])",
        ranks_that_push,
        WRONG_RESULT,
    ),
    "a push takes the one before for its own": Fault(
        "ranks/window.cuh", "push = window->pushes + kPush;", "push = window->pushes;", ranks_that_push, WRONG_RESULT
    ),
    "a block counts before all of its threads have stored": Fault(
        "ranks/window.cuh", "    __syncthreads();\n    if (many)", "    if (many)", ranks_that_push, WRONG_RESULT
    ),
    "a push ends a block early": Fault(
        "ranks/window.cuh", "kPush - (gridDim.x - 1)", "kPush - (gridDim.x - 2)", ranks_that_push, WRONG_RESULT
    ),
    "a push waits for a block that does not exist": Fault(
        "ranks/window.cuh", "kPush - (gridDim.x - 1)", "kPush - gridDim.x", ranks_that_push, BEHIND
    ),
    "a push ends with its last block": Fault(
        "ranks/window.cuh", "kPush - (gridDim.x - 1)", "kPush", ranks_that_push, WRONG_RESULT
    ),
    "a grid has more blocks than a push counts": Fault(
        "ranks/window.cuh", "kPush = 1 << 16", "kPush = 1 << 1", ranks_that_push, WRONG_RESULT
    ),
    "a count that has overflowed is taken for a small one": Fault(
        "ranks/window.cuh",
        "int(load_acquire_system(window->arrived[rank]) - push) < 0",
        "load_acquire_system(window->arrived[rank]) < push",
        ranks_that_push,
        f"{WRONG_RESULT}|{BEHIND}",
    ),
    "tokens share the place of their scales": Fault(
        "push_tokens.cu",
        "scale = scale == scales ? scales + MAX_GROUPS : scales;",
        "",
        ranks_with_many_tokens,
        WRONG_RESULT,
    ),
    "tokens are pushed before the kernel before has made them": Fault(
        "push_tokens.cu", "    wait_for_previous_kernel();\n", "", ranks_that_push, WRONG_RESULT
    ),
    "sums are added before all have arrived": Fault(
        "add_sums.cu", "    wait_for_previous_kernel();\n", "", ranks_that_push, WRONG_RESULT
    ),
    "sums are pushed before the second GEMM has ended": Fault(
        "epilogue/weighted_sum.cuh",
        "        wait_for_previous_kernel();  // as late",
        "        // as late",
        ranks_that_push,
        WRONG_RESULT,
    ),
    "a push of rows does not wait for those of other ranks": Fault(
        "ranks/window.cuh",
        "while (int(load_acquire_system(window->arrived[rank]) - push) < 0)",
        "while (false)",
        ranks_that_push_rows,
        WRONG_RESULT,
    ),
    "a block ends before its rows have arrived": Fault(
        "epilogue/result.cuh",
        "int storing_threads() { return kWarpgroup; }",
        "int storing_threads() { return 1; }",
        ranks_that_push_rows,
        "ended before .* of its copies",
    ),
    "a block does not wait for its rows to be written": Fault(
        "grouped_gemm.cu", "tma_store_wait();", "tma_store_wait_read();", ranks_that_push_rows, WRONG_RESULT
    ),
    "rows are counted before the second GEMM has ended": Fault(
        "push_sums.cu",
        "    wait_for_previous_kernel();\n    finish_push",
        "    finish_push",
        ranks_that_push_rows,
        WRONG_RESULT,
    ),
    "a row is pushed to the place of the next": Fault(
        "epilogue/push_rows.cuh",
        "i64(pair % pairs_of_rank)",
        "i64((pair + 1) % pairs_of_rank)",
        ranks_that_push_rows,
        WRONG_RESULT,
    ),
    "a row is pushed to the next rank": Fault(
        "epilogue/push_rows.cuh",
        "(pair / pairs_of_rank,",
        "((pair / pairs_of_rank + 1) % window->ranks,",
        ranks_that_push_rows,
        WRONG_RESULT,
    ),
    "rows are staged over those that are being pushed": Fault(
        "epilogue/push_rows.cuh",
        "        tma_store_wait_read();\n",
        "",
        ranks_that_push_rows,
        WRONG_RESULT,
        multiprocessors=1,
    ),
    "rows are pushed before all lanes have staged them": Fault(
        "epilogue/push_rows.cuh",
        "        fence_proxy_async();\n        __syncwarp();",
        "        fence_proxy_async();",
        ranks_that_push_rows,
        f"{WRONG_RESULT}|fence",
    ),
    "staged rows have no fence before they are pushed": Fault(
        "epilogue/push_rows.cuh", "        fence_proxy_async();\n", "", ranks_that_push_rows, "fence"
    ),
}


@pytest.fixture(scope="session")
def faulty_kernels(emulator_runtime: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernels]:
    """The kernels of each fault, by its name."""
    kernels = {}
    for name in faults.cases_of_today(FAULTS, 3):
        fault = FAULTS[name]
        folder = tmp_path_factory.mktemp("fault")
        fault.write_to(folder / "csrc")
        kernels[name] = Kernels(folder / "csrc")
        kernels[name].start(*KERNELS[fault.run])
    return kernels


def failures(emulator: Device, fault: Fault) -> Iterator[str]:
    """Yields how the runs fail that do, under one schedule after another."""
    for seed in range(SCHEDULES):
        try:
            fault.run(emulator, seed)
        except (AssertionError, EmulatorError) as error:
            yield f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", faults.cases_of_today(FAULTS, 3))
def test_a_fault_is_seen(emulator_runtime: ctypes.CDLL, faulty_kernels: dict[str, Kernels], name: str) -> None:
    fault = FAULTS[name]
    emulator = Device(emulator_runtime, faulty_kernels[name], fault.multiprocessors, fault.shared_bytes)
    others = []
    for text in failures(emulator, fault):
        if re.search(fault.seen, text):
            return
        others.append(text)
    pytest.fail(f"not seen in {SCHEDULES} schedules, but: {others}")
