"""`explain`: the memory and the computation of a model on each GPU, the cost of padding, and the best split.

Routing is assumed to be uniform: each token picks its experts at random.
"""

from dataclasses import replace

import numpy as np

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import MERGING_GATED, Experts, Model, merges_shared_expert
from fp8moe_plugin.checkpoint.splits import computes_experts, rank_shapes, split_refusal, whole_expert_ways
from fp8moe_plugin.plan.model_specs import model_specs
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, StepPlan, plan_layer
from fp8moe_plugin.plan.sm90.tiles import RowTile, computed_rows
from fp8moe_plugin.plan.spec import MoeShape
from fp8moe_plugin.settings import batch_invariant, settings
from fp8moe_plugin.terminal import fit, table
from warmup import all_to_all, forms, memory, needs
from warmup.report import ExplainReport, LayoutReport, ShapeReport, StepReport

SAMPLES = 20_000  # experts whose numbers of rows are drawn
REPEATS_FROM = 8  # with this many tiles of an expert or more, `tile.rows` more rows are one more tile without padding
STEPS_HEADER = ["tokens", "rows", "padding", "scratch", "tile", "GEMM 1, GEMM 2"]
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
    routed = model.architecture not in MERGING_GATED or (settings().router and not batch_invariant())
    ours = computes_experts(model, parallel) and routed
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
    lines = [
        header,
        *memory.recoding_note(model),
        *needs.note(model),
        *["Under vLLM the shared expert is one more expert, which every token has."] * _merged(model, parallel),
        "",
        f"One GPU of {found.parallel}: {_size(found.weight_bytes)} of weights, "
        f"{_size(found.workspace_bytes)} of scratch in a step of {max_tokens} tokens",
    ]
    shapes = [(s.name, f"{s.layers} x", str(s.shape), _size(s.bytes), _padding(s)) for s in found.shapes]
    forms_and_ranks = [
        *(line for paragraph in forms.advice(model, parallel, max_tokens, found.forms) for line in ("", paragraph)),
        *(["", found.all_to_all.why] if found.all_to_all else []),
        "",
        "By tokens of a step: rows of an expert, padding, scratch, rows of a tile, and the kernels of both GEMMs"
        if found.steps
        else "The engine's own kernels compute the experts."
        if model.experts.layers
        else "The checkpoint keeps all experts unquantized: the engine's own kernels compute them.",
    ]
    steps = [STEPS_HEADER, *(_step_row(step, step_plan(model, parallel, local, step.tokens)) for step in found.steps)]
    ways = "Ways to split it over as many GPUs (weights per GPU; rows of the busiest GPU over the average)"
    layouts = [(w.options, _size(w.weight_bytes or 0), f"{w.imbalance:.2f}") for w in found.layouts if not w.refusal]
    last = [f"{way.options} is not supported: {way.refusal}" for way in found.layouts if way.refusal]
    last += ["With --gpu h100, h200, h20 or h800: which splits fit, which is best, and the commands that serve it."]
    return "\n".join(
        [
            *(fit(line, indent=4) for line in lines),
            table("<><><", shapes),
            *(fit(line, indent=4) for line in forms_and_ranks),
            *([table(">>>>><", steps)] if found.steps else []),
            "",
            fit(ways, indent=4),
            table("<>>", layouts),
            *(fit(line, indent=4) for line in last),
        ]
    )


def _layers(experts: Experts) -> str:
    if not experts.mtp:
        return f"{experts.layers} layers"
    return f"{experts.layers} layers ({experts.mtp} of them for multi-token prediction, MTP)"


def _step_row(found: StepReport, step: StepPlan) -> list[str]:
    """Returns a row of the table of steps. In a small batch, all tokens are one tile."""
    tile_rows = step.padded_tokens if isinstance(step, SmallBatchStep) else step.tile.rows
    rows, padding = f"{found.rows_per_expert:.2f}", f"{found.padding:.1%}"
    kernels = f"{step.gate_up.source}, {step.down.source}"
    return [str(found.tokens), rows, padding, _size(found.workspace_bytes), str(tile_rows), kernels]


def _padding(shape: ShapeReport) -> str:
    if not shape.padding_bytes:
        return ""
    more = shape.padding_bytes / (shape.bytes - shape.padding_bytes)
    return f"{_size(shape.padding_bytes)} of it padding to whole scale blocks (+{more:.1%})"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
