"""The launches of a layer whose tokens and sums the ranks of a group store into each other's windows."""

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
    scratch, here = placed(step.scratch, tensors.scratch), placed(layout, window)
    common: dict[str, Any] = {"ids": tensors.topk_ids, "ids_64": int(ids_64), "topk": topk, "experts": experts}
    common |= {"owners": owners, "window": window, "tokens": tokens, "rows": step.rows}
    push_tokens = Launch(
        step.push_tokens,
        step.token_blocks,
        step.push_tokens.arguments(
            x=tensors.hidden_states, weights=tensors.topk_weights, groups=hidden // GROUP, **common
        ),
        pdl=True,
    )
    layer = layer_launches(step.layer, _arrived(tensors, here, scratch), ids_64=False)
    vectors = hidden // CHANNELS_PER_THREAD
    rows: Address = scratch.sums
    slots: Address = 0  # the rows are sums already
    if isinstance(step.layer, SortedStep):
        layer = layer[:-1]  # push_sums does what combine would
        rows, slots = scratch.layer + step.layer.scratch.down, scratch.layer + step.layer.scratch.slots
    push_sums = Launch(
        step.push_sums,
        min(step.ranks * step.rows * ceil_div(vectors, step.push_sums.threads), step.most_sum_blocks),
        step.push_sums.arguments(
            rows=rows,
            slots=slots,
            window=window,
            rows_per_rank=step.rows,
            vectors=vectors,
            topk=topk,
            routed_scale=step.spec.routed_scale,
        ),
        pdl=True,
    )
    add_sums = Launch(
        step.add_sums,
        tokens * ceil_div(vectors, step.add_sums.threads),
        step.add_sums.arguments(out=tensors.out, vectors=vectors, **common),
        pdl=True,
    )
    return push_tokens, *layer, push_sums, *([add_sums] if tokens else [])


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
