"""The launches of a layer whose tokens and results the ranks of a group store into each other's windows."""

from typing import Any

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import LayerAddresses, placed
from fp8moe_plugin.launches.sm90.combine import CHANNELS_PER_THREAD
from fp8moe_plugin.launches.sm90.layer import layer_launches
from fp8moe_plugin.plan.sm90.layer import SortedStep
from fp8moe_plugin.plan.sm90.push import PushScratch, PushStep, WindowLayout


def push_launches(
    step: PushStep,
    tensors: LayerAddresses,
    owners: Address,
    window: Address,
    layout: WindowLayout,
    tokens: int,
    ids_64: bool,
) -> tuple[Launch, ...]:
    """Returns the launches of a rank with `tokens` tokens, at most `step.rows`.

    Args:
        tensors: of this rank; the scratch has `step.scratch.nbytes` bytes.
    """
    topk, hidden, _, _, experts = step.spec.shape
    vectors = hidden // CHANNELS_PER_THREAD
    scratch, here = placed(step.scratch, tensors.scratch), placed(layout, window)
    own: dict[str, Any] = {"ids": tensors.topk_ids, "ids_64": int(ids_64), "topk": topk, "experts": experts}
    own |= {"owners": owners, "window": window, "tokens": tokens}
    push_tokens = Launch(
        step.push_tokens,
        step.token_blocks,
        step.push_tokens.arguments(
            x=tensors.hidden_states, weights=tensors.topk_weights, rows=step.rows, groups=hidden // GROUP, **own
        ),
        pdl=True,
    )
    layer = layer_launches(step.layer, _arrived(tensors, here, scratch), ids_64=False, window=window)
    if isinstance(step.layer, SortedStep) and not step.pushes_rows:
        layer = layer[:-1]  # push_sums does what combine would
    of_rows: dict[str, Any] = {"weights": tensors.topk_weights, "routed_scale": step.spec.routed_scale}
    add = Launch(
        step.add,
        tokens * ceil_div(vectors, step.add.threads),
        step.add.arguments(
            out=tensors.out, vectors=vectors, **own, **(of_rows if step.pushes_rows else {"rows": step.rows})
        ),
        pdl=not step.pushes_rows,  # with many blocks, waiting inside each one costs more than a late start
    )
    return push_tokens, *layer, _push_sums_launch(step, scratch, window), *([add] if tokens else [])


def _push_sums_launch(step: PushStep, scratch: PushScratch, window: Address) -> Launch:
    """Returns the launch that pushes sums. If GEMM 2 pushes rows, there are none, and it only ends that push."""
    vectors = step.spec.shape.hidden // CHANNELS_PER_THREAD
    sums = 0 if step.pushes_rows else step.rows  # of each rank
    rows: Address = scratch.sums
    slots: Address = 0  # the rows are sums already
    if isinstance(step.layer, SortedStep):
        rows, slots = scratch.layer + step.layer.scratch.down, scratch.layer + step.layer.scratch.slots
    return Launch(
        step.push_sums,
        max(min(step.ranks * sums * ceil_div(vectors, step.push_sums.threads), step.most_sum_blocks), 1),
        step.push_sums.arguments(
            rows=rows,
            slots=slots,
            window=window,
            rows_per_rank=sums,
            vectors=vectors,
            topk=step.spec.shape.topk,
            routed_scale=step.spec.routed_scale,
        ),
        pdl=True,
    )


def _arrived(tensors: LayerAddresses, window: WindowLayout, scratch: PushScratch) -> LayerAddresses:
    """Returns the tensors of the layer in between: the tokens of all ranks, in this rank's window."""
    return tensors._replace(
        hidden_states=window.tokens,
        hidden_scale=window.scales,
        topk_weights=window.weights,
        topk_ids=window.ids,
        out=scratch.sums,
        scratch=scratch.layer,
    )
