"""What `explain` and `doctor` say about the all-to-all of expert parallelism, decided as engines decide it."""

from collections.abc import Iterator
from itertools import permutations

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.checkpoint.splits import computes_experts
from fp8moe_plugin.layers.all_to_all import (
    NO_ALL_GATHER,
    NO_KERNELS,
    UNDER_SGLANG,
    WEIGHTED_TOKENS,
    place_refusal,
    vllm_keeps_its_own,
    windows,
)
from fp8moe_plugin.plan.sm90.push import push_refusal
from fp8moe_plugin.plan.tuning import QUANTIZED_TOKENS
from fp8moe_plugin.settings import settings
from warmup.diagnosis import Gpu
from warmup.report import AllToAllReport, Finding

ALL_GATHER = (
    "Tokens reach the experts of other GPUs by vLLM's all-gather (--all2all-backend allgather_reducescatter, its "
    "default)"
)
FORMATS = f"in e4m3 in steps of {QUANTIZED_TOKENS} or more tokens a rank, in BF16 in shorter ones"
SPLIT_TOKENS = (
    "With tensor parallelism, windows need a model whose tokens vLLM splits among these ranks, such as DeepSeek-V3 and "
    "Qwen3-MoE; others keep vLLM's all-to-all."
)
WEIGHTED = ("Llama4ForConditionalGeneration", "Llama4ForCausalLM")  # models whose router's weights multiply the tokens


def all_to_all(model: Model, parallel: Parallel, step: int, gpus: list[Gpu] | None = None) -> AllToAllReport | None:
    """Returns how tokens reach the experts of other ranks; None if there is nothing to say.

    Args:
        step: tokens of the longest step, on each data-parallel replica.
        gpus: those of this machine, if the model is served here.
    """
    wanted = settings().ep
    if not computes_experts(model, parallel):
        return None
    if parallel.sglang or parallel.dp == 1 or parallel.ep == 1:
        why = UNDER_SGLANG if parallel.sglang else vllm_keeps_its_own(NO_ALL_GATHER)
        return AllToAllReport(used="engine", why=f"{why}.") if wanted == "push" else None
    gathered = f"{ALL_GATHER}, in BF16." if model.architecture in WEIGHTED else f"{ALL_GATHER}: {FORMATS}."
    if refusal := _refusal(model, parallel, gpus or []):
        kept = [f"{vllm_keeps_its_own(refusal)}."] if wanted == "push" else []
        return AllToAllReport(used="engine", why=" ".join([*kept, gathered]))
    experts = model.experts
    found = windows(parallel.ranks, step, parallel.tp, experts.hidden, experts.topk, experts.experts)
    pushed = f"{found}. {SPLIT_TOKENS}" if parallel.tp > 1 else f"{found}."
    why = f"FP8MOE_EP=push: {pushed}" if wanted == "push" else f"{gathered} With FP8MOE_EP=push, {pushed}"
    return AllToAllReport(used=wanted, why=why, window_bytes=found.nbytes, window_rows=found.rows)


def window_bytes(model: Model, parallel: Parallel, step: int) -> int:
    """Returns the bytes of a rank's window, 0 if it has none; see `all_to_all`."""
    found = all_to_all(model, parallel, step)
    return found.window_bytes or 0 if found and found.used == "push" else 0


def _refusal(model: Model, parallel: Parallel, gpus: list[Gpu]) -> str | None:
    """Returns why vLLM's ranks keep its all-to-all, or None; `gpus`: of each host, empty if they are not known."""
    if model.architecture in WEIGHTED:
        return WEIGHTED_TOKENS
    used = gpus[: parallel.gpus]
    if ({gpu.backend for gpu in used} or {settings().backend}) - {"sm90", "auto"}:
        return NO_KERNELS
    if (refusal := push_refusal(parallel.ranks, model.experts.hidden)) or not gpus:
        return refusal
    # vLLM gives a data-parallel rank the GPUs of all its stages, and stage after stage those of its tensor parallelism.
    replicas = range(0, parallel.gpus, parallel.gpus // parallel.dp)
    places = [divmod(first + rank, len(gpus)) for first in replicas for rank in range(parallel.tp)]
    of_group = [gpus[at] for _, at in places]
    return place_refusal(places, [gpu.reaches(of_group) for gpu in of_group])


def findings(model: Model, parallel: Parallel, step: int, gpus: list[Gpu]) -> Iterator[Finding]:
    if found := all_to_all(model, parallel, step, gpus):
        yield Finding(subject="all-to-all", found=found.why.rstrip("."), ok=found.used == settings().ep or None)


def links(gpus: list[Gpu]) -> Iterator[Finding]:
    """Check that the GPUs of this machine can store into each other's memory over NVLink, as FP8MOE_EP=push needs."""
    if len(gpus) < 2:
        return
    pairs = list(permutations(gpus, 2))
    apart = [f"GPU {a.ordinal} into that of GPU {b.ordinal}" for a, b in pairs if b.ordinal not in a.peers]
    slow = [f"GPU {a.ordinal} and GPU {b.ordinal}" for a, b in pairs if not a.reaches([b])]
    needed = "FP8MOE_EP=push needs this"
    if apart:
        found = f"not every GPU can store into the memory of the others{_first(apart)}. {needed}"
    elif slow:
        found = f"each GPU can store into the memory of the others, but not over NVLink{_first(slow)}. {needed}"
    else:
        found = "each GPU can store into the memory of the others, over NVLink"
    yield Finding(subject="GPU links", found=found, ok=None if apart or slow else True)


def _first(pairs: list[str]) -> str:
    more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
    return f" ({pairs[0]}{more})"
