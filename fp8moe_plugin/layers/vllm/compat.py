"""Where vLLM 0.24 to 0.33 differ from each other, and what is read of vLLM's internals when weights are reloaded.

Nothing else in this package knows a vLLM version.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.v1.worker.worker_base import WorkerBase

MLA_WEIGHTS = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep")  # attributes of vLLM's MLAAttention


def is_layer_skipped(config: Any, prefix: str) -> bool:
    """Whether the checkpoint keeps this layer unquantized.

    How a name is matched is a field of `Fp8Config` since 0.32; before, its default (exact names) was the only way.
    """
    mode = getattr(config, "ignored_layers_match_mode", None)
    extra = {} if mode is None else {"match_mode": mode}
    return quant_utils.is_layer_skipped(prefix, config.ignored_layers, config.packed_modules_mapping, **extra)


def holds_expert(layer: Any, expert: int) -> bool:
    """Whether this rank holds an expert, by its number in the model, of a `RoutedExperts` layer."""
    return layer._map_global_expert_id_to_local_expert_id(expert) != -1


def make_prepare_finalize(moe: Any, quant_config: Any, routing_tables: Any) -> Any:
    """vLLM's dispatch and combine for this parallel configuration. Newer versions ask for the dtype of the inputs."""
    accepted = inspect.signature(maybe_make_prepare_finalize).parameters
    extra = {"input_dtype": moe.in_dtype} if "input_dtype" in accepted else {}
    return maybe_make_prepare_finalize(
        moe=moe,
        quant_config=quant_config,
        routing_tables=routing_tables,
        allow_new_interface=True,
        use_monolithic=False,
        **extra,
    )


def runs_in_workers(ranks: Any) -> bool:
    """Whether the model runs in processes that belong to the engine. An external launcher's are the user's own."""
    backend = ranks.distributed_executor_backend
    return backend == "mp" or ranks.use_ray or (ranks.world_size > 1 and backend != "external_launcher")


def keep_mla_weights(kv_b_proj: Any) -> None:
    """Keep what MLA derives from this layer's weight in one place, so that CUDA graphs read it after a reload too.

    vLLM allocates it anew each time, and its graphs go on reading the memory that it has freed.
    """
    for attention in get_current_vllm_config().compilation_config.static_forward_context.values():
        if getattr(attention, "kv_b_proj", None) is kv_b_proj:
            process = attention.process_weights_after_loading
            attention.process_weights_after_loading = functools.partial(_derive_in_place, attention, process)


def _derive_in_place(attention: Any, process: Callable[[torch.dtype], None], dtype: torch.dtype) -> None:
    served = {name: getattr(attention, name, None) for name in MLA_WEIGHTS}
    process(dtype)
    for name, tensor in served.items():
        if tensor is not None:
            tensor.data.copy_(getattr(attention, name))
            setattr(attention, name, tensor)


def eplb_state(experts: Any) -> Any:
    """The load-balancing state of a `RoutedExperts` layer: where vLLM's router sends the tokens of each expert."""
    runners = get_current_vllm_config().compilation_config.static_forward_context.values()
    (found,) = (runner.router.eplb_state for runner in runners if getattr(runner, "routed_experts", None) is experts)
    return found


def moved_experts(state: Any, places: int) -> bool:
    """Whether load balancing has moved experts from where weights are loaded, among so many places of all ranks."""
    if state.logical_to_physical_map is None:  # the model is still being loaded
        return False
    routed = state.logical_to_physical_map.tolist()
    now = {place: expert for expert, where in enumerate(routed) for place in where if place >= 0}
    start = EplbState.build_initial_global_physical_to_logical_map(len(routed), places - len(routed))
    return now != dict(enumerate(start))


def check_steps(check: Callable[[], None]) -> None:
    """Have the worker that is loading a model call `check` before each step.

    Replayed CUDA graphs and compiled code ask no layer, and compute without an error on parameters without memory.
    """
    frame: FrameType | None = sys._getframe()  # vLLM gives a layer no other way to its worker
    while frame:
        worker = frame.f_locals.get("self")
        if isinstance(worker, WorkerBase):
            worker.execute_model = functools.partial(_check_and_step, check, worker.execute_model)
            return
        frame = frame.f_back


def _check_and_step(check: Callable[[], None], step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    check()
    return step(*args, **kwargs)
