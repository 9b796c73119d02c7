"""Differences between SGLang 0.5.17 and 0.5.23, and changes of SGLang's internals.

No other module of this package depends on an SGLang version.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import sglang
import torch
from packaging.version import Version
from sglang.srt.distributed import get_tp_group, utils
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from sglang.srt.layers.moe import MoeRunnerBackend, get_deepep_mode, get_moe_runner_backend
from sglang.srt.managers.scheduler_components import weight_updater as answers
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_loader import loader
from sglang.srt.runtime_context import get_flags

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.sglang.loads import Loads, reason
from fp8moe_plugin.settings import NAME

logger = logging.getLogger("fp8moe")

CHECK = "check_quantized_moe_compatibility"  # a function of SGLang's `model_runner`


def rank_of(layer: Any) -> tuple[int, int]:
    """Returns this rank's index among the ranks that share a linear layer, and the number of these ranks.

    Since SGLang 0.5.22, layers have a group instead.
    """
    if hasattr(utils, "get_group_rank_size"):
        rank, ranks = utils.get_group_rank_size(layer.tp_group)
        return rank, ranks
    return getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)  # a replicated layer has neither


def local_slots(layer: Any, expert: int) -> list[int]:
    """Returns the indices of a checkpoint's expert in the parameters of this rank, as SGLang's loader finds them.

    With load balancing, an expert may have copies. Fused shared experts come after the routed ones.
    """
    placed = get_global_expert_location_metadata() if getattr(layer, "uses_expert_location", True) else None
    if placed is None:
        physical = [expert]
    elif layer._has_fused_shared and expert >= placed.num_logical_experts:
        physical = [layer._num_global_routed + expert - placed.num_logical_experts]
    else:
        physical = placed.logical_to_all_physical(layer.layer_id, expert)
    slots = map(layer._map_global_expert_id_to_local_expert_id, physical)
    return [slot for slot in slots if 0 <= slot < layer.num_local_experts]


def leave_fp4_runner() -> None:
    """Return to the runner "auto" if SGLang has chosen the one for FP4 experts, which changes the layers around them.

    It does so for a checkpoint with such experts where the user did not choose a runner.
    """
    if get_moe_runner_backend().is_flashinfer_mxfp4():
        logger.info("fp8moe: computes the experts in place of SGLang's runner flashinfer_mxfp4")
        get_flags().moe.runner_backend = MoeRunnerBackend.AUTO


def allow_uneven_shares() -> None:
    """Make SGLang accept experts whose scale blocks ranks cannot share equally, for models of our method.

    Other methods are still refused. Called for each model that is served with our method.
    """
    check = getattr(model_runner, CHECK)
    if hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check)
    def check_others(*, model_config: Any, **sizes: Any) -> None:
        if model_config.quantization != NAME:
            check(model_config=model_config, **sizes)

    setattr(model_runner, CHECK, check_others)


def rows_differ_by_mode() -> bool:
    """Returns whether DeepEP can send rows as BF16 in one mode and as FP8 in the other."""
    return Version(sglang.__version__) >= Version("0.5.18")


def choose_rows(dispatcher: Any) -> None:
    """Make DeepEP send BF16 rows in normal mode, which the op quantizes itself, and FP8 rows with scales otherwise."""
    formats = {mode: "bf16" if mode == "normal" else "fp8" for mode in ("normal", "low_latency")}
    if rows_differ_by_mode():
        dispatcher.set_quant_config({f"{mode}_dispatcher_output_dtype": dtype for mode, dtype in formats.items()})
    else:
        dispatcher.set_quant_config({"dispatcher_output_dtype": formats[get_deepep_mode().value]})


def follow_loads() -> None:
    """Make SGLang report to `Loads` each load, update and step of the models that are served with our method.

    Other models are not affected. Called for each model with our method, before it is created.
    """
    if hasattr(loader._initialize_model, "__wrapped__"):
        return
    _wrap(loader, "_initialize_model", _follow_model)
    runner, updater = model_runner.ModelRunner, weight_updater.WeightUpdater
    _wrap(runner, CHECK, _finish_load)  # SGLang's first call after it has loaded a model
    _wrap(runner, "forward", _check_and_step)
    _wrap(weight_updater, "_model_load_weights_direct", _load_directly)
    for name in ("update_weights_from_disk", "update_weights_from_ipc"):
        _wrap(updater, name, _answer_update)
    _wrap(updater, "update_weights_from_tensor", _answer_part)
    if hasattr(updater, "end_weight_update"):
        _wrap(updater, "load_weights_from_distributed", _answer_part)
        _wrap(updater, "end_weight_update", _end_update)
        _wrap(answers.SchedulerWeightUpdaterManager, "end_weight_update", _answer_end)
    else:  # older versions have no sessions
        _wrap(updater, "update_weights_from_distributed", _answer_part)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def _loads_of(model: Any) -> Loads | None:
    return getattr(model, "fp8moe_loads", None)


def _follow_model(make: Callable[..., Any], model_config: Any, load_config: Any, quant_config: Any = None) -> Any:
    model = make(model_config, load_config, quant_config)
    loads = getattr(quant_config, "loads", None)
    if isinstance(loads, Loads):
        loads.follow(model)
    return model


def _finish_load(check: Callable[..., None], runner: Any) -> None:
    if loads := _loads_of(runner.model):
        loads.finish_load(runner.model)
    check(runner)


def _check_and_step(step: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    # Checks in the layers do not suffice: CUDA graphs bypass them.
    if loads := _loads_of(runner.model):
        loads.check_usable()
    return step(runner, *args, **kwargs)


def _load_directly(load: Callable[..., None], model: Any, named_tensors: Any) -> None:
    loads = _loads_of(model)
    if loads:
        loads.check_direct(model, named_tensors)
    load(model, named_tensors)
    if loads and hasattr(model, "post_load_weights"):
        model.post_load_weights()  # derives weights of MLA, as a model's `load_weights` does


def _answer_update(update: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an update of all weights in one call, and return the answer."""
    loads = _loads_of(updater.get_model())
    return _answer(loads, loads.finish if loads else None, functools.partial(update, updater, *args, **kwargs))


