"""Experts in MXFP4 that stay in MXFP4, as checkpoints of them and as the parameters of both engines hold them."""

import torch

from fp8moe_plugin.ops.mxfp4 import dequantize
from tests.layers.experts import EXPERTS, Checkpoint
from tests.layers.test_recode import dequantized


def wide(checkpoint: Checkpoint, expert: int, *shards: str) -> Checkpoint:
    """Returns a checkpoint in which a block of an expert spans 30 binades; it has further groups of small exponents."""
    found = {name: [tensor.clone() for tensor in tensors] for name, tensors in checkpoint.items()}
    for shard in shards:
        exponents_of(found, shard)[expert].view(torch.uint8)[3::40, 2] = 90
    return found


def exponents_of(checkpoint: Checkpoint, shard: str) -> list[torch.Tensor]:
    (found,) = (tensors for name, tensors in checkpoint.items() if name.startswith(f"{shard}_weight_scale"))
    return found


def weights_of(layer: torch.nn.Module, expert: int) -> dict[str, torch.Tensor]:
    """Returns the exact weights of the projections."""
    w13, w2 = (
        [getattr(layer, f"{name}_{kind}")[expert] for kind in ("weight", layer.quant_method.scale)]
        for name in ("w13", "w2")
    )
    w1, w3 = dequantize(*w13, gate_up=True).chunk(2)
    return {"w1": w1, "w3": w3, "w2": dequantize(*w2, gate_up=False)}


def wanted_of(checkpoint: Checkpoint, expert: int) -> dict[str, torch.Tensor]:
    return {
        shard: dequantized(
            checkpoint[f"{shard}_weight"][expert], exponents_of(checkpoint, shard)[expert].view(torch.uint8)
        )
        for shard in ("w1", "w3", "w2")
    }


def part_of(checkpoint: Checkpoint, expert: int, rank: int, part: int, ranks: int) -> dict[str, torch.Tensor]:
    """Returns a rank's part of the weights, of `part` intermediate channels, of which the last may be padding."""
    wanted, here = wanted_of(checkpoint, expert), slice(rank * part, (rank + 1) * part)
    padding = 0, ranks * part - len(wanted["w1"])
    found = {name: torch.nn.functional.pad(wanted[name], (0, 0, *padding))[here] for name in ("w1", "w3")}
    return found | {"w2": torch.nn.functional.pad(wanted["w2"], padding)[:, here]}


def assert_holds(
    layer: torch.nn.Module, checkpoint: Checkpoint, slots: tuple[int, ...] = tuple(range(EXPERTS))
) -> None:
    for slot, expert in enumerate(slots):
        assert_equal(weights_of(layer, slot), wanted_of(checkpoint, expert))


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, weight in wanted.items():
        assert torch.equal(found[name].double(), weight), name
