"""Experts of a checkpoint, as an engine hands them to the loaders of a layer."""

import torch

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.layers.recode import block_fp8
from fp8moe_plugin.layers.weights import per_block_cast_to_fp8
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.reference import FP8_MAX

EXPERTS, HIDDEN, TOPK = 3, 256, 2
Checkpoint = dict[str, list[torch.Tensor | None]]  # None: the tensor is missing


def make_unquantized(intermediate: int) -> Checkpoint:
    """Returns the weights of each expert by the engines' names: bfloat16 w1 (gate), w3 (up) and w2 (down)."""
    gen = torch.Generator().manual_seed(intermediate)
    found: Checkpoint = {}
    for name, n, k in (("w1", intermediate, HIDDEN), ("w3", intermediate, HIDDEN), ("w2", HIDDEN, intermediate)):
        # Blocks differ in magnitude, so that exchanged scales are detected.
        magnitude = torch.rand(EXPERTS, ceil_div(n, GROUP), ceil_div(k, GROUP), generator=gen) + 0.1
        spread = magnitude.repeat_interleave(GROUP, 1).repeat_interleave(GROUP, 2)[:, :n, :k]
        found[f"{name}_weight"] = list((torch.randn(EXPERTS, n, k, generator=gen) * spread / k**0.5).bfloat16())
    return found


def make_checkpoint(intermediate: int) -> Checkpoint:
    """Returns the same in block FP8: weights and scales."""
    found: Checkpoint = {}
    for name, tensors in make_unquantized(intermediate).items():
        q, scale = per_block_cast_to_fp8(torch.stack(tensors))
        found[name], found[f"{name}_scale_inv"] = list(q), list(scale)
    return found


def with_biases(checkpoint: Checkpoint, intermediate: int) -> Checkpoint:
    """Returns a checkpoint with bfloat16 biases, which are about as large as the sums that they are added to."""
    gen = torch.Generator().manual_seed(intermediate)
    rows = {"w1": intermediate, "w3": intermediate, "w2": HIDDEN}
    return checkpoint | {
        f"{name}_bias": list(torch.randn(EXPERTS, n, generator=gen).bfloat16()) for name, n in rows.items()
    }


def make_rows(intermediate: int, per_tensor: bool = False) -> Checkpoint:
    """Returns the same in FP8 with a scale for each row, in BF16 as published, or one for each projection."""
    found: Checkpoint = {}
    for name, tensors in make_unquantized(intermediate).items():
        found[name], found[f"{name}_scale"] = [], []
        for tensor in tensors:
            amax = tensor.abs().amax() if per_tensor else tensor.abs().amax(1, keepdim=True)
            scale = amax.float() / FP8_MAX if per_tensor else (amax / FP8_MAX).bfloat16()
            found[name].append((tensor / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8))
            found[f"{name}_scale"].append(scale)
    return found


def with_row_scales(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint of `make_rows` with scales as the kernels read them: float32, one for each row."""
    found = dict(checkpoint)
    for name in (name for name in checkpoint if not name.endswith("_scale")):
        pairs = zip(checkpoint[name], checkpoint[f"{name}_scale"], strict=True)
        found[f"{name}_scale"] = [scale.float().expand(len(weight), 1) for weight, scale in pairs]
    return found


def make_mxfp4(intermediate: int) -> Checkpoint:
    """Returns experts in MXFP4: codes, and exponents that differ within each block."""
    gen = torch.Generator().manual_seed(intermediate)
    found: Checkpoint = {}
    for name, n, k in (("w1", intermediate, HIDDEN), ("w3", intermediate, HIDDEN), ("w2", HIDDEN, intermediate)):
        codes = torch.randint(256, (EXPERTS, n, k // 2), generator=gen, dtype=torch.uint8)
        exponents = torch.randint(113, 121, (EXPERTS, n, k // 32), generator=gen, dtype=torch.uint8)
        found[f"{name}_weight"] = list(codes)
        found[f"{name}_weight_scale"] = list(exponents.view(torch.float8_e8m0fnu))
    return found


def recoded(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint with MXFP4 experts in block FP8; others as they are."""
    found: Checkpoint = {}
    for name, tensors in checkpoint.items():
        if f"{name}_scale" in checkpoint:
            pairs = zip(tensors, checkpoint[f"{name}_scale"], strict=True)
            both = [(None, None) if None in (w, s) else block_fp8(name, w, s) for w, s in pairs]
            found[name], found[f"{name}_scale_inv"] = ([pair[i] for pair in both] for i in (0, 1))
        elif not name.endswith("_scale"):
            found[name] = tensors
    return found