def _answer_part(update: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an update of some weights, whose scales may be in the next call, and return the answer."""
    return _answer(_loads_of(updater.get_model()), None, functools.partial(update, updater, *args, **kwargs))


def _answer(loads: Loads | None, finish: Callable[[], None] | None, update: Callable[[], Any]) -> Any:
    """Run an update, and return whether it succeeded, with a message.

    Without this, SGLang would end without an answer, or serve a mixture of weights.
    """
    if loads is None:
        return update()
    if loads.failure:
        return False, loads.failure
    loads.error = None
    try:
        done, message = update()
        if done and finish:
            finish()
    except Exception as error:
        logger.exception("the weights cannot be updated")
        done, message = False, reason(error)
    if loads.error:
        done, message = False, reason(loads.error)
    failed, written = _agreed(None if done else message, loads.written)
    if failed is None:
        return True, message
    if written:
        return False, loads.fail(failed)
    return False, f"{failed.rstrip('.')}. Nothing has been written: the engine keeps its weights."


def _end_update(end: Callable[..., None], updater: Any, **kwargs: Any) -> None:
    loads = _loads_of(updater.get_model())
    if loads is None:
        end(updater, **kwargs)
        return
    failed = loads.failure
    if not failed:
        try:
            end(updater, **kwargs)
            loads.finish()
        except Exception as error:
            logger.exception("the weights cannot be updated")
            failed = reason(error)
    failed, _ = _agreed(failed, True)
    if failed:
        raise CheckpointError(loads.failure or loads.fail(failed))


def _answer_end(end: Callable[..., Any], manager: Any, request: Any) -> Any:
    try:
        return end(manager, request)
    except CheckpointError as error:  # on all ranks
        manager._session = None
        return answers.EndWeightUpdateReqOutput(success=False, message=str(error))


def _agreed(failed: str | None, written: bool) -> tuple[str | None, bool]:
    """Returns why an update has failed on one of the ranks, and whether one of them has written a part of it."""
    group = get_tp_group()
    if group.world_size == 1:
        return failed, written
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, (failed, written), group=group.cpu_group)
    return next((why for why, _ in found if why), None), any(wrote for _, wrote in found)
