"""Inputs of the ops, and the float64 math with which their results are compared."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit.launch import Argument, Chunks, Launch, PerGroup, Slot, TensorMap
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.launches.kernel_sets import EXAMPLE
from fp8moe_plugin.launches.sm90 import Sm90
from fp8moe_plugin.launches.sm90.gemm import dense_launches
from fp8moe_plugin.launches.sm90.layer import layer_launches
from fp8moe_plugin.ops import devices, reference
from fp8moe_plugin.ops import push as push_op
from fp8moe_plugin.ops.quantize import per_token_group_quant_fp8
from fp8moe_plugin.plan.keys import SM90, KernelKey
from fp8moe_plugin.plan.parameters import ARGUMENTS
from fp8moe_plugin.plan.sm90 import layer as sm90_layer
from fp8moe_plugin.plan.sm90 import push
from fp8moe_plugin.plan.sm90.catalog import dense_variant
from fp8moe_plugin.plan.sm90.dense import DensePlan, many_rows, tiled
from fp8moe_plugin.plan.sm90.layer import (
    SmallBatchStep,
    StepPlan,
    plan_layer,
    small_batch_step,
    sorted_step,
    tile_of_step,
)
from fp8moe_plugin.plan.sm90.tiles import RowTile
from fp8moe_plugin.plan.spec import Arrival, LayerSpec, MoeShape, Output
from fp8moe_plugin.plan.tuning import MULTIPROCESSORS
from fp8moe_plugin.settings import batch_invariant, settings
from tests import faults
from tests.steps import RoutingTensors, TileTensors, format_of

GROUP = 128
FP8 = torch.float8_e4m3fn
Quantized = tuple[torch.Tensor, torch.Tensor]

row_counts = st.sampled_from((0, 1, 2, 7, 63, 64, 65, 127, 128, 129, 144, 200, 281))
seeds = st.integers(0, 2**16)


class Layer(NamedTuple):
    """The weights of one layer, in the order the ops take them."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


