"""Times our fused-MoE layer and vLLM's own backends in turns on one Hopper GPU.

All backends get the same weights, activations and routing. A time is the median over replays of a CUDA graph with
several calls, divided by the number of calls. Each call has a routing of its own, so that few weights are still in L2,
and the launch of the graph hardly counts. `floor_us` is the larger of the time to move the bytes and the time of the
arithmetic. `relative_l2` is the distance from float32 math on dequantized weights and unquantized activations. The
peers run with vLLM's defaults, where activation scales are rounded up to powers of two; with VLLM_USE_DEEP_GEMM_E8M0=0
in the environment they keep FP32 scales.
"""

import contextlib
import datetime
import importlib.metadata
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8moe_plugin.bench.machine import check_machine, driver_version
from fp8moe_plugin.bench.packed import in_block_fp8, packed, random_mxfp4
from fp8moe_plugin.bench.peers import BY_FORMAT, Layer, make_peer, set_up_vllm
from fp8moe_plugin.bench.result import OURS, BenchResult, BenchRow
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Experts, Model
from fp8moe_plugin.checkpoint.splits import rank_shapes
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.layers import experts as layers
from fp8moe_plugin.layers.weights import per_block_cast_to_fp8, per_row_cast_to_fp8
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.operands import ExpertWeights, Quantized
from fp8moe_plugin.ops.reference import dequantize_expert
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from fp8moe_plugin.testing import captured, replay_us

TOKENS = (1, 8, 64, 256, 1024, 4096, 8192)
REFERENCE_TOKENS = 16  # tokens whose results are compared with float32 math
WRONG = 0.1  # relative L2; rounding activations to e4m3 costs 0.05
SEED = 1234  # of the first routing of no tokens

CASTS = {FP8_BLOCK: per_block_cast_to_fp8, FP8_CHANNEL: per_row_cast_to_fp8}

# Measured on an H200: memory reads, and FP8 products of random data below the power limit.
BYTES_PER_S = 4.3e12
FLOP_PER_S = 1.25e15

Maker = Callable[[Experts, ExpertWeights, int], Layer]  # the int is the number of tokens per call


class Case(NamedTuple):
    """The inputs for T tokens, the expected result, and a lower bound of the time."""

    hidden_states: torch.Tensor  # bfloat16 [T, H]
    routings: list[tuple[torch.Tensor, torch.Tensor]]  # for successive calls: float32 and int32 [T, k]
    expected: torch.Tensor  # float32 [min(T, REFERENCE_TOKENS), H], for the first routing
    floor_us: float


def rank_layer(model: Model, parallel: Parallel) -> Experts:
    """Returns the part of a model's MoE layer on one rank: its experts, and the number of them for each token.

    With expert parallelism, a token's experts are distributed over the ranks. `topk` is then the model's value times
    the fraction of experts on this rank, rounded, but at least 1, and a measurement counts the tokens that reach the
    rank. Experts that ranks cannot share equally are padded to whole scale blocks, as in our layer; a peer may need
    less.

    Raises:
        UnsupportedError: the model cannot be split this way.
    """
    experts = rank_shapes(model, parallel).experts
    share = experts.experts / model.experts.experts
    return replace(experts, topk=max(1, round(model.experts.topk * share)))


def bench_layer(
    experts: Experts, tokens: Sequence[int], spec: LayerSpec, report_progress: Callable[[str], None]
) -> BenchResult:
    """Time one layer with random weights and routing on every backend, on the current GPU.

    Args:
        experts: the layer on one rank, from `rank_layer`.
        tokens: the numbers of tokens to measure.
        spec: what our layer computes.
        report_progress: called with one line per row.
    Returns:
        A row for each backend and number of tokens; if a backend fails, its rows say why.
    Raises:
        UnsupportedError: there is no Hopper GPU, or vLLM is not installed.
    """
    kind: dict[str, Any] = {"activation": spec.activation, "stored": spec.weights}
    check_machine()
    driver = driver_version()
    weights, peers = drawn_layer(experts, spec, torch.device("cuda"))
    makers = {OURS: partial(make_ours, spec=spec)} | peers
    with set_up_vllm():
        rows = measure(makers, experts, weights, tokens, report_progress, **kind)
    return BenchResult(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        gpu=torch.cuda.get_device_name(),
        driver=driver,
        torch=torch.__version__,
        vllm=importlib.metadata.version("vllm"),
        shape=experts,
        ue8m0=spec.ue8m0,
        rows=rows,
    )


