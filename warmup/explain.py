"""`explain`: the memory and the computation of a model on each GPU, the cost of padding, and the best split.

Routing is assumed to be uniform: each token picks its experts at random.
"""

from dataclasses import replace

import numpy as np

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Experts, Model, merges_shared_expert
from fp8moe_plugin.checkpoint.splits import computes_experts, rank_shapes, split_refusal, whole_expert_ways
from fp8moe_plugin.plan.model_specs import model_specs
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, StepPlan, plan_layer
from fp8moe_plugin.plan.sm90.tiles import RowTile, computed_rows
from fp8moe_plugin.plan.spec import MoeShape
from fp8moe_plugin.settings import batch_invariant, settings
from warmup import all_to_all, forms, memory, needs
from warmup.report import ExplainReport, LayoutReport, ShapeReport, StepReport
from warmup.terminal import fit

SAMPLES = 20_000  # experts whose numbers of rows are drawn
REPEATS_FROM = 8  # with this many tiles of an expert or more, `tile.rows` more rows are one more tile without padding
STEPS = 200  # sampled steps; the busiest rank is determined in each


def explain(model: Model, parallel: Parallel, max_tokens: int, capture_sizes: tuple[int, ...]) -> ExplainReport:
    """Returns figures for the rank that holds the most weights, with the average number of rows per expert.

    Args:
        max_tokens, capture_sizes: tokens of a step, on each data-parallel replica.
    Raises:
        UnsupportedError: the model cannot be split this way.
    """
    rank = rank_shapes(model, parallel)
    shared = replace(parallel, tp=parallel.ranks, dp=1, ep=1)
    ways = [shared, *(whole_expert_ways(parallel) if parallel.ranks > 1 else [])]
    layouts = [_layout(model, way, max_tokens) for way in dict.fromkeys([*ways, parallel])]
    shapes = memory.weight_shapes(model, parallel)
    lengths = sorted({*capture_sizes, max_tokens}) if computes_experts(model, parallel) else []
    steps = {tokens: _step(model, parallel, rank.experts, tokens) for tokens in lengths}
    return ExplainReport(
        parallel=str(parallel),
        shapes=shapes,
        weight_bytes=sum(shape.bytes for shape in shapes),
        padding_bytes=sum(shape.padding_bytes for shape in shapes),
        workspace_bytes=scratch_bytes(model, parallel, max_tokens),
        steps=list(steps.values()),
        layouts=layouts,
        forms=forms.forms(model, parallel),
        all_to_all=all_to_all.all_to_all(model, parallel, max_tokens),
    )


def step_plan(model: Model, parallel: Parallel, local: Experts, tokens: int) -> StepPlan:
    """Returns the plan of a step with `tokens` tokens per data-parallel replica; experts get all replicas' tokens."""
    shape = MoeShape.of(local, model.experts.experts)
    if _merged(model, parallel):
        shape = shape.with_shared_expert()
    spec, *_ = model_specs(model, shape)
    return plan_layer(spec._replace(batch_invariant=batch_invariant()), tokens * parallel.dp)


def scratch_bytes(model: Model, parallel: Parallel, tokens: int) -> int:
    """Returns the scratch memory of the experts in a step with `tokens` tokens on each replica.

    It is 0 if our kernels compute no experts.
    """
    if not computes_experts(model, parallel):
        return 0
    return step_plan(model, parallel, rank_shapes(model, parallel).experts, tokens).scratch.nbytes


def _merged(model: Model, parallel: Parallel) -> bool:
    ours = computes_experts(model, parallel)
    return settings().merge_shared_expert and ours and merges_shared_expert(model, parallel)


def _step(model: Model, parallel: Parallel, local: Experts, tokens: int) -> StepReport:
    step, chance = step_plan(model, parallel, local, tokens), model.experts.topk / model.experts.experts
    rows = np.random.default_rng(0).binomial(step.tokens, chance, SAMPLES)
    if isinstance(step, SmallBatchStep):
        multiplied = step.padded_tokens * int(np.count_nonzero(rows))
    else:
        multiplied = _multiplied(rows, step.tile)
    return StepReport(
        tokens=tokens,
        kernel=step.down.source,
        rows_per_expert=round(step.tokens * chance, 2),
        padding=round(1 - int(rows.sum()) / multiplied, 3) if multiplied else 0.0,
        workspace_bytes=step.scratch.nbytes,
    )


