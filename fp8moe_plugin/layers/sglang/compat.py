"""Differences between SGLang 0.5.17 and 0.5.23, and changes of SGLang's internals.

No other module of this package depends on an SGLang version.
"""

import functools
from typing import Any

import sglang
from packaging.version import Version
from sglang.srt.distributed import utils
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from sglang.srt.layers.moe import get_deepep_mode
from sglang.srt.model_executor import model_runner

from fp8moe_plugin.settings import NAME

CHECK = "check_quantized_moe_compatibility"  # in SGLang's `model_runner`


def rank_of(layer: Any) -> tuple[int, int]:
    """This rank among those that share a linear layer, and their number.

    Since SGLang 0.5.22, layers have a group instead.
    """
    if hasattr(utils, "get_group_rank_size"):
        rank, ranks = utils.get_group_rank_size(layer.tp_group)
        return rank, ranks
    return getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)  # a replicated layer has neither


def may_hold_expert(layer: Any, expert: int) -> bool:
    """Whether this rank holds the expert with this global index, or may, if load balancing places the experts."""
    placed = get_global_expert_location_metadata() is not None
    return placed or layer._map_global_expert_id_to_local_expert_id(expert) != -1


def allow_uneven_shares() -> None:
    """Let ranks share experts whose scale blocks they cannot share equally, which SGLang refuses for all models.

    Other methods are refused as before. Called for each model that is served with ours.
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
    """Whether DeepEP can send rows as BF16 in one mode and as FP8 in the other."""
    return Version(sglang.__version__) >= Version("0.5.18")


def choose_rows(dispatcher: Any) -> None:
    """Make DeepEP send BF16 rows in normal mode, which the op quantizes itself, and FP8 rows with scales otherwise."""
    formats = {mode: "bf16" if mode == "normal" else "fp8" for mode in ("normal", "low_latency")}
    if rows_differ_by_mode():
        dispatcher.set_quant_config({f"{mode}_dispatcher_output_dtype": dtype for mode, dtype in formats.items()})
    else:
        dispatcher.set_quant_config({"dispatcher_output_dtype": formats[get_deepep_mode().value]})