def seeded(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def random_tokens(gen: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=gen, device=gen.device).bfloat16()


def random_quantized(gen: torch.Generator, *shape: int) -> Quantized:
    return per_token_group_quant_fp8(random_tokens(gen, *shape))


def random_weights(gen: torch.Generator, *shape: int, weights: WeightFormat = FP8_BLOCK) -> Quantized:
    """e4m3 `[.., N, K]` and float32 scales, of a size that keeps the products near 1."""
    *groups, n, k = shape
    if weights is FP8_CHANNEL:
        values = torch.randn(shape, generator=gen, device=gen.device) * k**-0.5
        values *= torch.rand(*groups, n, 1, generator=gen, device=gen.device) + 0.5  # scales that differ
        scales = values.abs().amax(-1, keepdim=True) / 448
        return (values / scales).to(FP8), scales
    w = torch.empty(shape, dtype=FP8, device=gen.device)
    scales = torch.empty(*groups, -(-n // GROUP), k // GROUP, device=gen.device)
    for q, s in zip(w.view(-1, n, k), scales.view(-1, *scales.shape[-2:]), strict=True):
        values = torch.zeros(len(s) * GROUP, k, device=gen.device)
        values[:n] = torch.randn(n, k, generator=gen, device=gen.device) * k**-0.5
        blocks = values.view(len(s), GROUP, -1, GROUP)
        s.copy_(blocks.abs().amax((1, 3)) / 448)
        q.copy_((blocks / s[:, None, :, None]).view(-1, k)[:n].to(FP8))
    return w, scales


def random_layer(
    gen: torch.Generator, experts: int, hidden: int, intermediate: int, weights: WeightFormat = FP8_BLOCK
) -> Layer:
    w13 = random_weights(gen, experts, 2 * intermediate, hidden, weights=weights)
    return Layer(*w13, *random_weights(gen, experts, hidden, intermediate, weights=weights))


def random_biases(gen: torch.Generator, experts: int, hidden: int, intermediate: int) -> dict[str, torch.Tensor]:
    """Returns biases as the ops take them; sums and results of random layers are about as large."""

    def draw(rows: int) -> torch.Tensor:
        return torch.randn(experts, rows, generator=gen, device=gen.device)

    return {"w13_bias": draw(2 * intermediate), "w2_bias": draw(hidden) / 4}


ROUTINGS = ("distinct", "one_expert", "first_half", "some_missing", "nowhere", "out_of_range")


def deal_experts(layer: Layer, ranks: int) -> tuple[torch.Tensor, list[tuple[Layer, torch.Tensor]]]:
    """Deal out the experts to ranks in turn.

    Returns:
        int32 `[experts]`, the rank that has each expert; and for each rank its experts and their `expert_map`.
    """
    owners = torch.arange(len(layer.w13), dtype=torch.int32) % ranks
    each = [owners == rank for rank in range(ranks)]
    maps = (torch.where(mine, mine.cumsum(0) - 1, -1).int() for mine in each)
    return owners, [(Layer(*(tensor[mine] for tensor in layer)), of) for mine, of in zip(each, maps, strict=True)]


def random_routing(gen: torch.Generator, kind: str, tokens: int, topk: int, experts: int) -> Quantized:
    """float32 router weights and int32 expert ids, both `[tokens, topk]`."""
    ids = torch.rand(tokens, experts, generator=gen, device=gen.device).argsort(-1)[:, :topk]
    drawn = torch.rand(tokens, topk, generator=gen, device=gen.device)
    if kind == "one_expert":
        ids = torch.full_like(ids, experts - 1)
    elif kind == "first_half":
        ids = ids % max(1, experts // 2)
    elif kind == "some_missing":
        ids = torch.where(drawn < 0.4, -1, ids)
    elif kind == "nowhere":
        ids = torch.full_like(ids, -1)
    elif kind == "out_of_range":
        ids = torch.where(drawn < 0.2, experts + 3, torch.where(drawn > 0.8, -5, ids))
    weights = torch.rand(tokens, topk, generator=gen, device=gen.device) + 0.1
    return weights / weights.sum(-1, keepdim=True), ids.int()


def routing_of_counts(gen: torch.Generator, counts: list[int]) -> Quantized:
    """float32 router weights and int32 expert ids, both `[sum(counts), 1]`: expert e has `counts[e]` tokens."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(gen.device, torch.int32)
    ids = ids[torch.randperm(len(ids), generator=gen, device=gen.device), None]
    return torch.rand(ids.shape, generator=gen, device=gen.device) + 0.1, ids


def with_shared_expert(weights: torch.Tensor, ids: torch.Tensor, experts: int, routed_scale: float) -> Quantized:
    """Returns a routing among all experts but the last, which has a column of its own with weight 1."""
    ids = torch.where(ids < experts - 1, ids, -1)  # the router cannot choose the last one
    columns = torch.nn.functional.pad(weights * routed_scale, (0, 1), value=1.0)
    return columns, torch.nn.functional.pad(ids, (0, 1), value=experts - 1)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of 0xFF bytes (NaN), which reveals elements that are not written, or written by mistake."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    bits(tensor).fill_(-1)
    return tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as integers: compares NaN, and indexes e4m3."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def assert_same_numbers(actual: Quantized, expected: Quantized) -> None:
    """The same codes and scales, bit for bit, and NaN in the same places."""
    (q, scales), (expected_q, expected_scales) = actual, expected
    numbers = ~expected_q.isnan()
    assert torch.equal(~q.isnan(), numbers)
    assert torch.equal(q.view(torch.uint8)[numbers], expected_q.view(torch.uint8)[numbers])
    assert torch.equal(scales.isnan(), expected_scales.isnan())
    assert torch.equal(scales.nan_to_num(), expected_scales.nan_to_num())


def pairwise(*values: Sequence[object]) -> list[tuple[Any, ...]]:
    """Cases in which every two values of different parameters meet; under FULL_COUNTS all combinations."""

    def pairs(case: tuple[object, ...]) -> set[tuple[object, ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    combinations = list(itertools.product(*values))
    if faults.FULL:
        return combinations
    left, cases = set().union(*map(pairs, combinations)), []
    while left:
        cases.append(max(combinations, key=lambda case, left=left: len(left & pairs(case))))
        left = left - pairs(cases[-1])
    return cases


def untouched(tensor: torch.Tensor) -> bool:
    """True if every byte is still the one of `poisoned`."""
    return bool((bits(tensor) == -1).all())


def column_major(scales: torch.Tensor) -> torch.Tensor:
    return scales.mT.contiguous().mT


def dequantize_tokens(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return q.double() * scales.double().repeat_interleave(GROUP, -1)


def dequantize_weights(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if format_of((q, scales)) is FP8_CHANNEL:
        return q.double() * scales.double()
    return q.double() * scales.double().repeat_interleave(GROUP, -2)[..., : q.shape[-2], :].repeat_interleave(GROUP, -1)


def product(a: Quantized, b: Quantized) -> torch.Tensor:
    """float64 `a @ b.T`."""
    return dequantize_tokens(*a) @ dequantize_weights(*b).mT


SWIGLU_SLACK = 2**-7 * 1.01  # relative: SiLU and the product are each rounded to bfloat16, by up to 2^-8


MODIFIED_SLACK = 2**-8 * 1.01  # relative: only the result is rounded to bfloat16
MODIFIED = (  # with limits that a good part of sums near 1 reaches
    Activation(limit=0.75),
    Activation("swigluoai_uninterleave", 0.75, 1.702, 1.0),
    Activation("swiglustep", 0.5),
)


def swiglu(gate_up: torch.Tensor, activation: Activation = SILU, *, rounded: bool = False) -> torch.Tensor:
    """The activation in float64; `rounded`: to bfloat16 where the ops round."""
    gate, up = gate_up.double().chunk(2, -1)
    if activation == SILU:
        silu = gate * torch.sigmoid(gate)
        return (silu.bfloat16() * up.bfloat16()).double() if rounded else silu * up
    kind, limit, alpha, beta = activation
    limit = math.inf if limit is None else limit
    if kind == "swiglustep":
        inner = (gate * torch.sigmoid(gate)).clamp(max=limit)
    else:
        gate = gate.clamp(max=limit)
        inner = gate * torch.sigmoid(alpha * gate)
    inner = inner * (up.clamp(-limit, limit) + beta)
    return inner.bfloat16().double() if rounded else inner


def resolved(argument: Argument, addresses: tuple[int, ...]) -> TensorMap | Chunks | PerGroup | int:
    """Returns an argument with these addresses in its slots."""
    if isinstance(argument, TensorMap | Chunks):
        return argument._replace(address=resolved(argument.address, addresses))
    if isinstance(argument, PerGroup):
        return PerGroup(tuple(resolved(element, addresses) for element in argument.elements))
    return addresses[argument.index] + argument.offset if isinstance(argument, Slot) else argument


class Recorder:
    """A device that keeps launches, with the addresses of their call, instead of making them."""

    backend = BACKENDS[SM90]

    def __init__(self, multiprocessors: int = 132) -> None:
        self.multiprocessors = multiprocessors
        self.launches: list[Launch] = []

    def prepare(self, launches: Iterable[Launch]) -> Callable[[tuple[int, ...]], None]:
        launches = tuple(launches)
        for launch in launches:
            assert isinstance(launch.args, ARGUMENTS[launch.key.source])

        def run(addresses: tuple[int, ...]) -> None:
            for launch in launches:
                args = launch.args._make(resolved(argument, addresses) for argument in launch.args)
                self.launches.append(launch._replace(args=args))

        return run

    @property
    def keys(self) -> set[KernelKey]:
        return {launch.key for launch in self.launches}

    def clear(self) -> None:
        self.launches.clear()


def serve(patch: pytest.MonkeyPatch, device: devices.Device) -> None:
    """Ops on any tensor launch on this device."""
    patch.setattr(devices, "device_of", lambda tensor: device)


@contextmanager
def rows_pushed_from(ranks: int) -> Iterator[None]:
    """Steps of that many ranks or more may push rows of GEMM 2 in place of sums, also of narrow experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push, "PUSHED_ROWS_RANKS_FROM", ranks)
        patch.setattr(push, "GATHER_UP_TO", 0)
        patch.setattr(push_op, "plan_push", functools.cache(push.plan_push.__wrapped__))  # its cache has other plans
        yield


def layer_spec(ue8m0: bool = False, weights: WeightFormat = FP8_BLOCK, activation: Activation = SILU) -> LayerSpec:
    """Returns the spec of a layer, for kernels that do not depend on its shape."""
    return LayerSpec(EXAMPLE, weights, ue8m0, activation)


def moe_kernels(ue8m0: bool, arrival: Arrival = Arrival.STANDARD) -> list[KernelKey]:
    """Returns the kernels that a layer loads; which ones does not depend on its shape."""
    return list(BACKENDS[SM90].layer_kernels(layer_spec(ue8m0), arrival))


def linear_kernels(
    ue8m0: bool, target: str = SM90, weights: WeightFormat = FP8_BLOCK, biased: bool = False
) -> list[KernelKey]:
    """Returns the kernels that a dense layer loads."""
    return list(BACKENDS[target].dense_kernels(ue8m0, weights, biased))


def loaded_kernels(model: Model, target: str = SM90, arrivals: Iterable[Arrival] = tuple(Arrival)) -> set[KernelKey]:
    """Returns the kernels that a model's layers load where rows arrive in one of these ways."""
    found = set(linear_kernels(model.ue8m0, target, model.dense_weights, model.dense_bias))
    for activation, arrival in itertools.product(model.activations, arrivals):
        spec = layer_spec(model.ue8m0, model.weights, activation)._replace(bias=model.gpt_oss)
        found |= set(BACKENDS[target].layer_kernels(spec, arrival))
    if any(layer.groups > 1 for layer in model.dense):
        found |= set(BACKENDS[target].batched_dense_kernels())
    if model.indexer:
        found |= set(BACKENDS[target].indexer_kernels(model.indexer.heads, model.indexer.dim))
    return found


def plan_step(shape: MoeShape, tokens: int, ue8m0: bool = False, multiprocessors: int = MULTIPROCESSORS) -> StepPlan:
    """Returns the SM90 kernels' plan of a layer, with VLLM_BATCH_INVARIANT as it is."""
    return plan_layer(LayerSpec(shape, ue8m0=ue8m0, batch_invariant=batch_invariant()), tokens, multiprocessors)


def force_step(
    patch: pytest.MonkeyPatch, *, width: int = 0, tile: RowTile | None = None, copies: bool | None = None
) -> list[StepPlan]:
    """Layers take other plans than the fastest. Returns the list to which each plan is added as a layer takes it.

    Args:
        width: the small-batch kernels of up to this number of tokens; 0: none of them.
        tile: of rows otherwise; None: as ever.
        copies: packed experts of few rows read copies of their tokens, or gather them; None: as ever.
    """
    if copies is not None:
        patch.setattr(sm90_layer, "PACKED_COPIES_FROM", 0 if copies else 2**30)

    def plan(spec: LayerSpec, tokens: int, multiprocessors: int) -> StepPlan:
        if width:
            return small_batch_step(spec, tokens, width, multiprocessors)
        return sorted_step(spec, tokens, tile or tile_of_step(spec, tokens), multiprocessors)

    return force_layer(patch, plan)


def force_layer(patch: pytest.MonkeyPatch, plan: Callable[[LayerSpec, int, int], StepPlan]) -> list[StepPlan]:
    """Layers take such plans of the SM90 kernels. Returns the list to which each is added as a layer takes it."""
    taken: list[StepPlan] = []

    def plan_and_note(self: object, spec: LayerSpec, tokens: int, multiprocessors: int) -> Plan:
        taken.append(plan(spec, tokens, multiprocessors))
        waits = isinstance(taken[-1], SmallBatchStep)
        return Plan(taken[-1], taken[-1].scratch.nbytes, functools.partial(layer_launches, taken[-1]), waits)

    patch.setattr(Sm90, "plan_layer", plan_and_note)
    return taken


def force_dense(patch: pytest.MonkeyPatch, plan: Callable[[int, int, int], DensePlan]) -> None:
    """Dense GEMMs of `[m, n]` results take such plans, from m, n and the number of multiprocessors."""

    def planned(
        self: object,
        m: int,
        n: int,
        k: int,
        output: Output,
        multiprocessors: int,
        batch_invariant: bool,
        weights: WeightFormat = FP8_BLOCK,
        biased: bool = False,
    ) -> Plan:
        found = plan(m, n, multiprocessors)
        found = replace(found, kernel=dense_variant(found.kernel, weights, biased and not found.is_grouped))
        return Plan(None, 0, functools.partial(dense_launches, found), adds_bias=not found.is_grouped)

    patch.setattr(Sm90, "plan_dense", planned)


def force_dense_tile(patch: pytest.MonkeyPatch, tile_rows: int, tile_n: int) -> None:
    """Dense GEMMs are those of dense_gemm in such tiles."""
    force_dense(patch, lambda m, n, multiprocessors: tiled(m, n, tile_rows, tile_n, multiprocessors))


def force_dense_clusters(patch: pytest.MonkeyPatch, tile_n: int) -> None:
    """Dense GEMMs are those of dense_gemm_many_rows in tiles of `tile_n` columns."""
    force_dense(patch, lambda m, n, multiprocessors: many_rows(m, n, tile_n, multiprocessors))


def layer_reference(
    x: torch.Tensor,
    layer: Layer,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    quantized: bool,
    rounds_rows: bool = True,
    ue8m0: bool = False,
    activation: Activation = SILU,
    biases: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns the layer in float64, expert by expert.

    Args:
        quantized: rounded wherever the ops round, else nowhere.
        rounds_rows: if quantized, also what an expert returns for a token.
    """
    b13, b2 = (biases[name].double() if biases else torch.zeros(len(layer.w13), 1) for name in ("w13_bias", "w2_bias"))

    def as_fp8(values: torch.Tensor) -> torch.Tensor:
        return dequantize_tokens(*reference.quantize(values, ue8m0)) if quantized else values.double()

    def as_bf16(values: torch.Tensor) -> torch.Tensor:
        return values.bfloat16().double() if quantized else values

    tokens = as_fp8(x)
    total = torch.zeros_like(tokens)
    for e in range(layer.w13.shape[0]):
        token, column = (ids == e).nonzero(as_tuple=True)
        gate_up = tokens[token] @ dequantize_weights(layer.w13[e], layer.w13_scale[e]).T + b13[e].to(tokens)
        gate_up = as_bf16(gate_up) if activation == SILU else gate_up
        inner = as_fp8(swiglu(gate_up, activation, rounded=quantized))
        down = inner @ dequantize_weights(layer.w2[e], layer.w2_scale[e]).T + b2[e].to(tokens)
        down = as_bf16(down) if rounds_rows else down
        total.index_add_(0, token, topk_weights[token, column, None].double() * down)
    return total


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    error = (actual.double() - expected.double()).norm()
    return (error / expected.double().norm().clamp(min=1e-30)).item()


def cosine(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(actual.double().flatten(), expected.double().flatten(), 0).item()


def assert_rounded(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """`actual` is the float64 `expected` up to float32 sums and one rounding to its dtype, in every element."""
    assert actual.shape == expected.shape
    half_ulp = torch.finfo(actual.dtype).eps / 2
    row_size = expected.square().mean(-1, keepdim=True).sqrt()
    error = (actual.double() - expected).abs()
    assert (error <= half_ulp * expected.abs() + 2e-3 * row_size).all()
    if actual.numel() >= 2048:  # with fewer elements, a single different last bit already exceeds the bound
        assert relative_l2(actual, expected.to(actual.dtype)) <= 2e-3


def assert_quantized(pair: Quantized, expected: torch.Tensor, ue8m0: bool = False, slack: float = 1e-5) -> None:
    """Each element is the e4m3 neighbour of `expected`, and each scale the smallest that holds its group.

    `slack`: the relative error that what was quantized may have.
    """
    q, scales = pair
    assert q.shape == expected.shape
    assert scales.shape == (*q.shape[:-1], q.shape[-1] // GROUP)
    expected, wide = expected.double(), scales.double().repeat_interleave(GROUP, -1)
    largest = expected.unflatten(-1, (-1, GROUP)).abs().amax(-1).clamp(min=1e-10) / scales.double()
    assert (largest <= 448 * (1 + slack)).all()
    assert (largest >= (224 if ue8m0 else 448) * (1 - slack)).all()
    assert not ue8m0 or (scales.frexp().mantissa == 0.5).all()
    half_step = torch.maximum(expected.abs() / 16, wide / 1024)
    allowed = half_step * (1 + 1e-3) + slack * expected.abs()
    assert ((dequantize_tokens(q, scales) - expected).abs() <= allowed).all()


def assert_same_tiles(actual: TileTensors, expected: TileTensors) -> None:
    """`actual` is from a kernel, on poisoned scratch."""
    count = int(expected.num_tiles[0])
    assert int(actual.num_tiles[0]) == count <= actual.table.shape[0]
    assert torch.equal(actual.table[:count], expected.table[:count])
    assert untouched(actual.table[count:])
    assert not actual.num_tiles[1:].any()
    if actual.done_counters is not None:
        assert not actual.done_counters[: count + 1].any()
        assert untouched(actual.done_counters[count + 1 :])


def assert_same_routing(actual: RoutingTensors, expected: RoutingTensors) -> None:
    assert torch.equal(actual.slots, expected.slots)
    assert torch.equal(actual.num_rows, expected.num_rows)
    rows = int(expected.num_rows)
    assert torch.equal(actual.tokens[:rows], expected.tokens[:rows])
    assert_same_tiles(actual.tiles, expected.tiles)


@contextmanager
def environment(variable: str, value: str) -> Iterator[None]:
    """With a variable of `settings`, which a process else reads once."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variable, value)
            settings.cache_clear()
            yield
    finally:
        settings.cache_clear()
