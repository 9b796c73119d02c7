"""The launches of a layer whose tokens and sums the ranks of a group store into each other's windows."""

from typing import NamedTuple

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import LayerAddresses, placed
from fp8moe_plugin.launches.sm90.combine import CHANNELS_PER_THREAD
from fp8moe_plugin.launches.sm90.layer import layer_launches
from fp8moe_plugin.plan.sm90.layer import SortedStep
from fp8moe_plugin.plan.sm90.push import PushStep, WindowLayout

LAYER = ("w13", "w13_scale", "w2", "w2_scale", "w13_bias", "w2_bias")


class PushAddresses(NamedTuple):
    """The addresses of the tensors of a call on one rank."""

    hidden_states: Address
    hidden_scale: Address
    w13: Address
    w13_scale: Address
    w2: Address
    w2_scale: Address
    w13_bias: Address
    w2_bias: Address
    topk_weights: Address
    topk_ids: Address
    expert_map: Address
    out: Address
    owners: Address
    window: Address
    scratch: Address


def push_launches(
    step: PushStep, tensors: PushAddresses, layout: WindowLayout, tokens: int, ids_64: bool
) -> tuple[Launch, ...]:
    """Returns the launches of a rank with `tokens` tokens, at most `step.rows`."""
    topk, hidden, _, _, experts = step.spec.shape
    scratch, window = placed(step.scratch, tensors.scratch), placed(layout, tensors.window)
    routed = {
        "ids": tensors.topk_ids,
        "owners": tensors.owners,
        "ids_64": int(ids_64),
        "topk": topk,
        "experts": experts,
    }
    sizes = {"tokens": tokens, "rows": step.rows, "window": tensors.window}
    push_tokens = Launch(
        step.push_tokens,
        step.token_blocks,
        step.push_tokens.arguments(
            x=tensors.hidden_states, weights=tensors.topk_weights, groups=hidden // GROUP, **routed, **sizes
        ),
        pdl=True,
    )
    arrived = LayerAddresses(
        hidden_states=window.tokens,
        hidden_scale=window.scales,
        **{name: getattr(tensors, name) for name in LAYER},
        topk_weights=window.weights,
        topk_ids=window.ids,
        expert_map=tensors.expert_map,
        out=scratch.sums,
        scratch=scratch.layer,
    )
    layer, vectors = layer_launches(step.layer, arrived, ids_64=False), hidden // CHANNELS_PER_THREAD
    rows: Address = scratch.sums
    slots: Address = 0  # the rows are sums already
    if isinstance(step.layer, SortedStep):
        layer = layer[:-1]  # push_sums does what combine would
        rows, slots = scratch.layer + step.layer.scratch.down, scratch.layer + step.layer.scratch.slots
    push_sums = Launch(
        step.push_sums,
        step.sum_blocks,
        step.push_sums.arguments(
            rows=rows,
            slots=slots,
            window=tensors.window,
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
        step.add_sums.arguments(out=tensors.out, vectors=vectors, **routed, **sizes),
        pdl=True,
    )
    return push_tokens, *layer, push_sums, *([add_sums] if tokens else [])
