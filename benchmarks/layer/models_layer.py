"""Time the experts of models of 2026 with their activations, beside vLLM's backends on the same weights, in turns.

    python -m benchmarks.layer.models_layer --out benchmarks/results/models_layer-<date>.json

All experts are on one GPU, or a rank's share of each: of all its channels under tensor parallelism (TP), or of the
experts (EP); `tokens` are those of a step of all ranks. `us` is our layer in the format that the row names. `peers` has
the microseconds of vLLM's backends in the same format, or why one cannot compute the layer, and `fp4_peers` those of
kernels that read the weights in MXFP4 (see `benchmarks.layer.fp4_peers`). Our layer once more:

- `mxfp4_us`: from the packed MXFP4 weights that block FP8 represents
- `block_us`: from block FP8 of the same shape
- `without_limit_us`: with plain SwiGLU, which is as fast if the limit costs nothing
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from benchmarks.layer.fp4_peers import FP4_PEERS, compile_humming, make_packed, make_peers
from benchmarks.report import write_report
from fp8moe_plugin.bench.layer import Maker, make_ours, measure, random_weights
from fp8moe_plugin.bench.machine import check_machine
from fp8moe_plugin.bench.packed import in_block_fp8, random_mxfp4
from fp8moe_plugin.bench.peers import BY_FORMAT, PEERS, make_peer, set_up_vllm
from fp8moe_plugin.bench.result import OURS, BenchRow
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat, ceil_div
from fp8moe_plugin.layers.weights import per_row_cast_to_fp8
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from warmup.report import installed


class Layer(NamedTuple):
    experts: Experts
    activation: Activation = SILU
    ue8m0: bool = False
    stored: WeightFormat = FP8_BLOCK  # in the checkpoint
    arriving: float = 1.0  # tokens of this layer for each token of a step

    @property
    def spec(self) -> LayerSpec:
        """The layer with the weights that our kernels read."""
        width = ceil_div(self.experts.intermediate, GROUP) * GROUP
        shape = MoeShape.of(replace(self.experts, intermediate=width), self.experts.experts)
        weights = FP8_BLOCK if self.stored is MXFP4 else self.stored
        return LayerSpec(shape, weights, ue8m0=self.ue8m0, activation=self.activation)


MODELS = {
    "DeepSeek-V4-Flash": Layer(Experts(1, 256, 6, 4096, 2048), Activation(limit=10.0), ue8m0=True, stored=MXFP4),
    "GLM-4.7-FP8": Layer(Experts(1, 160, 8, 5120, 1536), stored=FP8_CHANNEL),
    "GLM-4.7-FP8 TP8": Layer(Experts(1, 160, 8, 5120, 192), stored=FP8_CHANNEL),
    "Ling-2.6-1T": Layer(Experts(1, 256, 8, 8192, 2048), stored=FP8_CHANNEL),
    "GLM-5.3-Flash": Layer(Experts(1, 288, 8, 4096, 2048), Activation(limit=10.0)),
    "MiniMax-M3": Layer(Experts(1, 128, 4, 6144, 3072), Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)),
    "Qwen3.6-35B-A3B": Layer(Experts(1, 256, 8, 2048, 512)),
    "Qwen3.8-Flash-Next": Layer(Experts(1, 512, 10, 2560, 640)),
    "Laguna-S-2.1": Layer(Experts(1, 256, 10, 3072, 1024)),
    "GLM-5.2-FP8": Layer(Experts(1, 256, 8, 6144, 2048)),
    "MiniMax-M2.7": Layer(Experts(1, 256, 8, 3072, 1536)),
    "Ling-3.0-flash": Layer(Experts(1, 512, 8, 2560, 768)),
    "MiMo-V2-Flash": Layer(Experts(1, 256, 8, 4096, 2048)),
    "Hy3-preview": Layer(Experts(1, 192, 8, 4096, 1536)),
    "Step-3.5-Flash": Layer(Experts(1, 288, 8, 4096, 1280), Activation("swiglustep", 7.0)),
    # A rank's share of 640 channels: 80, 160 and 320 of them are stored as 128, 256 and 384. A token has 2.5 of the
    # experts with EP4, and 1.25 with EP8: here more tokens have two or one.
    "Qwen3.8-Flash-Next TP4": Layer(Experts(1, 512, 10, 2560, 256)),
    "Qwen3.8-Flash-Next TP8": Layer(Experts(1, 512, 10, 2560, 128)),
    "Qwen3.8-Flash-Next TP4 EP2": Layer(Experts(1, 256, 5, 2560, 256)),
    "Qwen3.8-Flash-Next TP2 EP4": Layer(Experts(1, 128, 2, 2560, 384), arriving=1.25),
    "Qwen3.8-Flash-Next EP8": Layer(Experts(1, 64, 1, 2560, 640), arriving=1.25),
}
TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
DEFAULT_PEERS = {FP8_BLOCK: ("triton", "deepgemm"), FP8_CHANNEL: ("triton", "cutlass")}
# Our layer, by the columns of a row.
PACKED, BLOCK, WITHOUT_LIMIT = "mxfp4_us", "block_us", "without_limit_us"
OUR_COLUMNS = {OURS: "us"} | {name: name for name in (PACKED, BLOCK, WITHOUT_LIMIT)}


def widened(weights: ExpertWeights, intermediate: int) -> ExpertWeights:
    """Returns per-channel weights padded to `intermediate` channels, as our layers hold a share of other sizes."""
    (w13, w13_scale), (w2, w2_scale) = weights.w13, weights.w2
    more = intermediate - w2.shape[2]

    def halves(tensor: torch.Tensor) -> torch.Tensor:
        return pad(tensor.unflatten(1, (2, -1)), (0, 0, 0, more)).flatten(1, 2)

    gate_up = halves(w13.view(torch.uint8)).view(FP8), halves(w13_scale)
    return ExpertWeights(gate_up, (pad(w2.view(torch.uint8), (0, more)).view(FP8), w2_scale)) if more else weights


def our_layers(layer: Layer) -> tuple[ExpertWeights, dict[str, Maker], ExpertWeights | None]:
    """Returns the weights of vLLM's backends, what makes our layers of them, and the weights in MXFP4, if stored so."""
    experts, spec, device = layer.experts, layer.spec, torch.device("cuda")
    if layer.stored is MXFP4:
        stored = random_mxfp4(experts, device)
        return in_block_fp8(stored), {OURS: partial(make_ours, spec=spec), PACKED: make_packed(stored, spec)}, stored
    if layer.stored is FP8_BLOCK:
        return random_weights(experts, device), {OURS: partial(make_ours, spec=spec)}, None
    weights, width = random_weights(experts, device, per_row_cast_to_fp8), spec.shape.intermediate
    ours = widened(weights, width)
    makers: dict[str, Maker] = {OURS: lambda experts, _, tokens: make_ours(experts, ours, tokens, spec)}
    if width == experts.intermediate:
        blocks = random_weights(experts, device)  # of the same values
        makers[BLOCK] = lambda experts, _, tokens: make_ours(experts, blocks, tokens, spec._replace(weights=FP8_BLOCK))
    return weights, makers, None