def drawn_layer(experts: Experts, spec: LayerSpec, device: torch.device) -> tuple[ExpertWeights, dict[str, Maker]]:
    """Returns random weights, and the backends beside ours: vLLM's or, of packed weights, our layer in block FP8."""
    if spec.weights not in CASTS:
        stored = random_mxfp4(experts, device)
        blocks, in_fp8 = in_block_fp8(stored), spec._replace(weights=FP8_BLOCK)
        return packed(stored), {FP8_BLOCK.name: lambda _, __, tokens: make_ours(experts, blocks, tokens, in_fp8)}
    peers = BY_FORMAT[spec.weights]
    kind: dict[str, Any] = {"activation": spec.activation, "stored": spec.weights}
    weights = random_weights(experts, device, CASTS[spec.weights])
    return weights, {name: partial(make_peer, name, **kind) for name in peers}


def measure(
    makers: Mapping[str, Maker],
    experts: Experts,
    weights: ExpertWeights,
    tokens: Sequence[int],
    report_progress: Callable[[str], None],
    skew: float = 0.0,
    activation: Activation = SILU,
    stored: WeightFormat = FP8_BLOCK,
) -> list[BenchRow]:
    """Returns the rows of all backends, one number of tokens after the other. `skew`: see `random_routing`."""
    rows = []
    for count in tokens:
        found = _rows(makers, experts, weights, make_case(experts, weights, count, skew, activation, stored))
        rows += found
        for row in found:
            report_progress(f"{count} tokens, {row.backend}: " + (row.error or f"{row.us:.1f} us"))
        torch.cuda.empty_cache()  # otherwise memory of this case's graphs stays allocated during the next
    return rows


def _rows(makers: Mapping[str, Maker], experts: Experts, weights: ExpertWeights, case: Case) -> list[BenchRow]:
    """Returns the rows of all backends at one number of tokens. Their graphs, which hold each call once, take turns.

    vLLM's backends share a workspace that grows, and a graph keeps its address: so each backend has run before the
    first graph is captured.
    """
    tokens = len(case.hidden_states)
    rows = {name: BenchRow(backend=name, tokens=tokens, floor_us=case.floor_us) for name in makers}
    layers: dict[str, Layer] = {}
    graphs = {}
    for name, make in makers.items():
        with _failure_recorded(rows, name):
            layer = make(experts, weights, tokens)
            start = time.perf_counter()
            error = relative_l2(layer, case)
            first_call_s = time.perf_counter() - start
            if not error < WRONG:
                raise ArithmeticError(f"the result is wrong: relative L2 distance {error:.2g} from float32 math")
            layers[name] = layer
            rows[name] = rows[name].model_copy(update={"relative_l2": error, "first_call_s": first_call_s})
    for name, layer in layers.items():
        with _failure_recorded(rows, name):
            graphs[name] = captured([partial(layer, case.hidden_states, *routing) for routing in case.routings])
    for name, us in replay_us(graphs).items():
        rows[name] = rows[name].model_copy(update={"us": us / len(case.routings)})
    return list(rows.values())


@contextlib.contextmanager
def _failure_recorded(rows: dict[str, BenchRow], name: str) -> Iterator[None]:
    """Replace the row of a backend that fails in the block by one with its error."""
    try:
        yield
    except Exception as failure:  # noqa: BLE001 (a peer may fail in any way, and the others must still be measured)
        error = textwrap.shorten(f"{type(failure).__name__}: {failure}", 300)
        rows[name] = BenchRow(backend=name, tokens=rows[name].tokens, floor_us=rows[name].floor_us, error=error)


def relative_l2(layer: Layer, case: Case) -> float:
    """Returns the distance of a call's result from the expected one; waits for the GPU."""
    out = layer(case.hidden_states, *case.routings[0])[:REFERENCE_TOKENS].float()
    return float((out - case.expected).norm() / case.expected.norm())


