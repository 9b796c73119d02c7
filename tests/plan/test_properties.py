"""Properties of the plans and launches of both backends, for random layers, numbers of tokens and GPUs."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8moe_plugin.checkpoint.shapes import MAX_LOCAL_EXPERTS
from fp8moe_plugin.formats.activation import SILU, Activation, ActivationNumbers
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Launch, Slot, TensorMap
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.launches.kernel_sets import all_kernels
from fp8moe_plugin.launches.operands import LAYER_SLOTS, Rows, Weights
from fp8moe_plugin.plan.gpu_tuning import UNTUNED, GpuTuning
from fp8moe_plugin.plan.keys import SM90, KernelKey
from fp8moe_plugin.plan.scratch import PIECE, scale_pitch, tile_capacity
from fp8moe_plugin.plan.sm90.constants import PAIRS_PER_CHUNK
from fp8moe_plugin.plan.spec import Arrival, GroupedBy, Grouping, LayerSpec, MoeShape, Output
from fp8moe_plugin.plan.triton.catalog import TARGETS
from fp8moe_plugin.plan.tuning import MULTIPROCESSORS
from tests import helpers as h

many = settings(max_examples=5 * settings.default.max_examples)  # an example takes a few milliseconds
backends = pytest.mark.parametrize("targets", [st.just(SM90), st.sampled_from(list(TARGETS))], ids=["sm90", "triton"])
X, X_SCALES, W13, W13_SCALES, W2, W2_SCALES, LAYOUT, OUT, SCRATCH = SLOTS = tuple(map(Slot, range(9)))
W13_BIAS, W2_BIAS = Slot(9), Slot(10)


def scaled(most: int) -> st.SearchStrategy[int]:
    """Numbers from 1 to `most`, of any magnitude."""
    return st.integers(0, most.bit_length() - 1).flatmap(lambda bits: st.integers(2**bits, min(2 ** (bits + 1), most)))


@st.composite
def specs(draw: st.DrawFn) -> LayerSpec:
    local = draw(scaled(MAX_LOCAL_EXPERTS - 1))
    shape = MoeShape(
        topk=draw(st.integers(1, 16)),
        hidden=128 * draw(scaled(80)),
        intermediate=128 * draw(scaled(40)),
        local_experts=local,
        global_experts=local * draw(st.sampled_from((1, 2, 8, 64))),
    )
    shape = shape._replace(topk=min(shape.topk, shape.global_experts))
    activation = draw(st.sampled_from((SILU, *h.MODIFIED)))
    names = "ue8m0", "bias", "batch_invariant", "quantized"
    weights = draw(st.sampled_from((FP8_BLOCK, PACKED_MXFP4)))
    spec = LayerSpec(shape, weights, activation=activation, **{name: draw(st.booleans()) for name in names})
    if weights is PACKED_MXFP4:
        spec = spec._replace(further_steps=(2 * draw(st.integers(0, 2)), draw(st.integers(0, 2))))
    return spec.with_shared_expert(2.5) if draw(st.booleans()) else spec


gpus = st.sampled_from((132, 114, 78, 1))  # SMs: H100 SXM and H200, H100 PCIe, H20; and the least set_num_sms leaves

tunings = st.just(UNTUNED) | st.builds(
    GpuTuning,
    few_rows_per_expert=st.integers(0, 200),
    packed_few_rows_per_expert=st.integers(0, 200),
    small_batch_bytes=st.sampled_from((0, 2**28, 2**40)),
    packed_small_batch_bytes=st.sampled_from((0, 2**26, 2**40)),
    early_below=st.sampled_from((0, 64, 256, 2**20)),
    spare_multiprocessors=st.integers(0, MULTIPROCESSORS),
)


def pieces(plan: Plan) -> dict[str, int]:
    """Returns the bytes of each piece of scratch memory; they follow each other, and so do not overlap."""
    *begins, nbytes = scratch = plan.choices.scratch
    assert list(scratch) == sorted(scratch)
    assert scratch[0] == 0
    assert nbytes == plan.scratch
    assert all(begin % PIECE == 0 for begin in scratch)
    return {
        name: end - begin
        for name, begin, end in zip(scratch._fields, begins, [*begins[1:], nbytes], strict=False)
        if end > begin
    }


def have_room(plan: Plan, needed: dict[str, int]) -> None:
    room = pieces(plan)
    assert all(room[name] >= needed[name] for name in room.keys() & needed.keys())


def tile_rows(plan: Plan) -> int:
    """Returns the rows of a tile, without a tail; 0 for small batches."""
    choices = plan.choices
    return choices.tile.rows if hasattr(choices, "tile") else getattr(choices, "tile_rows", 0)


def maps(launch: Launch) -> Iterator[TensorMap]:
    return (argument for argument in launch.args if isinstance(argument, TensorMap))


def named(launches: Iterable[Launch], name: str) -> set[Any]:
    """Returns the values of the argument `name` of all kernels that have it."""
    return {getattr(launch.args, name) for launch in launches if hasattr(launch.args, name)}


def check(
    launches: Iterable[Launch], kernels: Iterable[KernelKey], room: dict[Slot, int], scratch: Iterable[int]
) -> None:
    """Check grids, kernels, and the boxes and extents of TMA; `room` has the bytes of tensors that TMA reads."""
    offsets = sorted(set(scratch))
    for launch in launches:
        assert launch.key in kernels
        x, y = launch.grid if isinstance(launch.grid, tuple) else (launch.grid, 1)
        assert 0 < x < 2**31
        assert 0 < y < 2**16
        assert x % launch.cluster == 0
        for found in maps(launch):
            assert found.box[0] * found.element_size == 128
            assert all(0 < size <= 256 for size in found.box)
            assert all(0 < size <= 2**32 for size in found.sizes)
            assert all(stride % 16 == 0 < stride < 2**40 for stride in found.strides)
            steps = zip(found.sizes[1:], found.strides, strict=True)
            extent = found.sizes[0] * found.element_size + sum((size - 1) * stride for size, stride in steps)
            base = Slot(found.address.index)
            if base in room:
                assert extent <= room[base]
            else:
                offset = found.address.offset
                assert extent <= next(other for other in offsets if other > offset) - offset
        slots = {argument for argument in launch.args if isinstance(argument, Slot)}
        assert all(slot.offset == 0 or slot.offset in offsets for slot in slots)


def check_activation(launches: Iterable[Launch], activation: Activation) -> None:
    """One kernel has an activation: the variant that computes it, with its numbers."""
    (launch,) = (launch for launch in launches if "MODIFIED_SWIGLU" in dict(launch.key.defines))
    assert dict(launch.key.defines)["MODIFIED_SWIGLU"] == (activation != SILU)
    args = launch.args._asdict()
    numbers = args.get("activation") or tuple(args[name] for name in ActivationNumbers._fields)
    assert numbers == activation.numbers


def check_biases(launches: Iterable[Launch], spec: LayerSpec, biases: tuple[Slot, Slot]) -> None:
    """Both GEMMs have the variant that adds a bias, with that of their weights; or neither does."""
    found = [launch for launch in launches if hasattr(launch.args, "bias")]
    assert tuple(launch.args.bias for launch in found) == (biases if spec.bias else (0, 0))
    assert [dict(launch.key.defines).get("BIAS", 0) for launch in found] == [int(spec.bias)] * 2


def weight_bytes(shape: MoeShape) -> tuple[int, int]:
    matrix = shape.local_experts * shape.intermediate * shape.hidden
    return 2 * matrix, matrix


@backends
@many
@given(data=st.data(), spec=specs(), tokens=scaled(2**16), sms=gpus, ids_64=st.booleans())
def test_a_layer(
    targets: st.SearchStrategy[str], data: st.DataObject, spec: LayerSpec, tokens: int, sms: int, ids_64: bool
) -> None:
    target = data.draw(targets)
    shape, rows = spec.shape, tokens * spec.shape.topk
    plan = BACKENDS[target].tuned(data.draw(tunings)).plan_layer(spec, tokens, sms)
    launches, at = plan.launches(LAYER_SLOTS, ids_64), LAYER_SLOTS
    room = dict(zip((at.w13, at.w2), weight_bytes(shape), strict=True)) | {at.hidden_states: tokens * shape.hidden}
    kernels = BACKENDS[target].layer_kernels(spec, Arrival.QUANTIZED if spec.quantized else Arrival.STANDARD)
    check(launches, kernels, room, plan.choices.scratch)
    check_activation(launches, spec.activation)
    check_biases(launches, spec, (at.w13_bias, at.w2_bias))
    arguments = [argument for launch in launches for argument in launch.args]
    used = {getattr(argument, "address", argument) for argument in arguments}
    unused = {at.scratch, *(() if spec.bias else (at.w13_bias, at.w2_bias))}
    unused |= set() if spec.quantized else {at.hidden_scale}
    assert set(at) - unused <= used, "every tensor is read or written"
    if tile_rows(plan):
        tiles = tile_capacity(rows, shape.local_experts, tile_rows(plan))
        needed = {"slots": 4 * rows, "tokens": 4 * rows, "num_rows": 4, "table": 16 * tiles, "num_tiles": 8}
        needed |= {"inner": rows * shape.intermediate, "down": 2 * rows * shape.hidden}
        gathers = getattr(plan.choices, "gathers", True)
        copies = 1 if gathers else shape.topk
        needed |= {"x": copies * tokens * shape.hidden, "x_scales": copies * tokens * shape.hidden // 32}
        assert ("x" in pieces(plan)) == (not gathers or not spec.quantized)
        have_room(plan, needed | {"inner_scales": scale_pitch(rows) * shape.intermediate // 32})
        assert len(named(launches, "table")) == len(named(launches, "block_m")) == 1
    assert all(launch.pdl == dict(launch.key.defines).get("PDL", launch.pdl) for launch in launches)


@many
@given(spec=specs(), tokens=scaled(2**16), sms=gpus, tuning=tunings)
def test_a_layer_on_sm90(spec: LayerSpec, tokens: int, sms: int, tuning: GpuTuning) -> None:
    """What kernels that wait for each other rely on: enough SMs for all blocks, equal counters, whole K blocks."""
    shape, rows = spec.shape, tokens * spec.shape.topk
    plan = BACKENDS[SM90].tuned(tuning).plan_layer(spec, tokens, sms)
    launches = {launch.key.source: launch for launch in plan.launches(LAYER_SLOTS, False)}
    if "down_small_batch" in launches:
        assert not spec.batch_invariant
        assert max(launches["gate_up_small_batch"].grid // 2, launches["down_small_batch"].grid) <= sms
        assert launches["gate_up_small_batch"].args.stages_before_down == plan.choices.stages_before_down
        experts = min(rows, shape.local_experts)
        inner = experts * plan.choices.padded_tokens * shape.intermediate
        have_room(
            plan, {"inner": inner, "inner_scales": inner // 32, "tokens_written": experts * shape.intermediate // 32}
        )
        return
    first, second = list(launches.values())[-3:-1]
    counters, splits = named(launches.values(), "done_counters"), getattr(first.args, "splits", 1)
    assert shape.hidden // 128 % splits == 0
    assert splits == 1 or not spec.batch_invariant
    assert first.args.done_counters == second.args.done_counters
    assert bool(second.args.done_counters) == second.pdl
    assert len(counters - {0}) == 1
    assert len(named(launches.values(), "counters_per_tile")) == 1
    assert shape.hidden // 128 % getattr(second.args, "columns_at_once", 1) == 0
    chunks = launches["route"].grid
    assert (chunks - 1) * PAIRS_PER_CHUNK < rows <= chunks * PAIRS_PER_CHUNK
    assert ("count_experts" in launches) == (chunks > 1)
    tiles = tile_capacity(rows, shape.local_experts, tile_rows(plan))
    needed = {"partial": 8 * splits * rows * shape.intermediate, "num_tiles": 20}
    needed["expert_counts"] = 2 * chunks * shape.local_experts
    have_room(plan, needed | {"done_counters": 4 + 4 * tiles * launches["route"].args.counters_per_tile})


@backends
@many
@given(data=st.data(), spec=specs(), max_m=scaled(2**12), expected_m=scaled(2**12), sms=gpus)
def test_batched_experts(
    targets: st.SearchStrategy[str], data: st.DataObject, spec: LayerSpec, max_m: int, expected_m: int, sms: int
) -> None:
    target = data.draw(targets)
    shape, rows = spec.shape, spec.shape.local_experts * max_m
    plan = BACKENDS[target].tuned(data.draw(tunings)).plan_batched(spec, max_m, expected_m, sms)
    x = Rows(X, rows, shape.hidden, X_SCALES, max_m, scale_pitch(rows))
    weights = Weights.of_experts(spec, W13, W13_SCALES, W2, W2_SCALES, W13_BIAS, W2_BIAS)
    launches = plan.launches(x, *weights, LAYOUT, OUT, SCRATCH)
    check_biases(launches, spec, (W13_BIAS, W2_BIAS))
    room = dict(zip((W13, W2), weight_bytes(shape), strict=True))
    room |= {X: rows * shape.hidden, OUT: 2 * rows * shape.hidden}
    check(launches, BACKENDS[target].layer_kernels(spec, Arrival.BATCHED), room, plan.choices.scratch)
    check_activation(launches, spec.activation)
    tiles = shape.local_experts * ceil_div(max_m, tile_rows(plan))
    needed = {"table": 16 * tiles, "num_tiles": 8 if target != SM90 else 20, "done_counters": 4 * (1 + tiles)}
    needed |= {"inner": rows * shape.intermediate, "inner_scales": scale_pitch(rows) * shape.intermediate // 32}
    have_room(plan, needed)
    assert len(named(launches, "table")) == 1
    if target == SM90:
        first, second = launches[1:]
        assert first.args.done_counters == second.args.done_counters
        assert bool(second.args.done_counters) == second.pdl
        assert shape.hidden // 128 % getattr(second.args, "columns_at_once", 1) == 0


@backends
@many
@given(data=st.data(), spec=specs(), tokens=st.tuples(scaled(2**16), scaled(2**16)), sms=gpus)
def test_a_batch_invariant_layer_has_the_same_sums_at_any_number_of_tokens(
    targets: st.SearchStrategy[str], data: st.DataObject, spec: LayerSpec, tokens: tuple[int, int], sms: int
) -> None:
    """Triton's sums depend on the tile; those of the kernels in csrc only on how K is split."""
    target = data.draw(targets)
    spec = spec._replace(batch_invariant=True)
    backend = BACKENDS[target].tuned(data.draw(tunings))
    plans = [backend.plan_layer(spec, count, sms) for count in tokens]
    launches = [launch for plan in plans for launch in plan.launches(LAYER_SLOTS, False)]
    assert named(launches, "splits") <= {1}
    assert not any(launch.key.source.endswith("small_batch") for launch in launches)
    assert target == SM90 or len({(plan.choices.gate_up, plan.choices.down) for plan in plans}) == 1


