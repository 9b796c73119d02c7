"""DeepSeek-V3's architecture in plain PyTorch, for training; parameters are named as in checkpoints.

Multi-head latent attention without YaRN; experts are chosen by sigmoid scores within the best groups (arXiv
2412.19437). All experts of a layer form one wide MLP whose channels are weighted by the router. The weights are zero
for experts that a token does not have, so values and gradients are those of the sparse layer. This takes experts / topk
times the arithmetic of a sparse layer, in three large GEMMs.
"""

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.checkpoints.synthetic import Shape, config

INIT_STD = 0.02


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())  # in the dtype of the weights, also under autocast


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [..., tokens, heads, dim] in DeepSeek's layout: channels 2i and 2i + 1 are a pair."""
    dim, tokens = x.shape[-1], x.shape[-3]
    frequencies = theta ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    angles = torch.arange(tokens, device=x.device)[:, None, None] * frequencies
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention: keys and values come from `kv_lora` channels, one rotary key serves all heads."""

    def __init__(self, s: Shape, eps: float, theta: float) -> None:
        super().__init__()
        self.shape, self.theta = s, theta
        self.q_a_proj = linear(s.hidden, s.q_lora)
        self.q_a_layernorm = RMSNorm(s.q_lora, eps)
        self.q_b_proj = linear(s.q_lora, s.heads * (s.nope_dim + s.rope_dim))
        self.kv_a_proj_with_mqa = linear(s.hidden, s.kv_lora + s.rope_dim)
        self.kv_a_layernorm = RMSNorm(s.kv_lora, eps)
        self.kv_b_proj = linear(s.kv_lora, s.heads * (s.nope_dim + s.v_dim))
        self.o_proj = linear(s.heads * s.v_dim, s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        s = self.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (s.heads, -1))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([s.kv_lora, s.rope_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (s.heads, -1))
        k, v = kv.split([s.nope_dim, s.v_dim], -1)
        q_nope, q_rope = q.split([s.nope_dim, s.rope_dim], -1)
        k_rope = rotate(k_rope.unsqueeze(-2), self.theta).expand(*k.shape[:-1], -1)
        q = torch.cat((q_nope, rotate(q_rope, self.theta)), -1)
        k = torch.cat((k, k_rope), -1)
        v = F.pad(v, (0, q.shape[-1] - s.v_dim))  # flash attention takes one size for all three
        heads_first = (part.transpose(-2, -3) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads_first, is_causal=True)[..., : s.v_dim]
        return self.o_proj(mixed.transpose(-2, -3).flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int, limit: float | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """With `weights` [..., experts], equal shares of the channels are experts, whose outputs are weighted."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        inner = F.silu(gate) * up
        if weights is not None:
            by_expert = inner.unflatten(-1, (weights.shape[-1], -1))
            inner = (by_expert * weights.unsqueeze(-1).to(inner.dtype)).flatten(-2)
        return self.down_proj(inner)


class Router(nn.Module):
    """Top-k experts of the best groups; a bias that is not trained balances their load (arXiv 2408.15664)."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, s: Shape, scaling_factor: float) -> None:
        super().__init__()
        self.shape, self.scaling_factor = s, scaling_factor
        self.weight = nn.Parameter(torch.empty(s.experts, s.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(s.experts))
        self.register_buffer("load", torch.zeros(s.experts), persistent=False)  # tokens per expert in the last call

    def forward(self, x: Tensor) -> Tensor:
        """Returns the weight of each expert for each token, float32 [..., experts]; zero if it is not chosen."""
        s = self.shape
        scores = F.linear(x, self.weight).float().sigmoid()
        groups = (scores + self.e_score_correction_bias).unflatten(-1, (s.groups, -1))
        best = groups.topk(2).values.sum(-1).topk(s.topk_groups).indices
        closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        chosen = groups.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2).topk(s.topk).indices
        self.load = torch.zeros_like(scores, dtype=torch.int32).scatter(-1, chosen, 1).flatten(0, -2).sum(0)
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.scaling_factor
        return torch.zeros_like(scores).scatter(-1, chosen, weights)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """After a step, lower the bias of experts with more tokens than average and raise the others'."""
        load = self.load.float()
        self.e_score_correction_bias += rate * torch.sign(load.mean() - load)


class MoE(nn.Module):
    def __init__(self, s: Shape, scaling_factor: float) -> None:
        super().__init__()
        self.gate = Router(s, scaling_factor)
        self.experts = MLP(s.hidden, s.experts * s.moe_intermediate, s.swiglu_limit)
        self.shared_experts = MLP(s.hidden, s.moe_intermediate, s.swiglu_limit)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x)) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, s: Shape, index: int) -> None:
        super().__init__()
        about = config(s, fp8=False)
        eps = about["rms_norm_eps"]
        self.input_layernorm = RMSNorm(s.hidden, eps)
        self.self_attn = Attention(s, eps, about["rope_theta"])
        self.post_attention_layernorm = RMSNorm(s.hidden, eps)
        dense = MLP(s.hidden, s.dense_intermediate, s.swiglu_limit) if index < s.dense_layers else None
        self.mlp = dense or MoE(s, about["routed_scaling_factor"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class SmallMoE(nn.Module):
    """A DeepSeek-V3 of any `Shape` without multi-token prediction."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(s.vocab, s.hidden),
                "layers": nn.ModuleList(Layer(s, i) for i in range(s.layers)),
                "norm": RMSNorm(s.hidden, config(s, fp8=False)["rms_norm_eps"]),
            }
        )
        self.lm_head = linear(s.hidden, s.vocab)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))  # to the residual stream
                nn.init.normal_(parameter, std=INIT_STD / (2 * s.layers) ** 0.5 if writes else INIT_STD)

    def forward(self, ids: Tensor) -> Tensor:
        """Next-token logits [batch, tokens, vocab] for ids [batch, tokens]."""
        x = self.model["embed_tokens"](ids)
        for layer in self.model["layers"]:
            x = layer(x)
        return self.lm_head(self.model["norm"](x))

    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    def weight(self, name: str) -> Tensor:
        """Returns the tensor with this name in a checkpoint.

        Raises:
            KeyError: there is no such tensor.
        """
        state = self.state_dict()
        if not (found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name)):
            return state[name]
        experts, index, projection = found.groups()
        channels = 1 if projection == "down_proj" else 0
        return state[f"{experts}.{projection}.weight"].chunk(self.shape.experts, channels)[int(index)]
