"""The arithmetic of a router in plain torch; see `ops/reference.py`."""

import torch


def router_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `ops.router_gemm` on checked arguments."""
    return (x.float() @ weight.float().T).bfloat16()


def choose_experts(
    logits: torch.Tensor,
    topk: int,
    renormalize: bool,
    padding: torch.Tensor | None,
    hidden_states: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.choose_experts` on checked arguments."""
    order = logits.float().sort(descending=True, stable=True).indices[:, :topk]
    weights, ids = logits.float().softmax(-1).gather(1, order), order.int()
    if renormalize:
        weights /= weights.sum(-1, keepdim=True)
    if hidden_states is not None and shared_gate is not None:
        weights = with_shared_weights(weights, hidden_states, shared_gate)
    if padding is not None:
        weights, ids = weights.masked_fill(padding[:, None], 0), ids.masked_fill(padding[:, None], -1)
    return weights, ids


def with_shared_weights(weights: torch.Tensor, x: torch.Tensor, shared_gate: torch.Tensor) -> torch.Tensor:
    """Returns float32 `[T, k + 1]`: the weights `[T, k]`, and those of a shared expert with a gate `[1, H]`."""
    return torch.cat([weights, (x.float() @ shared_gate.float().T).sigmoid()], 1)
