"""A captured op does what the eager op does, whatever its inputs hold by the time of the replay."""

from collections.abc import Callable

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.ops.quantize import quantize_tokens
from fp8moe_plugin.plan.tuning import EARLY_FROM, GATHER_UP_TO
from tests import helpers as h
from tests.gpu import graph_replays

pytestmark = pytest.mark.gpu

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 16, 4, 1024, 1024
STEPS = 200


@pytest.fixture(scope="module")
def gen() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


@pytest.fixture(scope="module")
def layer(gen) -> h.Layer:
    return h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)


def capture(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Returns the graph of one call, and where its result appears."""
    run()  # compiles and loads every kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def assert_replays_equal_eager(
    run: Callable[..., torch.Tensor], draw: Callable[[int], tuple[torch.Tensor, ...]]
) -> None:
    """`draw` gives the inputs of a step; the graph reads those of the last copy into its own."""
    inputs = draw(0)
    graph, result = capture(lambda: run(*inputs))
    agree, distinct = torch.ones((), dtype=torch.bool, device="cuda"), set()
    for step in range(STEPS):
        fresh = draw(step)
        for own, new in zip(inputs, fresh, strict=True):
            h.bits(own).copy_(h.bits(new))
        h.bits(result).fill_(-1)
        graph.replay()
        agree &= (h.bits(result) == h.bits(run(*fresh))).all()
        if step < 10:
            distinct.add(h.bits(result).sum(dtype=torch.int64).item())
    assert agree
    assert len(distinct) >= 5, "the steps do not differ, so the replay shows nothing"


# Experts that gather, those that read copies; second GEMMs that start early and, with 256 channels and 800 tokens, not.
@pytest.mark.parametrize("intermediate", [256, EARLY_FROM, GATHER_UP_TO + 128])
@pytest.mark.parametrize("tokens", [1, 16, 512, 800])
def test_fused_moe_follows_the_routing(gen, tokens, intermediate):
    layer = h.random_layer(gen, EXPERTS, HIDDEN, intermediate)

    def draw(step: int) -> tuple[torch.Tensor, ...]:
        kind = h.ROUTINGS[step % len(h.ROUTINGS)]
        x = h.random_tokens(gen, tokens, HIDDEN)
        return x, *h.random_routing(gen, kind, tokens, TOPK, EXPERTS)

    assert_replays_equal_eager(lambda x, weights, ids: ops.fused_moe(x, *layer, weights, ids), draw)


@pytest.mark.parametrize("intermediate", [256, GATHER_UP_TO + 128])
@pytest.mark.parametrize("tokens", [1, 800])
def test_fused_moe_follows_quantized_tokens(gen, tokens, intermediate):
    layer = h.random_layer(gen, EXPERTS, HIDDEN, intermediate)

    def draw(step: int) -> tuple[torch.Tensor, ...]:
        routing = h.random_routing(gen, h.ROUTINGS[step % len(h.ROUTINGS)], tokens, TOPK, EXPERTS)
        return *quantize_tokens(h.random_tokens(gen, tokens, HIDDEN), False), *routing

    assert_replays_equal_eager(
        lambda q, scales, *routing: ops.fused_moe(q, *layer, *routing, hidden_scale=scales), draw
    )


# Each layer has the scratch of the one before, whose kernels may still run.
@pytest.mark.parametrize("tokens", [1, 16])
def test_layers_of_decode_in_a_row_follow_their_routings(gen, tokens):
    layers = [h.random_layer(gen, EXPERTS, HIDDEN, 256) for _ in range(4)]

    def draw(step: int) -> tuple[torch.Tensor, ...]:
        kinds = [h.ROUTINGS[(step + i) % len(h.ROUTINGS)] for i in range(len(layers))]
        routings = [h.random_routing(gen, kind, tokens, TOPK, EXPERTS) for kind in kinds]
        return h.random_tokens(gen, tokens, HIDDEN), *(tensor for routing in routings for tensor in routing)

    def run(x: torch.Tensor, *routings: torch.Tensor) -> torch.Tensor:
        calls = zip(layers, routings[::2], routings[1::2], strict=True)
        return torch.stack([ops.fused_moe(x, *layer, *routing) for layer, *routing in calls])

    assert_replays_equal_eager(run, draw)


# All have the scratch of the one pool; the last does not stream the weights.
def test_graphs_of_several_sizes_take_turns(gen):
    shape = graph_replays.Shape(EXPERTS, HIDDEN, 256, TOPK)
    graphs = graph_replays.capture_all(gen, shape, (1, 5, 16, 64, 200, 300))
    assert graph_replays.faults(graphs, 3 * STEPS, seed=0) == []


@pytest.mark.parametrize("expected_m", [16, 200])
def test_batched_experts_follow_the_counts(gen, layer, expected_m):
    max_m = 256

    def draw(step: int) -> tuple[torch.Tensor, ...]:
        counts = torch.randint(0, max_m + 1, (EXPERTS,), generator=gen, device="cuda", dtype=torch.int32)
        counts *= torch.arange(EXPERTS, device="cuda") % 5 != step % 5
        return *h.random_quantized(gen, EXPERTS, max_m, HIDDEN), counts

    def run(q: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(q.shape, dtype=torch.bfloat16, device="cuda")
        return ops.batched_experts(q, scales, *layer, counts, expected_m=expected_m, out=out)

    assert_replays_equal_eager(run, draw)


@pytest.mark.parametrize("in_rows", [False, True])  # scales that are copied first
@pytest.mark.parametrize("expected_m", [16, 200])
def test_masked_gemm_follows_the_counts(gen, layer, expected_m, in_rows):
    max_m = 200

    def draw(step: int) -> tuple[torch.Tensor, ...]:
        counts = torch.randint(-1, max_m + 9, (EXPERTS,), generator=gen, device="cuda", dtype=torch.int32)
        q, scales = h.random_quantized(gen, EXPERTS, max_m, HIDDEN)
        return q, scales.contiguous() if in_rows else scales, counts

    def run(q: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(*q.shape[:2], 2 * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
        return ops.m_grouped_fp8_gemm_nt_masked((q, scales), layer[:2], out, counts, expected_m)

    assert_replays_equal_eager(run, draw)


@pytest.mark.parametrize("in_rows", [False, True])
def test_psum_gemm_follows_the_ends(gen, layer, in_rows):
    def draw(step: int) -> tuple[torch.Tensor, ...]:
        ends = torch.randint(0, 701, (EXPERTS,), generator=gen, device="cuda", dtype=torch.int32).sort().values
        q, scales = h.random_quantized(gen, 700, HIDDEN)
        return q, scales.contiguous() if in_rows else scales, ends

    def run(q: torch.Tensor, scales: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(700, 2 * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
        return ops.m_grouped_fp8_gemm_nt_psum((q, scales), layer[:2], out, ends, 50, alignment=1)

    assert_replays_equal_eager(run, draw)


def test_contiguous_gemm_follows_the_indices(gen, layer):
    def draw(step: int) -> tuple[torch.Tensor, ...]:
        indices = torch.randint(-1, EXPERTS, (700,), generator=gen, device="cuda", dtype=torch.int32).sort().values
        return *h.random_quantized(gen, 700, HIDDEN), indices

    def run(q: torch.Tensor, scales: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(700, 2 * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
        return ops.m_grouped_fp8_gemm_nt_contiguous((q, scales), layer[:2], out, indices)

    assert_replays_equal_eager(run, draw)


@pytest.mark.parametrize("tokens", [1, 65, 600])
def test_linear_follows_its_input(gen, tokens):
    weight = h.random_weights(gen, 576, HIDDEN)
    bias = h.random_tokens(gen, 576)
    assert_replays_equal_eager(
        lambda x: ops.fp8_linear(x, *weight, bias), lambda step: (h.random_tokens(gen, tokens, HIDDEN),)
    )


def first_in_graph(made: Callable[[], torch.Tensor]) -> torch.Tensor:
    return made()


def behind_a_memset(made: Callable[[], torch.Tensor]) -> torch.Tensor:
    x = made()
    torch.empty(1024, device="cuda", dtype=torch.uint8).zero_()
    return x


def behind_a_join(made: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Another stream makes the tokens, by a kernel that lets the next one start early."""
    here, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        x = made()
    here.wait_stream(other)
    x.record_stream(here)
    return x


@pytest.mark.parametrize("place", [first_in_graph, behind_a_memset, behind_a_join])
@pytest.mark.parametrize(
    ("op", "tokens"),
    [
        ("fp8_linear", 40),
        ("router_gemm", 40),
        ("fused_moe", 40),
        ("fused_moe", 400),  # more than a chunk of pairs
        ("routed_moe", 9),
        ("routed_moe", 40),
        ("routed_moe", 400),
    ],
)
def test_first_kernels_wait_for_whatever_is_in_front_of_them(gen, layer, op, tokens, place):
    weight, gate = h.random_weights(gen, HIDDEN, HIDDEN), h.random_tokens(gen, EXPERTS, HIDDEN)
    weights, ids = h.random_routing(gen, "distinct", tokens, TOPK, EXPERTS)
    logits = torch.randn(tokens, EXPERTS, generator=gen, device="cuda")
    second: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "fp8_linear": lambda x: ops.fp8_linear(x, *weight),
        "router_gemm": lambda x: ops.router_gemm(x, gate),
        "fused_moe": lambda x: ops.fused_moe(x, *layer, weights, ids),
        "routed_moe": lambda x: ops.routed_moe(x, *layer, logits, TOPK),
    }

    def run(x: torch.Tensor) -> torch.Tensor:
        return second[op](place(lambda: x if place is first_in_graph else ops.fp8_linear(x, *weight)))

    assert_replays_equal_eager(run, lambda _: (h.random_tokens(gen, tokens, HIDDEN),))
