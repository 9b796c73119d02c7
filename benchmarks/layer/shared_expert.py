"""DeepSeek-V3's experts with their shared expert: computed apart, as vLLM does, or as one more expert; on one GPU.

    python -m benchmarks.layer.shared_expert --out benchmarks/results/shared_expert-<date>.json

Both graphs have CALLS layers with routings and shared experts of their own and are replayed in turns; each begins with
the router. `apart`: up to STREAM_TOKENS tokens, the shared expert runs on a second stream; one kernel scales and adds
the results, as vLLM's compiled code does. `merged`: `fused_moe` with `shared_expert`. `relative_l2` is the distance of
each from float32 math on unquantized activations, for the first REFERENCE_TOKENS tokens.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer.before_after import replay_us
from benchmarks.report import installed, write_report
from fp8moe_plugin.bench.layer import float32_layer, random_weights
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.ops import fp8_linear, fused_moe
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.testing import captured

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
CALLS, REFERENCE_TOKENS = 8, 64
STREAM_TOKENS = 256  # VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
GROUPS, CHOSEN_GROUPS, SCALE = 8, 4, 2.5
LAYERS = {f"dsv3-tp{ranks}": Experts(1, 256, 8, 7168, 2048 // ranks) for ranks in (8, 1)}


def mlp(x: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    gate_up = fp8_linear(x, *weights.w13)
    inner = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
    torch.ops._C.silu_and_mul(inner, gate_up)
    return fp8_linear(inner, *weights.w2)


def part(weights: ExpertWeights, begin: int, end: int) -> ExpertWeights:
    return ExpertWeights(*((values[begin:end], scales[begin:end]) for values, scales in weights))


class Layers:
    """Layer i has experts i to i + 255, and expert i + 256 as its shared one, which no other layer has read before."""

    def __init__(self, experts: Experts, weights: ExpertWeights, tokens: int) -> None:
        from vllm import _custom_ops

        gen = torch.Generator("cuda").manual_seed(tokens)
        self.experts, self.tokens = experts.experts, tokens
        self.x = torch.randn(tokens, experts.hidden, device="cuda", generator=gen).bfloat16()
        self.gate = torch.randn(self.experts, experts.hidden, device="cuda", generator=gen).bfloat16()
        self.bias, self.side = torch.zeros(self.experts, device="cuda"), torch.cuda.Stream()
        self.top_k = partial(
            _custom_ops.grouped_topk,
            num_expert_group=GROUPS,
            topk_group=CHOSEN_GROUPS,
            topk=experts.topk,
            renormalize=True,
            routed_scaling_factor=1.0,
            bias=self.bias,
            scoring_func=1,
        )
        logits = [torch.randn(tokens, self.experts, device="cuda", generator=gen) for _ in range(CALLS)]
        self.routings = [self.top_k(each) for each in logits]
        self.routed = [part(weights, i, i + self.experts) for i in range(CALLS)]
        self.shared = [weights.of_expert(self.experts + i) for i in range(CALLS)]
        self.all = [part(weights, i, i + self.experts + 1) for i in range(CALLS)]

    def route(self) -> None:
        self.top_k(torch.mm(self.x, self.gate.T, out_dtype=torch.float32))

    def apart(self, i: int, out: torch.Tensor) -> None:
        main, overlaps = torch.cuda.current_stream(), self.tokens <= STREAM_TOKENS
        if overlaps:
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                shared = mlp(self.x, self.shared[i])
        else:
            shared = mlp(self.x, self.shared[i])
        self.route()
        fused_moe(self.x, *self.routed[i].w13, *self.routed[i].w2, *self.routings[i], out=out)
        if overlaps:
            main.wait_stream(self.side)
        torch.add(shared, out, alpha=SCALE, out=out)

    def merged(self, i: int, out: torch.Tensor) -> None:
        self.route()
        merged = self.all[i]
        options: dict[str, Any] = {"shared_expert": True, "routed_scale": SCALE}
        fused_moe(self.x, *merged.w13, *merged.w2, *self.routings[i], out=out, **options)

    def expected(self) -> torch.Tensor:
        """float32, of the first layer."""
        x, (weights, ids) = self.x[:REFERENCE_TOKENS], (tensor[:REFERENCE_TOKENS] for tensor in self.routings[0])
        columns = torch.nn.functional.pad(weights * SCALE, (0, 1), value=1.0)
        return float32_layer(self.all[0], x, columns, torch.nn.functional.pad(ids, (0, 1), value=self.experts))


def measure(experts: Experts, weights: ExpertWeights, tokens: int) -> dict[str, Any]:
    layers = Layers(experts, weights, tokens)
    outs = {name: torch.empty_like(layers.x) for name in ("apart", "merged")}

    def calls(layer: Callable[..., None], out: torch.Tensor) -> list[Callable[[], Any]]:
        return [partial(layer, i, out) for i in range(CALLS)]

    graphs = {name: captured(calls(getattr(layers, name), out)) for name, out in outs.items()}
    times = replay_us(graphs)
    found: dict[str, Any] = {"tokens": tokens}
    found |= {f"{name}_us": round(us / CALLS, 2) for name, us in times.items()}
    found["saved_us"] = round((times["apart"] - times["merged"]) / CALLS, 2)
    expected = layers.expected()
    for name, out in outs.items():
        getattr(layers, name)(0, out)
        found[f"{name}_l2"] = round(((out[:REFERENCE_TOKENS] - expected).norm() / expected.norm()).item(), 6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import vllm._custom_ops  # noqa: F401 (registers vLLM's kernels)

    rows: list[dict[str, Any]] = []
    for name in options.layers:
        experts = LAYERS[name]
        weights = random_weights(replace(experts, experts=experts.experts + CALLS), torch.device("cuda"))
        for tokens in options.tokens:
            rows.append({"layer": name} | measure(experts, weights, tokens))
            print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        del weights
        torch.cuda.empty_cache()
        write_report(options.out, {"vllm": installed("vllm"), "rows": rows})


if __name__ == "__main__":
    main()
