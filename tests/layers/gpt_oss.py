"""Experts of gpt-oss: those of a checkpoint by the names of parameters, and what the layers of engines hold of them."""

import math
from collections.abc import Iterator

import torch

from benchmarks.checkpoints.mxfp4 import values
from fp8moe_plugin.checkpoint.gpt_oss import ACTIVATION
from fp8moe_plugin.ops.reference import dequantize_blocks
from tests.layers.conformance import activated
from tests.layers.experts import EXPERTS
from tests.layers.packed import weights_of

HIDDEN, PADDED, INTERMEDIATE = 96, 128, 160  # of four ranks, two hold 64 channels each, then 32 and none
NAMES = "w13", "w2"
Tensors = dict[str, torch.Tensor]


def make_experts(seed: int) -> Tensors:
    gen = torch.Generator().manual_seed(seed)
    found = {}
    for name, (n, k) in zip(NAMES, ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)), strict=True):
        found[f"{name}_bias"] = torch.randn(EXPERTS, n, generator=gen).bfloat16()
        found[f"{name}_weight"] = torch.randint(256, (EXPERTS, n, k // 2), generator=gen, dtype=torch.uint8)
        found[f"{name}_weight_scale"] = torch.randint(116, 121, (EXPERTS, n, k // 32), generator=gen, dtype=torch.uint8)
    return found


CHECKPOINT, OTHER = make_experts(0), make_experts(1)


def named(tensors: Tensors, module: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields these tensors as OpenAI's checkpoints have them."""
    parts, kinds = {"w13": "gate_up_proj", "w2": "down_proj"}, {"weight": "blocks", "weight_scale": "scales"}
    for name, tensor in tensors.items():
        part, _, kind = name.partition("_")
        stored = tensor.unflatten(-1, (-1, 16)) if kind == "weight" else tensor
        yield f"{module}.{parts[part]}_{kinds.get(kind, kind)}", stored


def part_of(tensors: Tensors, ranks: int, rank: int) -> Tensors:
    """What engines' models pass to a rank."""
    groups = math.ceil(INTERMEDIATE / 32 / ranks)
    start, end = (min(INTERMEDIATE, 32 * groups * at) for at in (rank, rank + 1))
    found = {name: t[:, 2 * start : 2 * end] for name, t in tensors.items() if name.startswith("w13")}
    found["w2_bias"] = tensors["w2_bias"] if rank == 0 else torch.zeros_like(tensors["w2_bias"])
    for name, unit in (("w2_weight", 2), ("w2_weight_scale", 32)):
        found[name] = tensors[name][..., start // unit : end // unit]
    return found


def wanted_of(tensors: Tensors, expert: int) -> Tensors:
    """The exact weights and biases of an expert."""
    pairs = ([tensors[f"{name}_{kind}"][expert] for kind in ("weight", "weight_scale")] for name in NAMES)
    w13, w2 = (values(*pair) for pair in pairs)
    b13, b2 = (tensors[f"{name}_bias"][expert].float() for name in NAMES)
    return {"w1": w13[::2], "w3": w13[1::2], "w2": w2, "w1_bias": b13[::2], "w3_bias": b13[1::2], "w2_bias": b2}


def held_by(layer: torch.nn.Module, expert: int, bias: str) -> Tensors:
    w13_bias, w2_bias = (getattr(layer, f"{name}_{bias}")[expert] for name in NAMES)
    found = {"w1_bias": w13_bias.chunk(2)[0], "w3_bias": w13_bias.chunk(2)[1], "w2_bias": w2_bias}
    if layer.w13_weight.dtype == torch.uint8:
        return found | weights_of(layer, expert)
    pairs = ([getattr(layer, f"{name}_{kind}")[expert] for kind in ("weight", "weight_scale")] for name in NAMES)
    w13, found["w2"] = (dequantize_blocks(*pair) for pair in pairs)
    found["w1"], found["w3"] = w13.chunk(2)
    return found


def assert_holds(layer: torch.nn.Module, tensors: Tensors, bias: str = "bias") -> None:
    """Exactly these tensors of a rank, then zeros; `bias`: the suffix of the names of biases."""
    for expert in range(EXPERTS):
        found = held_by(layer, expert, bias)
        for name, wanted in wanted_of(tensors, expert).items():
            sizes = zip(found[name].shape[::-1], wanted.shape[::-1], strict=True)
            padding = [side for size, given in sizes for side in (0, size - given)]
            assert torch.equal(found[name].float(), torch.nn.functional.pad(wanted, padding)), name


def experts_in_float64(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The result of CHECKPOINT's experts for these tokens."""
    total = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for expert in range(EXPERTS):
        w = {name: tensor.double() for name, tensor in wanted_of(CHECKPOINT, expert).items()}
        inner = activated(x.double() @ w["w1"].T + w["w1_bias"], x.double() @ w["w3"].T + w["w3_bias"], ACTIVATION)
        share = (weights.double() * (ids == expert)).sum(1, keepdim=True)
        total += share * (inner @ w["w2"].T + w["w2_bias"])
    return total
