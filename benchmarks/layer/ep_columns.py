"""A layer whose experts are on several GPUs of one host, by the ways in which tokens reach the experts and come back.

Each way is a column of `benchmarks.layer.ep_layer`.
"""

import faulthandler
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from benchmarks.layer.before_after import FusedMoe
from benchmarks.layer.ep_peers import PEERS
from fp8moe_plugin.bench.layer import random_routing, random_weights
from fp8moe_plugin.bench.packed import packed, random_mxfp4
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.layers.kernels import kernels_backend
from fp8moe_plugin.layers.window import open_group_window, window_refusal
from fp8moe_plugin.ops import fused_moe, per_token_group_quant_fp8
from fp8moe_plugin.ops.push import push_moe
from fp8moe_plugin.ops.window import Window

COLUMNS = ("layer", "nccl", "nccl_comm", "nccl_fp8", "nccl_fp8_comm", "push")
BEFORE = "nccl_before"  # `nccl` around the layer of another version of the package
PATIENCE_S = 20  # that a rank waits for another, in a kernel or at the end

T = TypeVar("T")
Call = Callable[[], object]


class Batch(NamedTuple):
    """The tokens of this rank."""

    x: torch.Tensor  # bfloat16 [T, H]
    weights: torch.Tensor  # float32 [T, topk]
    ids: torch.Tensor  # int32 [T, topk], of all experts


class Calls(NamedTuple):
    """The calls of a column, one for each batch, and what they write."""

    calls: list[Call]
    outs: list[torch.Tensor]


