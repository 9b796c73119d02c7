"""The forms of experts in MXFP4 (FP8MOE_FP4_EXPERTS): the memory that each takes, and which of them is faster."""

from collections.abc import Sequence
from dataclasses import replace

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model, local_intermediate
from fp8moe_plugin.checkpoint.splits import computes_experts
from fp8moe_plugin.formats.spec import FORMS_OF_MXFP4
from fp8moe_plugin.plan.tuning import MXFP4_ROWS_PER_EXPERT, MXFP4_ROWS_PER_NARROW_EXPERT, PACKED_WIDE_FROM
from fp8moe_plugin.settings import settings
from warmup import memory
from warmup.report import FormReport, SplitReport

SETTING = "FP8MOE_FP4_EXPERTS"


def models(model: Model, parallel: Parallel) -> dict[str, Model]:
    """Returns a model with its experts in each form, by the value of the setting; empty if they have only one form."""
    if not model.recoded_from or model.unknown_format or not computes_experts(model, parallel):
        return {}
    return {name: replace(model, weights=weights) for name, weights in FORMS_OF_MXFP4.items()}


def forms(model: Model, parallel: Parallel) -> list[FormReport]:
    """Returns the memory of each form on the rank that holds the most weights."""
    found = []
    for name, form in models(model, parallel).items():
        weights = sum(shape.bytes for shape in memory.weight_shapes(form, parallel))
        found.append(FormReport(setting=name, options=str(parallel), weight_bytes=weights))
    return found


def of_split(setting: str, split: SplitReport) -> FormReport:
    """Returns a form with a split that was judged for it."""
    shared = split.model_dump(include={"options", "weight_bytes", "fits", "cache_tokens"})
    return FormReport(setting=setting, **shared)


def environment(model: Model) -> str:
    """Returns the variable with which engines give experts the form that they have in this model, unless by default."""
    return f"{SETTING}=fp8 " if model.recoded_from and model.weights is FORMS_OF_MXFP4["fp8"] else ""


def advice(model: Model, parallel: Parallel, tokens: int, found: Sequence[FormReport]) -> list[str]:
    """Returns a paragraph about the value of the setting for a split, with the figures; empty if no form fits.

    Args:
        tokens: of the longest step, on each replica.
    """
    fitting = [form.setting for form in found if form.fits is not False]
    if not fitting:
        return []
    sizes = "; ".join(f"{form.setting} {form.weight_bytes / 1e9:.1f} GB{_room(form)}" for form in found)
    start = f"Forms of the experts ({SETTING}), weights of a GPU with {found[0].options}: {sizes}."
    if len(fitting) == 1:
        return [f"{start} Only {fitting[0]} fits."]
    rows = model.experts.topk * parallel.dp / model.experts.experts  # of an expert, for each token
    narrow = local_intermediate(model.experts.intermediate, parallel.sharing) < PACKED_WIDE_FROM
    by_gpu = (MXFP4_ROWS_PER_NARROW_EXPERT if narrow else MXFP4_ROWS_PER_EXPERT).items()
    longest = f"of {tokens:,} tokens ({round(rows * tokens, 1):g} rows)"
    if tokens <= min(int(most / rows) for _, most in by_gpu):
        limits = ", ".join(f"{most} on an {gpu}" for gpu, most in by_gpu)
        return [
            f"{start} Up to a number of rows per expert, {limits}, mxfp4 is faster, because kernels read fewer bytes, "
            f"and the longest steps, {longest}, have fewer: take mxfp4, the default."
        ]
    turns = " or ".join(f"{int(most / rows):,} tokens on an {gpu} ({most} rows per expert)" for gpu, most in by_gpu)
    memory_too = "" if found[0].fits else " and memory allows"
    what = "keep" if settings().fp4_experts == "fp8" else "set"
    return [
        f"{start} In steps of up to {turns}, mxfp4 is faster, because kernels read fewer bytes; in longer ones, up to "
        f"those {longest}, fp8 is. Where long prefills dominate{memory_too}, {what} {SETTING}=fp8."
    ]


def _room(form: FormReport) -> str:
    if form.fits is None:
        return ""
    return f" (a KV cache of {form.cache_tokens:,} tokens)" if form.fits else " (does not fit)"
