"""Experts in MXFP4, re-encoded to block FP8 while they are loaded. No bit is lost.

The scale of a 128x128 block puts its largest exponent at 2^6, since e2m1's largest value, 6 * 2^6, is below e4m3's 448.
The smallest value of a group whose exponent is `SPAN` lower, 0.5 * 2^(6 - SPAN), is e4m3's smallest, 2^-9. Groups of 32
whose codes are all zero have no exponent.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from fp8moe_plugin.checkpoint.shapes import Experts, experts_bytes
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.spec import WEIGHT
from fp8moe_plugin.formats.weight_format import Role, ceil_div
from fp8moe_plugin.layers.arrivals import and_others
from fp8moe_plugin.layers.parameters import empty_pair
from fp8moe_plugin.layers.weights import LARGEST_SCALE, check_scale_values
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.fp4_blocks import E2M1, EXPONENTS, LARGEST_EXPONENT, SPAN, BelowLargest, Fp4Blocks, Range, bases
from fp8moe_plugin.ops.tables import table

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

HIGHEST_EXPONENT = int(math.log2(LARGEST_SCALE)) + 127
HALVES_ON_DEVICE = 3  # an expert has three projections


def on_one_thread(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function whose operations of torch on the host run on this thread alone, such as looks at exponents.

    They are too short to be shared: each would wait for all threads, which a busy or limited host does not run at once.
    That takes 10 ms instead of 10 us. A thread that first uses torch meanwhile stays without others.
    """

    @functools.wraps(call)
    def call_on_one_thread(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        threads = torch.get_num_threads()
        if threads == 1:
            return call(*args, **kwargs)
        torch.set_num_threads(1)
        try:
            return call(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return call_on_one_thread


def block_fp8(
    name: str, codes: torch.Tensor, exponents: torch.Tensor, most: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns an MXFP4 weight in block FP8.

    Args:
        name: the weight's name, for messages.
        codes: uint8 `[N, K/2]`.
        exponents: float8_e8m0fnu `[N, K/32]`, on any device.
        most: by how much they differ at most, if they are checked.
    Returns:
        e4m3 `[N, K]` and float32 scales `[ceil(N/128), ceil(K/128)]`, whose product is exactly the weight.
    Raises:
        CheckpointError: an exponent is NaN or too large.
        UnsupportedError: the exponents of a block differ by more than `SPAN`.
    """
    n, k = codes.shape[0], 2 * codes.shape[1]
    if not codes.numel():  # of a rank without channels
        return empty_pair(FP8_BLOCK, n, k, codes.device)
    most = check_exponents(name, exponents).span if most is None else most
    blocks = Fp4Blocks.of(codes, to_device(exponents, codes.device))
    below, largest, span = BelowLargest.of(blocks, most)
    if span > SPAN:
        spans = below.amax((1, 3))
        raise UnsupportedError(
            f"{name}: in {int((spans > SPAN).sum())} of {spans.numel()} {GROUP}x{GROUP} blocks the exponents differ by "
            f"more than {SPAN}, by up to {span}, so that block FP8 does not represent them exactly. Unset "
            "FP8MOE_FP4_EXPERTS: the experts then stay in MXFP4."
        )
    # int32, which index_select takes as it is
    index = torch.add(blocks.codes.unflatten(-1, (EXPONENTS, -1)), below.int()[..., None], alpha=256)
    q = _pairs(codes.device).index_select(0, index.flatten()).view(FP8).view(GROUP * len(index), -1)
    return q[:n, :k].contiguous(), bases(largest)


@on_one_thread
def check_exponents(name: str, exponents: torch.Tensor) -> Range:
    """Returns the least and the largest exponent of a weight, also of codes that are all zero.

    They are found where they are: on the host if the engine has read them from a file, so nothing waits for the GPU.

    Args:
        name: the weight's name, for messages.
    Raises:
        CheckpointError: an exponent is NaN or too large.
    """
    if not exponents.numel():  # of a rank without channels
        return Range(0, 0)
    lowest, highest = torch.stack(exponents.view(torch.uint8).aminmax()).tolist()
    if highest > HIGHEST_EXPONENT:
        check_scale_values(f"the scales of {name}", exponents.view(torch.float8_e8m0fnu))
    return Range(lowest, highest)


@on_one_thread
def to_device(tensor: torch.Tensor, device: torch.device, *, copy: bool = False) -> torch.Tensor:
    """Returns a tensor on a device. The copy has read it when this returns, and can be read there.

    Args:
        copy: also of a tensor that is there already.
    """
    return tensor.to(device, copy=copy, non_blocking=copies_early(tensor, device))


def copies_early(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a copy may return before it has ended: CUDA first copies host memory that is not pinned to its own."""
    return tensor.is_cpu and device.type == "cuda" and not tensor.is_pinned()


def check_memory(experts: Experts, local: Experts, memory: int) -> None:
    """Check that a GPU can hold its part of a model's experts in block FP8.

    Args:
        experts: those of the model.
        local: those of a rank, of as many layers as every stage has.
        memory: bytes of a GPU.
    Raises:
        UnsupportedError: these weights alone are larger.
    """
    whole, part = (experts_bytes(each, FP8_BLOCK) for each in (experts, local))
    if part > memory:
        raise UnsupportedError(
            f"The model's experts are in {MXFP4.name}, and become block FP8 while they are loaded, {whole / 1e9:.1f} "
            f"GB in all. A GPU of {memory / 1e9:.1f} GB would have to hold {part / 1e9:.1f} GB of them. Unset "
            f"FP8MOE_FP4_EXPERTS, so that they stay in {MXFP4.name}, or use at least {ceil_div(whole, memory)} GPUs "
            "(`fp8moe-warmup explain --gpu` shows the splits that fit)."
        )


@table
def _pairs(device: torch.device) -> torch.Tensor:
    """Returns int16 `[(SPAN + 1) * 256]`: two e4m3 values, by how far their exponent is below the largest and codes."""
    positive = torch.tensor(E2M1)
    values = torch.cat([positive, -positive]) * torch.exp2(LARGEST_EXPONENT - torch.arange(SPAN + 1.0))[:, None]
    e4m3 = values.to(FP8).view(torch.uint8)
    byte = torch.arange(256)
    both = torch.stack([e4m3[:, byte % 16], e4m3[:, byte // 16]], -1)
    return both.view(torch.int16).flatten().to(device)


@dataclass
class Halves:
    """The tensors of a model's projections that wait for the projection's weight or scales.

    Both must arrive in the same load. A half that a load leaves behind would be combined with the other half of the
    next one, so the engines' states check or clear them where a load ends.
    """

    waiting: dict[str, tuple[Role, torch.Tensor]] = field(default_factory=dict)  # by projection, as in `Arrivals`

    def clear(self, layer: str = "") -> None:
        """Forget the tensors of a layer, or of all."""
        self.waiting = {name: half for name, half in self.waiting.items() if not name.startswith(layer)}

    def check(self, layer: str = "") -> None:
        """Check that no half of a layer, or of all, waits; forget those that do.

        Raises:
            CheckpointError: codes have arrived without exponents, or exponents without codes.
        """
        alone = [(name, role) for name, (role, _) in self.waiting.items() if name.startswith(layer)]
        self.clear(layer)
        for name, role in alone:
            raise CheckpointError(
                f"{name}: {role} in MXFP4 arrived without the {role.other}, or once more after "
                f"both{and_others(len(alone) - 1)}. A load must bring both exactly once."
            )

    @on_one_thread
    def add(
        self,
        projection: str,
        role: Role,
        tensor: torch.Tensor,
        device: torch.device,
        *,
        stays: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns codes on a device and exponents where they arrived, once both have arrived.

        Until then a copy is kept, as the tensor may be overwritten. Codes wait on the device, unless as many halves
        wait as an expert has, because a checkpoint may have all codes of a model before all exponents.

        Args:
            stays: the tensor is not overwritten while it waits, so it is no copy that waits.
        """
        before = self.waiting.pop(projection, None)
        if before is None or before[0] is role:
            crowded = len(self.waiting) >= HALVES_ON_DEVICE
            own = device if role is Role.WEIGHT else tensor.device
            kept = tensor if stays else to_device(tensor, torch.device("cpu") if crowded else own, copy=True)
            self.waiting[projection] = role, kept
            return None
        if role is Role.WEIGHT:
            return to_device(tensor, device), before[1]
        return to_device(before[1], device), tensor


def targets(layer: Any, shard_id: str, weight_name: str, scale: str) -> list[tuple[torch.Tensor, str]]:
    """Returns the parameters of the weight and of the scales of a projection, with the names for the engine's loader.

    Args:
        shard_id: "w1", "w2" or "w3".
        weight_name: the name that the engine gives to either of them.
        scale: the suffix of scales' names.
    """
    part, stem = "w2" if shard_id == "w2" else "w13", weight_name.removesuffix(scale).removesuffix(WEIGHT)
    return [(getattr(layer, f"{part}_{suffix}"), stem + suffix) for suffix in (WEIGHT, scale)]
