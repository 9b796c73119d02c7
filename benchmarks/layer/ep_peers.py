"""Layers of other libraries under expert parallelism, with dispatch and combine of their own.

`sgl-deep-gemm`: DeepGEMM's kernel for SM90 that does all of the layer ("mega MoE"), and the kernel that quantizes
tokens before it. It compiles with nvcc at its first call.

A kernel that hangs or accesses illegal memory would end the processes that measure it. So `trial` first calls each
peer in child processes. One peer alone:

    torchrun --nproc-per-node 2 -m benchmarks.layer.ep_peers sgl-deep-gemm 256 6 4096 2048 --tokens 8
"""

import argparse
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from fp8moe_plugin.bench.layer import random_routing, random_weights
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.fp8_block import GROUP
from warmup.report import installed

TRIAL_S = 90  # with the start of the process and the compilation
LEAST_CAPACITY = 128  # tokens per rank for which a buffer is made

Weights = Sequence[torch.Tensor]  # of this rank's experts: w13, w13_scale, w2, w2_scale
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]  # x, weights, ids and out of a rank


class MegaMoe:
    """sgl-deep-gemm's layer, whose buffers have room for `tokens` tokens of each rank."""

    def __init__(self, experts: Experts, weights: Weights, tokens: int) -> None:
        import deep_gemm

        self._library = deep_gemm
        w13, w13_scale, w2, w2_scale = weights
        self._weights = deep_gemm.transform_weights_for_mega_moe_sm90((w13, w13_scale), (w2, w2_scale))
        self._buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
            dist.group.WORLD,
            experts.experts,
            max(tokens, LEAST_CAPACITY),
            experts.topk,
            experts.hidden,
            experts.intermediate,
        )
        bounded = "num_tokens_bound" in inspect.signature(deep_gemm.fp8_mega_moe).parameters  # since 0.2.5
        self._bound = {"num_tokens_bound": tokens} if bounded else {}

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        b = self._buffer
        inputs = b.x, b.x_sf, b.topk_idx, b.topk_weights
        self._library.mega_moe_pre_dispatch_sm90(x, ids, weights, *inputs, num_tokens=len(x), group_size=GROUP)
        self._library.fp8_mega_moe(out, *self._weights, b, recipe=(GROUP, GROUP, GROUP), **self._bound)


PEERS: dict[str, Callable[[Experts, Weights, int], Layer]] = {"sgl-deep-gemm": MegaMoe}


def with_version(peer: str) -> str:
    return f"{peer} {installed(peer) or 'is missing'}"


def trial(peer: str, experts: Experts, tokens: int, port: int) -> str | None:
    """Returns why a peer cannot compute a layer, or None. Every rank calls it at the same time.

    Args:
        experts: of all ranks.
        port: a free one, the same on all ranks.
    """
    if installed(peer) is None:
        return f"not installed: pip install {peer}"
    shape = experts.experts, experts.topk, experts.hidden, experts.intermediate
    environment = os.environ | {"MASTER_PORT": str(port)}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the ranks of the trial meet in a store of their own
    command = [sys.executable, "-m", "benchmarks.layer.ep_peers", peer, *map(str, shape), "--tokens", str(tokens)]
    try:
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        return f"the trial took longer than {TRIAL_S} s"
    except subprocess.CalledProcessError as failure:
        errors = [line for line in failure.stderr.splitlines() if "Error" in line]
        message = textwrap.shorten(errors[-1] if errors else failure.stderr[-300:], 300)
        return f"the trial failed with status {failure.returncode}: {message}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Call a peer's layer once.")
    parser.add_argument("peer", choices=PEERS)
    for size in ("experts", "topk", "hidden", "intermediate"):
        parser.add_argument(size, type=int)
    parser.add_argument("--tokens", type=int, required=True, help="of each rank")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    experts = Experts(1, options.experts, options.topk, options.hidden, options.intermediate)
    share = Experts(1, options.experts // dist.get_world_size(), options.topk, options.hidden, options.intermediate)
    weights = random_weights(share, device)
    layer = PEERS[options.peer](experts, (*weights.w13, *weights.w2), options.tokens)
    gen = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(options.tokens, experts.hidden, generator=gen, device=device).bfloat16()
    call = partial(layer, x, *random_routing(gen, options.tokens, experts), out := torch.full_like(x, float("nan")))
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    if not out.isfinite().all():
        raise ArithmeticError("the result has infinities or NaN")
    print(f"{with_version(options.peer)}: rank {dist.get_rank()} has computed {options.tokens} tokens", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