def measure_model(
    name: str, peers: Sequence[str], fp4_peers: Sequence[str], tokens: Sequence[int]
) -> list[dict[str, Any]]:
    layer = MODELS[name]
    activation, spec = layer.activation, layer.spec
    weights, makers, stored = our_layers(layer)
    of_format = [peer for peer in peers or DEFAULT_PEERS[spec.weights] if peer in BY_FORMAT[spec.weights]]
    makers |= {peer: partial(make_peer, peer, activation=activation, stored=spec.weights) for peer in of_format}
    if stored is not None:
        makers |= make_peers(fp4_peers, layer.experts, stored, activation)
    elif activation.kind == SILU.kind and activation.limit:  # random gates do not reach the limit
        makers[WITHOUT_LIMIT] = partial(make_ours, spec=spec._replace(activation=SILU))
    show = partial(print, name, flush=True)
    calls = {count: round(count * layer.arriving) for count in tokens}
    rows = measure(makers, layer.experts, weights, [*calls.values()], show, activation=activation, stored=spec.weights)
    return [point(name, spec, count, [row for row in rows if row.tokens == call]) for count, call in calls.items()]


def point(name: str, spec: LayerSpec, tokens: int, rows: list[BenchRow]) -> dict[str, Any]:
    results = {row.backend: row.error or round(row.us or 0, 2) for row in rows}
    errors = {row.backend: round(row.relative_l2, 4) for row in rows if row.relative_l2 is not None}
    found: dict[str, Any] = {"model": name, "format": spec.weights.name, "tokens": tokens}
    found |= {column: results.pop(backend) for backend, column in OUR_COLUMNS.items() if backend in results}
    fp4_peers = {peer: results.pop(peer) for peer in FP4_PEERS if peer in results}
    return found | {"peers": results, "fp4_peers": fp4_peers, "relative_l2": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=(), help="of formats where vLLM has them")
    parser.add_argument("--fp4-peers", nargs="*", choices=FP4_PEERS, default=list(FP4_PEERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    check_machine()
    in_mxfp4 = [MODELS[name][:2] for name in options.models if MODELS[name].stored is MXFP4]
    compile_humming(options.fp4_peers, in_mxfp4, options.tokens)
    points: list[dict[str, Any]] = []
    about = {name: installed(name) for name in ("vllm", "humming-kernels")}
    with set_up_vllm():
        for name in options.models:
            points += measure_model(name, options.peers, options.fp4_peers, options.tokens)
            write_report(options.out, about | {"rows": points})
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