class Group:
    """The processes that torchrun has started, one for each GPU."""

    def __init__(self, device: str) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device == "cuda":
            self.device = torch.device(device, int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", device_id=self.device)
        else:
            self.device = torch.device(device)
            dist.init_process_group("gloo")
        self.cpu = dist.new_group(backend="gloo")

    def all(self, value: T) -> list[T]:
        """Returns the value of each rank."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, self.cpu)
        return values

    def together(self, step: Callable[[], T]) -> T:
        """Returns what a step returns that every rank takes. If it fails on one rank, it raises on all."""
        found: list[T] = []
        error = None
        try:
            found.append(step())
            self.synchronize()
        except Exception as failure:  # noqa: BLE001 (raised below, on every rank)
            error = f"{type(failure).__name__}: {failure}"
        for rank, of_rank in enumerate(self.all(error)):
            if of_rank is not None:
                raise RuntimeError(f"rank {rank}: {of_rank}")
        return found[0]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """End the process group, once no rank has a CUDA graph or shared memory left.

        NCCL waits until the last graph with its collectives is destroyed. A rank that waits too long prints where.
        """
        gc.collect()
        self.synchronize()
        dist.barrier(self.cpu)
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        dist.destroy_process_group()

    def gathered(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Returns each tensor of all ranks. The all-gathers are one NCCL group, as in vLLM's default all-to-all."""
        outs = [tensor.new_empty(self.ranks * len(tensor), *tensor.shape[1:]) for tensor in tensors]
        with _coalescing_manager():
            for out, tensor in zip(outs, tensors, strict=True):  # as bytes: gloo mixes up several dtypes
                dist.all_gather_into_tensor(out.view(torch.uint8), tensor.view(torch.uint8))
        return outs


class Layer:
    """A layer's experts: those of this rank, and all of them, which are the same on every rank."""

    def __init__(
        self,
        group: Group,
        experts: Experts,
        most_rows: int,
        stored: WeightFormat = FP8_BLOCK,
        before: FusedMoe | None = None,
    ) -> None:
        if experts.experts % group.ranks:
            raise UnsupportedError(
                f"{experts.experts} experts are not divisible by {group.ranks} ranks. Use 2, 4 or 8."
            )
        self.group, self.experts, self._most_rows, self.stored = group, experts, most_rows, stored
        self._before = before  # fused_moe of another version
        device, local = group.device, experts.experts // group.ranks
        weights = random_weights(experts, device) if stored is FP8_BLOCK else packed(random_mxfp4(experts, device))
        first = group.rank * local
        self.all_weights = *weights.w13, *weights.w2
        self.weights = [tensor[first : first + local] for tensor in self.all_weights]
        ids = torch.arange(experts.experts, dtype=torch.int32, device=group.device)
        self.owners = ids // local
        self.expert_map = torch.where(self.owners == group.rank, ids - first, -1)

    @cached_property
    def window(self) -> Window:
        group, experts = self.group, self.experts
        tuning = kernels_backend(self.owners).tuning
        if refusal := window_refusal(group.cpu, experts.hidden, group.device, tuning):
            raise UnsupportedError(f"push needs GPUs that reach each other's memory. There is {refusal}.")
        sizes = self._most_rows, experts.hidden, experts.topk, experts.experts
        return open_group_window(dist.group.WORLD, group.cpu, *sizes, group.device, PATIENCE_S)

    def random_batch(self, tokens: int, seed: int) -> Batch:
        group = self.group
        gen = torch.Generator(group.device).manual_seed(seed * group.ranks + group.rank)
        x = torch.randn(tokens, self.experts.hidden, generator=gen, device=group.device).bfloat16()
        return Batch(x, *random_routing(gen, tokens, self.experts))

    def local(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, **scale: Any) -> None:
        """Write what this rank's experts contribute to the tokens of all ranks."""
        fused_moe(x, *self.weights, weights, ids, expert_map=self.expert_map, weights=self.stored, out=out, **scale)

    def local_before(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        """The same by another version of the package, which may know no formats."""
        if self.stored is not FP8_BLOCK:
            raise UnsupportedError("The version before is measured with weights in block FP8 only.")
        assert self._before
        self._before(x, *self.weights, weights, ids, expert_map=self.expert_map, out=out)


@dataclass(frozen=True)
class Cell:
    """Batches of up to `rows` tokens on each rank. Only `push` may have fewer on some of them."""

    layer: Layer
    rows: int
    batches: list[Batch]

    def column(self, name: str) -> Calls:
        """Returns the calls of a column or of a peer. Every rank calls it at the same time."""
        outs = [torch.empty_like(batch.x) for batch in self.batches]
        if name == "layer":
            return self._gathered()
        if name == "push":
            return self._calls(self._push, outs)
        if name in PEERS:
            return self._calls(PEERS[name](self.layer.experts, self.layer.weights, self.rows), outs)
        if name.endswith("_comm"):
            return Calls(self._calls(Nccl(self.layer, self.rows, name == "nccl_fp8_comm", None), outs).calls, [])
        local = self.layer.local_before if name == BEFORE else self.layer.local
        return self._calls(Nccl(self.layer, self.rows, name == "nccl_fp8", local), outs)

    def expected(self) -> torch.Tensor:
        """Returns the results of the first batch by one rank with all experts."""
        x, weights, ids = self.batches[0]
        return fused_moe(x, *self.layer.all_weights, weights, ids, weights=self.layer.stored)

    def _calls(self, run: Callable[..., object], outs: list[torch.Tensor]) -> Calls:
        return Calls([partial(run, *batch, out) for batch, out in zip(self.batches, outs, strict=True)], outs)

    def _gathered(self) -> Calls:
        batches = [self.layer.group.gathered(*batch) for batch in self.batches]
        outs = [torch.empty_like(x) for x, *_ in batches]
        return Calls([partial(self.layer.local, *of_all, out) for of_all, out in zip(batches, outs, strict=True)], outs)

    def _push(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        layer = self.layer
        tensors = x, *layer.weights, weights, ids, layer.expert_map
        push_moe(layer.window, layer.owners, self.rows, *tensors, weights=layer.stored, out=out)


class Nccl:
    """What a rank computes between an all-gather of tokens and a reduce-scatter of sums, or only these two."""

    def __init__(self, layer: Layer, tokens: int, quantized: bool, local: Callable[..., None] | None) -> None:
        self._layer, self._quantized, self._local = layer, quantized, local
        shape = layer.group.ranks * tokens, layer.experts.hidden
        self._sums = torch.zeros(shape, dtype=torch.bfloat16, device=layer.group.device)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        gathered = self._layer.group.gathered
        if self._quantized:
            x, scale = per_token_group_quant_fp8(x)
            x, weights, ids, scale = gathered(x, weights, ids, scale.contiguous())  # row-major
            scales = {"hidden_scale": scale}
        else:
            (x, weights, ids), scales = gathered(x, weights, ids), {}
        if self._local:
            self._local(x, weights, ids, self._sums, **scales)
        dist.reduce_scatter_tensor(out, self._sums)