@backends
@many
@given(
    data=st.data(),
    m=scaled(2**16),
    n=scaled(5000).map(lambda n: 8 * n),
    k=scaled(144).map(lambda k: 128 * k),
    output=st.sampled_from(Output),
    sms=gpus,
    invariant=st.booleans(),
)
def test_a_dense_gemm(
    targets: st.SearchStrategy[str],
    data: st.DataObject,
    m: int,
    n: int,
    k: int,
    output: Output,
    sms: int,
    invariant: bool,
) -> None:
    target = data.draw(targets)
    backend = BACKENDS[target]
    plan = backend.plan_dense(m, n, k, output, sms, invariant)
    (launch,) = plan.launches(Rows.k_major(X, X_SCALES, m, k), Weights(W2, 1, n, k, W2_SCALES), OUT)
    result = m * n * (4 if output is Output.F32_DIRECT else 2)
    own = backend.dense_kernels(False) if output is Output.BF16 else all_kernels(target)
    check([launch], own, {X: m * k, W2: n * k, OUT: result}, (0,))
    if invariant:
        assert launch.cluster == 1
        assert named([launch], "splits") <= {1}
        assert target == SM90 or launch.key == backend.plan_dense(1, n, k, output, sms, True).choices.kernel


@backends
@many
@given(data=st.data(), groups=scaled(1024), max_m=scaled(2**10), n=scaled(64), k=scaled(56), sms=gpus)
def test_a_grouped_gemm(
    targets: st.SearchStrategy[str], data: st.DataObject, groups: int, max_m: int, n: int, k: int, sms: int
) -> None:
    target = data.draw(targets)
    backend, n, k, rows = BACKENDS[target].tuned(data.draw(tunings)), 128 * n, 128 * k, groups * max_m
    kinds = [GroupedBy.INDICES, GroupedBy.COUNTS, *([GroupedBy.ENDS] if backend.has_all_ops else [])]
    grouping = Grouping(data.draw(st.sampled_from(kinds)))
    plan = backend.plan_grouped(grouping, rows, groups, n, k, data.draw(scaled(max_m)), sms)
    operands = Rows.k_major(X, X_SCALES, rows, k), Weights(W2, groups, n, k, W2_SCALES)
    launches = plan.launches(*operands, OUT, LAYOUT, SCRATCH)
    check(launches, all_kernels(target), {X: rows * k, W2: groups * n * k, OUT: 2 * rows * n}, plan.choices.scratch)
    indexed = grouping.kind is GroupedBy.INDICES
    tiles = tile_capacity(rows, rows if indexed else groups, tile_rows(plan))
    have_room(plan, {"table": 16 * tiles, "run_begins": 4 * rows, "done_counters": 4 * (1 + tiles)})
    assert len(named(launches, "table")) == 1
    assert n // 128 % getattr(launches[1].args, "columns_at_once", 1) == 0
