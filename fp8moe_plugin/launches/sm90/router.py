"""The launches of a router: the logits of its gate, and softmax top-k."""

from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.plan.sm90.catalog import choose_experts_key, router_gemm_key

WARP = 32  # threads, which share a token in choose_experts
BLOCK_TOKENS, BLOCK_EXPERTS = 16, 8  # of a block of router_gemm
STEP = 32  # channels that a warp of router_gemm multiplies at once
VECTOR = 8  # channels that a lane of choose_experts multiplies by a shared expert's gate at once


def router_gemm_launch(x: Address, weight: Address, logits: Address, tokens: int, experts: int, k: int) -> Launch:
    """Returns the launch of `logits = x @ weight.T` with bfloat16 `[tokens, k]` and `[experts, k]`."""
    key = router_gemm_key()
    arguments = key.arguments(x=x, weight=weight, logits=logits, tokens=tokens, experts=experts, steps=k // STEP)
    return Launch(key, (ceil_div(experts, BLOCK_EXPERTS), ceil_div(tokens, BLOCK_TOKENS)), arguments, pdl=True)


def choose_experts_launch(
    logits: Address,
    padding: Address,
    hidden_states: Address,
    shared_gate: Address,
    weights: Address,
    ids: Address,
    *,
    tokens: int,
    experts: int,
    topk: int,
    hidden: int,
    logits_bf16: bool,
    renormalize: bool,
) -> Launch:
    """Returns the launch of softmax top-k over `[tokens, experts]` logits; see `ops.choose_experts`.

    Weights are float32, ids int32.

    Args:
        hidden: of a layer with `shared_gate`, else 0.
    """
    key = choose_experts_key()
    blocks = ceil_div(tokens, key.threads // WARP)
    arguments = key.arguments(
        logits=logits,
        padding=padding,
        x=hidden_states,
        shared_gate=shared_gate,
        weights=weights,
        ids=ids,
        logits_bf16=int(logits_bf16),
        tokens=tokens,
        experts=experts,
        topk=topk,
        renormalize=int(renormalize),
        vectors=hidden // VECTOR,
    )
    return Launch(key, (blocks, 2) if hidden else blocks, arguments, pdl=True)
