"""Differences between vLLM 0.24 and 0.33, and every use of vLLM's internals that is not an interface for plugins.

The other modules import only vLLM's classes that a quantization method derives from or compares with.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.router import fused_topk_router
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.model_executor.model_loader.reload import layerwise
from vllm.utils import deep_gemm
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.worker.worker_base import WorkerBase

Replacement = Callable[[Callable[..., torch.Tensor] | None], Callable[..., torch.Tensor]]  # see replace_deep_gemm

MLA_WEIGHTS = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep")  # attributes of vLLM's MLAAttention


def is_layer_skipped(config: Any, prefix: str) -> bool:
    """Returns whether the checkpoint keeps this layer unquantized.

    Since vLLM 0.32, a field of `Fp8Config` selects how names are matched. Older versions require equal names.
    """
    mode = getattr(config, "ignored_layers_match_mode", None)
    extra = {} if mode is None else {"match_mode": mode}
    return quant_utils.is_layer_skipped(prefix, config.ignored_layers, config.packed_modules_mapping, **extra)


def local_expert(layer: Any, expert: int) -> int | None:
    """Returns the local index of an expert of a `RoutedExperts` layer, or None if it is on another rank."""
    local: int = layer._map_global_expert_id_to_local_expert_id(expert)
    return None if local == -1 else local


def make_prepare_finalize(moe: Any, quant_config: Any, routing_tables: Any) -> Any:
    """Returns vLLM's dispatch and combine for this configuration. Newer versions need the dtype of the inputs."""
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
    """Returns whether the model runs in worker processes of the engine, not in those of an external launcher."""
    backend = ranks.distributed_executor_backend
    return backend == "mp" or ranks.use_ray or (ranks.world_size > 1 and backend != "external_launcher")


def is_only_rank(ranks: Any) -> bool:
    """Returns whether the whole model runs in one process."""
    return ranks.world_size == 1 and ranks.data_parallel_size == 1


def keep_mla_weights(engine: Any) -> None:
    """Keep the tensors that vLLM's MLA layers derive from weights at the same addresses when it derives them again.

    Some versions allocate new ones, but captured CUDA graphs keep reading the old addresses.
    """
    for attention in _mla_layers(engine):
        if "process_weights_after_loading" not in vars(attention):
            process = attention.process_weights_after_loading
            attention.process_weights_after_loading = functools.partial(_derive_in_place, attention, process)


def derive_mla_weights(engine: Any) -> None:
    """Make vLLM's MLA layers derive their tensors again from weights that were loaded in place."""
    keep_mla_weights(engine)
    for attention in _mla_layers(engine):
        with torch.inference_mode(), set_current_vllm_config(engine):
            attention.process_weights_after_loading(engine.model_config.dtype)


def _mla_layers(engine: Any) -> list[Any]:
    """Returns the MLA layers that have derived tensors from a `kv_b_proj`."""
    layers = engine.compilation_config.static_forward_context.values() if engine else ()
    return [layer for layer in layers if any(getattr(layer, name, None) is not None for name in MLA_WEIGHTS)]


def _derive_in_place(attention: Any, process: Callable[[torch.dtype], None], dtype: torch.dtype) -> None:
    old = {name: getattr(attention, name, None) for name in MLA_WEIGHTS}
    process(dtype)
    for name, tensor in old.items():
        if tensor is not None:
            tensor.data.copy_(getattr(attention, name))
            setattr(attention, name, tensor)


def eplb_state(experts: Any) -> Any:
    """Returns the load-balancing state of a `RoutedExperts` layer, which maps experts to physical slots."""
    return runner_of(experts).router.eplb_state


def runner_of(experts: Any) -> Any:
    """Returns the `MoERunner` of a `RoutedExperts` layer."""
    runners = get_current_vllm_config().compilation_config.static_forward_context.values()
    (found,) = (runner for runner in runners if getattr(runner, "routed_experts", None) is experts)
    return found


def called_gate(runner: Any) -> Any:
    """Returns the gate whose method each step of a `MoERunner` calls, or None.

    vLLM does not call the method if it fuses the gate with that of a shared expert, or has its own kernels for it.
    """
    gate = runner.gate
    if getattr(runner, "_fse_fuse_gate", False) or getattr(gate, "out_dtype", None) == torch.float32:
        return None
    own = ("allow_dsv3_router_gemm", "allow_fp32_router_gemm", "allow_ll_bf16_gemm")  # in some versions of vLLM
    return None if any(getattr(gate, name, False) for name in own) else gate


def returns_routed_experts() -> bool:
    """Returns whether vLLM reports the experts that its routers chose for each token."""
    config = get_current_vllm_config()
    places = config.model_config, getattr(config, "aux_output_config", None)  # of older and of newer versions
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)


def padding_of(tokens: int) -> torch.Tensor | None:
    """Returns bool `[tokens]`: the tokens that only pad a CUDA graph, for which vLLM's router chooses no experts.

    Returns None for older versions of vLLM, whose router does not distinguish them.
    """
    mask = getattr(fused_topk_router, "_get_padding_mask", None)
    return mask(tokens) if mask else None


def shared_mlp(runner: Any) -> Any:
    """Returns the shared expert that a `MoERunner` adds to its experts as it is, or None."""
    changed = runner.routed_input_transform, runner.routed_output_transform, runner.shared_expert_gate
    if type(runner) is not MoERunner or runner.shared_experts is None or any(part is not None for part in changed):
        return None
    return runner.shared_experts._layer


def take_shared_expert(runner: Any) -> float:
    """Make a `MoERunner` return the result of its experts as it is, without its shared expert and its scale.

    Must be called before the model is compiled. Returns the scale, which the experts then have to apply.
    """
    scale = runner.routed_scaling_factor
    runner.routed_scaling_factor, runner._shared_experts = 1.0, None
    runner._forward_entry = runner._select_forward()
    return scale


