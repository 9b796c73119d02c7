"""Measures the thresholds of `GpuTuning` on a GPU: `fp8moe-warmup tune`.

For each threshold, the steps of some layers are timed with every plan that its values lead to, one after the other in
CUDA graphs that are replayed in turns. A value replaces the default if the steps whose plans it changes gain, and none
loses. Then these steps are timed again, beside the defaults.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp, fsum, log
from typing import NamedTuple

import torch

from fp8moe_plugin.bench.layer import CASTS, random_step, random_weights
from fp8moe_plugin.bench.machine import check_gpu
from fp8moe_plugin.bench.packed import packed, random_mxfp4
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.sm90 import Sm90
from fp8moe_plugin.launches.tuning_file import TunedStep
from fp8moe_plugin.ops.devices import Device, Gpu
from fp8moe_plugin.ops.moe import prepared_layer
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.ops.signature import addresses_of
from fp8moe_plugin.ops.workspace import scratch
from fp8moe_plugin.plan.gpu_tuning import GpuTuning
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from fp8moe_plugin.testing import Call, captured, replay_us

NOISE = 0.01  # of the times; a threshold changes for gains above it, and for no loss above it
LAYERS = {
    "DeepSeek-V3": LayerSpec(MoeShape(8, 7168, 2048, 256, 256)),
    "DeepSeek-V3 --tp 8": LayerSpec(MoeShape(8, 7168, 256, 256, 256)),
    "Qwen3-30B-A3B": LayerSpec(MoeShape(8, 2048, 768, 128, 128)),
    "DeepSeek-V4-Flash in MXFP4": LayerSpec(MoeShape(6, 4096, 2048, 256, 256), PACKED_MXFP4),
    "DeepSeek-V4-Flash in MXFP4 --tp 8": LayerSpec(MoeShape(6, 4096, 256, 256, 256), PACKED_MXFP4),
}

# Microseconds of each of some plans of a step, given the layer's name and the number of tokens.
Clock = Callable[[str, int, Sequence[Plan]], list[float]]


class Threshold(NamedTuple):
    """A field of `GpuTuning`, the values that are tried, and the steps that are timed.

    Each value changes steps of some length; some of each length are among those that are timed.
    """

    field: str
    values: tuple[int, ...]  # the default is one of them
    tokens: tuple[int, ...] = ()
    rows_per_expert: tuple[int, ...] = ()

    def steps(self, shape: MoeShape) -> list[int]:
        """Returns the numbers of tokens of the steps."""
        return [*self.tokens, *(rows * shape.global_experts // shape.topk for rows in self.rows_per_expert)]


BYTES = tuple(mib << 20 for mib in (0, 64, 128, 256, 320, 512, 768, 1024, 2048, 4096, 8192))
FEW_TOKENS = (1, 2, 4, 8, 12, 16)
ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 60, 66, 96, 128)
THRESHOLDS = (
    Threshold("spare_multiprocessors", (0, 8, 16, 24), tokens=(4, 8, 12, 16)),
    Threshold("small_batch_bytes", BYTES, tokens=FEW_TOKENS),
    Threshold("packed_small_batch_bytes", BYTES, tokens=(1, 2, 4, 8)),
    Threshold("few_rows_per_expert", (0, *ROWS), FEW_TOKENS, rows_per_expert=ROWS),
    Threshold("packed_few_rows_per_expert", (0, *ROWS), FEW_TOKENS, rows_per_expert=ROWS),
    Threshold("early_below", (64, 96, 192, 384, 768), rows_per_expert=(64, 128, 256, 512)),
)


class Tuned(NamedTuple):
    tuning: GpuTuning
    steps: int  # that were timed
    changed: list[TunedStep]


def tune(
    specs: Mapping[str, LayerSpec],
    multiprocessors: int,
    default: GpuTuning,
    clock: Clock,
    report_progress: Callable[[str], None],
) -> Tuned:
    """Returns the fastest thresholds for these layers.

    Args:
        specs: by the names of the layers.
        multiprocessors, default: of the GPU.
        report_progress: called with one line per threshold.
    """
    tuning, timed = default, set[tuple[str, int]]()

    def noting_clock(name: str, tokens: int, plans: Sequence[Plan]) -> list[float]:
        timed.add((name, tokens))
        return clock(name, tokens, plans)

    for threshold in THRESHOLDS:
        value = _fastest(threshold, tuning, specs, multiprocessors, noting_clock)
        tuning = replace(tuning, **{threshold.field: value})
        report_progress(f"{threshold.field}: {value}")
    changed = []
    for name, tokens in sorted(timed):
        plans = [Sm90(each).plan_layer(specs[name], tokens, multiprocessors) for each in (default, tuning)]
        if plans[0].choices != plans[1].choices:
            default_us, us = clock(name, tokens, plans)
            changed.append(TunedStep(layer=name, tokens=tokens, default_us=round(default_us, 2), us=round(us, 2)))
    return Tuned(tuning, len(timed), changed)


def _fastest(
    threshold: Threshold, tuning: GpuTuning, specs: Mapping[str, LayerSpec], multiprocessors: int, clock: Clock
) -> int:
    """Returns the fastest value of a threshold, or the present one, unless another one gains and does not lose."""
    present: int = getattr(tuning, threshold.field)
    backends = {value: Sm90(replace(tuning, **{threshold.field: value})) for value in threshold.values}
    changes: dict[int, list[float]] = {value: [] for value in backends}  # log of the time over that of the present
    for name, spec in specs.items():
        for tokens in threshold.steps(spec.shape):
            plans = {value: each.plan_layer(spec, tokens, multiprocessors) for value, each in backends.items()}
            distinct = {plan.choices: plan for plan in plans.values()}
            if len(distinct) == 1:
                continue
            us = dict(zip(distinct, clock(name, tokens, list(distinct.values())), strict=True))
            for value, plan in plans.items():
                if plan.choices != plans[present].choices:
                    changes[value].append(log(us[plan.choices] / us[plans[present].choices]))
    gaining = [value for value, found in changes.items() if found and _gains(found)]
    return min(gaining, key=lambda value: fsum(changes[value]), default=present)


def _gains(changes: list[float]) -> bool:
    return max(changes) <= log(1 + NOISE) and exp(fsum(changes) / len(changes)) < 1 - NOISE


class GpuClock:
    """Times plans of the SM90 kernels on the current GPU, in layers with random weights."""

    def __init__(self, specs: Mapping[str, LayerSpec]) -> None:
        """
        Args:
            specs: of the layers on one rank, without biases.
        Raises:
            UnsupportedError: this is no Hopper GPU.
        """
        check_gpu()
        device = torch.device("cuda", torch.cuda.current_device())
        gpu = torch.cuda.get_device_properties(device)
        self.gpu, self.multiprocessors, self.specs = gpu.name, gpu.multi_processor_count, specs
        self._device = Gpu(device.index, self.multiprocessors)
        self._layers = {name: drawn_layer(spec, device) for name, spec in specs.items()}

    def __call__(self, name: str, tokens: int, plans: Sequence[Plan]) -> list[float]:
        experts, weights = self._layers[name]
        x, routings = random_step(experts, tokens, weights.w13[0].device)
        calls = [layer_calls(self._device, plan, weights, x, torch.empty_like(x), routings) for plan in plans]
        us = replay_us({str(i): captured(each) for i, each in enumerate(calls)})
        return [us[str(i)] / len(routings) for i in range(len(plans))]


def drawn_layer(spec: LayerSpec, device: torch.device) -> tuple[Experts, ExpertWeights]:
    """Returns a layer and random weights for it."""
    topk, hidden, intermediate, local_experts, _ = spec.shape
    experts = Experts(1, local_experts, topk, hidden, intermediate)
    if spec.weights is PACKED_MXFP4:
        return experts, packed(random_mxfp4(experts, device))
    return experts, random_weights(experts, device, CASTS[spec.weights])


def layer_calls(
    device: Device,
    plan: Plan,
    weights: ExpertWeights,
    x: torch.Tensor,
    out: torch.Tensor,
    routings: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[Call]:
    """Returns calls of a layer by this plan, one for each routing, which share `out` and scratch memory."""
    run, memory = prepared_layer(device, plan, ids_64=False, mapped=False), scratch(plan.scratch, x)

    def call(topk_weights: torch.Tensor, ids: torch.Tensor) -> None:
        layer = *weights.w13, *weights.w2, None, None
        run(addresses_of((x, None, *layer, topk_weights, ids, None, out, memory)))  # LayerAddresses

    return [partial(call, *routing) for routing in routings]