def random_weights(
    experts: Experts, device: torch.device, cast: Callable[[torch.Tensor], Quantized] = per_block_cast_to_fp8
) -> ExpertWeights:
    """Returns normal weights that keep activations near 1, quantized by `cast`.

    They are made one expert at a time to save memory.
    """
    gen = _seeded(0, device)

    def draw(n: int, k: int) -> Quantized:
        q, scales = torch.empty(experts.experts, n, k, dtype=FP8, device=device), []
        for e in range(experts.experts):
            q[e], of_expert = cast(torch.randn(n, k, generator=gen, device=device) * k**-0.5)
            scales.append(of_expert)
        return q, torch.stack(scales)

    return ExpertWeights(draw(2 * experts.intermediate, experts.hidden), draw(experts.hidden, experts.intermediate))


def make_case(
    experts: Experts,
    weights: ExpertWeights,
    tokens: int,
    skew: float = 0.0,
    activation: Activation = SILU,
    stored: WeightFormat = FP8_BLOCK,
) -> Case:
    """Returns random tokens with another routing for each call in a graph, so that few weights are still in L2."""
    x, routings = random_step(experts, tokens, weights.w13[0].device, skew)
    busy = sum(ids.unique().numel() for _, ids in routings) / len(routings)
    first, topk_weights, ids = (part[:REFERENCE_TOKENS] for part in (x, *routings[0]))
    expected = float32_layer(weights, first, topk_weights, ids, activation, stored)
    return Case(x, routings, expected, floor_us(experts, tokens, busy, stored))


def random_step(
    experts: Experts, tokens: int, device: torch.device, skew: float = 0.0
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Returns random tokens, and a routing for each call in a graph."""
    x = torch.randn(tokens, experts.hidden, generator=_seeded(tokens, device), device=device).bfloat16()
    calls = 16 if tokens <= 128 else 4 if tokens <= 1024 else 1
    seeds = (SEED + tokens + 100_000 * call for call in range(calls))
    return x, [random_routing(_seeded(seed, device), tokens, experts, skew) for seed in seeds]


def _seeded(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def random_routing(
    gen: torch.Generator, tokens: int, experts: Experts, skew: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float32 router weights that sum to 1, and distinct int32 expert ids, both `[tokens, topk]`.

    Logits are random for each token and expert. `skew` scales a random logit per expert that is added to them, so that
    few experts get most tokens.
    """
    logits = torch.randn(tokens, experts.experts, generator=gen, device=gen.device)
    if skew:
        logits += skew * torch.randn(experts.experts, generator=gen, device=gen.device)
    scores, ids = logits.sigmoid().topk(experts.topk)
    return scores / scores.sum(-1, keepdim=True), ids.int()


def float32_layer(
    weights: ExpertWeights,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    activation: Activation = SILU,
    stored: WeightFormat = FP8_BLOCK,
) -> torch.Tensor:
    """Returns float32 `[T, H]`: the layer's result with dequantized weights and unquantized activations."""
    gate_limit, activated_limit, up_limit, alpha, beta = activation.numbers
    x = hidden_states.float()
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        w13, w2 = dequantize_expert(weights.of_expert(e), stored)
        token, column = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w13.T).chunk(2, -1)
        gate = gate.clamp(max=gate_limit)
        activated = (gate * torch.sigmoid(alpha * gate)).clamp(max=activated_limit)
        down = (activated * (up.clamp(-up_limit, up_limit) + beta)) @ w2.T
        out.index_add_(0, token, down * topk_weights[token, column, None])
    return out


def floor_us(experts: Experts, tokens: int, busy: float, stored: WeightFormat = FP8_BLOCK) -> float:
    """Returns a lower bound in microseconds from memory traffic and arithmetic. `busy`: experts with tokens."""
    weights = 3 * experts.hidden * experts.intermediate  # per expert: multiply-adds per token
    activations = 2 * 2 * tokens * experts.hidden  # bfloat16 in and out
    nbytes = stored.weight.nbytes(3 * experts.intermediate, experts.hidden)  # of an expert
    memory_s = (busy * nbytes + activations) / BYTES_PER_S
    return max(memory_s, 2 * weights * tokens * experts.topk / FLOP_PER_S) * 1e6


def make_ours(experts: Experts, weights: ExpertWeights, tokens: int, spec: LayerSpec | None = None) -> Layer:
    """Returns our layer, without biases. Without a spec, it computes SiLU, with float32 scales of activations."""
    names = ("w13", "w13_scale", "w2", "w2_scale")
    tensors = dict(zip(names, (*weights.w13, *weights.w2), strict=True))
    spec = spec or LayerSpec(MoeShape.of(experts, experts.experts))
    return layers.Experts(spec._replace(bias=False), tensors, names).run