def _multiplied(rows: np.ndarray, tile: RowTile) -> int:
    """Returns the sum of `computed_rows` over experts with these rows, in time that does not grow with their number."""
    repeated = np.maximum(rows // tile.rows - REPEATS_FROM, 0)
    rest, experts = np.unique(rows - repeated * tile.rows, return_counts=True)
    of_rest = sum(computed_rows(int(r), tile) * int(n) for r, n in zip(rest, experts, strict=True))
    return int(repeated.sum()) * tile.rows + of_rest


def _layout(model: Model, way: Parallel, tokens: int) -> LayoutReport:
    refusal = split_refusal(model, way)
    if refusal:
        return LayoutReport(options=str(way), refusal=refusal)
    weight_bytes = sum(shape.bytes for shape in memory.weight_shapes(model, way))
    imbalance = _imbalance(model.experts, way, tokens)
    return LayoutReport(options=str(way), weight_bytes=weight_bytes, imbalance=imbalance)


def _imbalance(experts: Experts, way: Parallel, tokens: int) -> float:
    """Returns the rows of the busiest rank divided by those of the average rank, averaged over STEPS steps."""
    rows = np.random.default_rng(0).binomial(tokens * way.dp, experts.topk / experts.experts, (STEPS, experts.experts))
    ranks = [part.sum(1) for part in np.array_split(rows, way.ep, axis=1)]
    return round(float(np.mean(np.max(ranks, axis=0) / (rows.sum(1) / way.ep))), 3)


def text(model: Model, parallel: Parallel, found: ExplainReport, max_tokens: int) -> str:
    """Returns the result of `explain` for these arguments as text."""
    e, local = model.experts, rank_shapes(model, parallel).experts
    header = f"{model.architecture}: {_layers(e)} of {e.experts} experts, {e.topk} per token; hidden {e.hidden}, "
    header += f"intermediate {e.intermediate}; activation scales {'powers of two' if model.ue8m0 else 'float32'}"
    width = max(24, *(len(way.options) for way in found.layouts))
    names = max(32, *(len(shape.name) for shape in found.shapes))
    lines = [
        header,
        *memory.recoding_note(model),
        *needs.note(model),
        *["Under vLLM the shared expert is one more expert, which every token has."] * _merged(model, parallel),
        "",
        f"One GPU of {found.parallel}: {_size(found.weight_bytes)} of weights, "
        f"{_size(found.workspace_bytes)} of scratch in a step of {max_tokens} tokens",
        *(
            f"  {s.name:{names}s} {s.layers:4d} x {s.shape!s:20s} {_size(s.bytes):>10s}{_padding(s)}"
            for s in found.shapes
        ),
        *(line for paragraph in forms.advice(model, parallel.dp, max_tokens, found.forms) for line in ("", paragraph)),
        *(["", found.all_to_all.why] if found.all_to_all else []),
        "",
        "By tokens of a step: rows of an expert, padding, scratch, rows of a tile, and the kernels of both GEMMs"
        if found.steps
        else "The engine's own kernels compute the experts."
        if model.experts.layers
        else "The checkpoint keeps all experts unquantized: the engine's own kernels compute them.",
        *[f"{'tokens':>7s} {'rows':>8s} padding {'scratch':>9s} tile  GEMM 1, GEMM 2"] * bool(found.steps),
        *(
            f"{s.tokens:7d} {s.rows_per_expert:8.2f} {s.padding:7.1%} {_size(s.workspace_bytes):>9s} "
            + _gemms(step_plan(model, parallel, local, s.tokens))
            for s in found.steps
        ),
        "",
        "Ways to split it over as many GPUs (weights per GPU; rows of the busiest GPU over the average)",
        *(
            f"  {way.options:{width}s} "
            + (
                f"not supported: {way.refusal}"
                if way.refusal
                else f"{_size(way.weight_bytes or 0):>10s} {way.imbalance:8.2f}"
            )
            for way in found.layouts
        ),
        "With --gpu h100, h200, h20 or h800: which splits fit, which is best, and the commands that serve it.",
    ]
    return "\n".join(fit(line, indent=4) for line in lines)


def _layers(experts: Experts) -> str:
    if not experts.mtp:
        return f"{experts.layers} layers"
    return f"{experts.layers} layers ({experts.mtp} of them for multi-token prediction, MTP)"


def _gemms(step: StepPlan) -> str:
    """Returns the rows per tile and the kernels of both GEMMs. In a small batch, all tokens are one tile."""
    tile_rows = step.padded_tokens if isinstance(step, SmallBatchStep) else step.tile.rows
    return f"{tile_rows:4d}  {step.gate_up.source}, {step.down.source}"


def _padding(shape: ShapeReport) -> str:
    if not shape.padding_bytes:
        return ""
    more = shape.padding_bytes / (shape.bytes - shape.padding_bytes)
    return f"  {_size(shape.padding_bytes)} of it padding to whole scale blocks (+{more:.1%})"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