def can_merge_parameters() -> bool:
    """Returns whether parameters keep their addresses (they are not offloaded) and compiled code can be marked."""
    engine = get_current_vllm_config()
    offloads = engine.offload_config.uva.cpu_offload_gb or engine.offload_config.prefetch.offload_group_size
    return not offloads and isinstance(engine.additional_config, dict)


def mark_compiled_code(mark: str) -> None:
    """Keep vLLM from loading code that was compiled and cached without this mark: its key covers this dictionary."""
    get_current_vllm_config().additional_config[mark] = True


def experts_have_moved(state: Any, slots: int) -> bool:
    """Returns whether load balancing has moved experts away from the physical slots that weights are loaded into.

    Args:
        slots: physical slots of all ranks, including slots of redundant experts.
    """
    if state.logical_to_physical_map is None:  # the model is still being loaded
        return False
    slots_of_experts = state.logical_to_physical_map.tolist()
    current = {slot: expert for expert, used in enumerate(slots_of_experts) for slot in used if slot >= 0}
    redundant = slots - len(slots_of_experts)
    initial = EplbState.build_initial_global_physical_to_logical_map(len(slots_of_experts), redundant)
    return current != dict(enumerate(initial))


def replace_deep_gemm(**replacements: Replacement) -> None:
    """Replace functions of DeepGEMM, by their names in vLLM's module, which vLLM calls with DeepGEMM's signatures.

    Each argument takes the function that vLLM would call, DeepGEMM's or None, and returns the one to call instead. vLLM
    looks up DeepGEMM's functions all at once, unless one is set, so the lookup runs first.
    """
    deep_gemm._lazy_init()
    for name, replacement in replacements.items():
        variable = f"_{name}_impl"
        setattr(deep_gemm, variable, replacement(getattr(deep_gemm, variable)))


def expect_no_deep_gemm() -> None:
    """Make vLLM's indexers run without DeepGEMM, which they would refuse."""
    for module in (sparse_attn_indexer, indexer):
        module.has_deep_gemm = lambda: True


def share_num_sms(ours: Callable[[int], None]) -> None:
    """Make vLLM's dual-batch overlap also call `ours` with the number of multiprocessors for computation.

    vLLM itself calls only DeepGEMM's function, if that is installed.
    """
    from vllm.v1.worker import gpu_ubatch_wrapper, ubatch_utils

    module = next(m for m in (gpu_ubatch_wrapper, ubatch_utils) if hasattr(m, "deep_gemm_set_num_sms"))
    theirs, has_deep_gemm = module.deep_gemm_set_num_sms, module.has_deep_gemm
    if getattr(theirs, "ours", None) is ours:  # a second model is served
        return

    def set_both(num_sms: int) -> None:
        ours(num_sms)
        if has_deep_gemm():
            theirs(num_sms)

    vars(set_both)["ours"] = ours
    module.deep_gemm_set_num_sms, module.has_deep_gemm = set_both, lambda: True


def watch_loads(watch: Callable[[torch.nn.Module], None]) -> None:
    """Call `watch` once for each module with a `load_weights` that is under construction around a layer.

    Modules whose `load_weights` is a generator are skipped, because only other modules call it.
    """
    modules = {id(caller): caller for caller in _callers() if isinstance(caller, torch.nn.Module)}
    for module in modules.values():
        load = getattr(module, "load_weights", None)
        if not load or inspect.isgeneratorfunction(load):
            continue
        if "load_weights" in vars(module):  # this module and those around it are watched already
            return
        watch(module)


def reload_began(module: torch.nn.Module) -> bool:
    """Returns whether vLLM has begun to reload a module by layers, and has not finished."""
    return any(layerwise.get_layerwise_info(layer).can_load() for layer in module.modules())


def undo_reload(module: torch.nn.Module, engine: Any) -> bool:
    """End a reload that failed before vLLM changed anything. Returns false if vLLM has changed a layer."""
    infos = [layerwise.get_layerwise_info(layer) for layer in module.modules()]
    if not all(info.can_load() for info in infos):
        return False
    for info in infos:
        info.loaded_weights.clear()
        info.load_numel = 0
    layerwise.finalize_layerwise_reload(module, engine and engine.model_config)
    return True


def computes_without_tokens(ranks: Any) -> bool:
    """Returns whether a step without tokens computes experts for other ranks' tokens."""
    return ranks.distributed_executor_backend == "external_launcher" and ranks.data_parallel_size > 1


def check_steps(check: Callable[[], None], without_tokens: bool) -> None:
    """Make the worker that is loading a model call `check` before each step.

    Checks in the layers do not suffice: CUDA graphs and compiled code bypass them and would run on invalid parameters.
    Steps without tokens may come in the middle of an update: vLLM takes one to forget requests that were aborted.

    Args:
        without_tokens: also check steps without tokens.
    """
    worker = next((caller for caller in _callers() if isinstance(caller, WorkerBase)), None)
    if worker:
        for step in ("execute_model", "execute_dummy_batch"):  # the latter computes experts for other ranks' tokens
            setattr(worker, step, functools.partial(_check_and_step, check, without_tokens, getattr(worker, step)))


def _callers() -> Iterator[Any]:
    """Yields the objects whose methods are running: a layer has no other reference to its model and its worker."""
    frame: FrameType | None = sys._getframe()
    while frame:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def _check_and_step(
    check: Callable[[], None], without_tokens: bool, step: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    scheduled = [*args, *kwargs.values()]  # of a model's step; a dummy batch has none
    if without_tokens or not scheduled or scheduled[0].total_num_scheduled_tokens:
        check()
    return step(*args, **kwargs)
