"""Makes this process one rank of an SGLang engine, as far as its layers need it, without an engine."""

from typing import Any

import torch
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.moe.utils import initialize_moe_config

from benchmarks.engine.serve_demo import free_port


def start(args: Any) -> None:
    """Publish the `ServerArgs`, and set up the groups of one rank. Once per process."""
    try:  # SGLang 0.5.20
        from sglang.srt.runtime_context import SpawnRanks, publish
    except ImportError:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
    else:
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    backend = "nccl" if args.device == "cuda" else "gloo"
    if args.device == "cuda":
        torch.cuda.set_device(0)
    address = f"tcp://127.0.0.1:{free_port()}"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend=backend, distributed_init_method=address)
    try:
        initialize_model_parallel(backend=backend)
    except TypeError:  # before SGLang 0.5.20
        initialize_model_parallel(1, 1, 1, backend=backend)
    try:
        initialize_moe_config()
    except TypeError:
        initialize_moe_config(args)
