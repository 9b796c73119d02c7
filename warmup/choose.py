"""`explain --gpu`: the splits of a model that fit into GPUs of this kind, and the best for latency and throughput."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.checkpoint.splits import EngineLayers, engine_layers, engine_text, split_refusal
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.terminal import fit
from warmup import all_to_all, decode, forms, memory, needs
from warmup.commands import REMOTE_CODE, commands
from warmup.explain import scratch_bytes
from warmup.report import ChoiceReport, FormReport, SplitReport
from warmup.target import GPUS, MOST_GPUS, NODE, Target

COUNTS = (1, 2, 4, NODE, MOST_GPUS)
DEFAULT_CONTEXT = 8192


def choose(model: Model, target: Target, source: str, remote_code: bool = False) -> ChoiceReport:
    """Returns all sensible splits for a target, or the one that it names, with the best for latency and throughput.

    Best latency: on the fewest nodes that can hold the model, the fewest bytes of weights that a GPU reads to decode
    one sequence. Best throughput: the most tokens in the KV cache per GPU. Where tensor parallelism pads experts, this
    adds splits with less padding, which only SGLang has.
    """
    loaded = memory.without_mtp(model)
    context = target.max_model_len or model.context or DEFAULT_CONTEXT
    splits = []
    usual = [target.split] if target.split else list(ways(target.gpus, target.sglang, target.dense_tp1))
    considered = usual if target.split else [*_with_less_padding(loaded, usual)]
    for way in considered:
        split = _split(loaded, way, target, context)
        vllm, sglang = commands(way, target, source, remote_code, forms.environment(model))
        split.vllm = "" if _vllm_refuses(loaded, way) else vllm
        split.sglang = "" if split_refusal(loaded, replace(way, sglang=True)) else sglang
        splits.append(split)
    fitting = [split for way, split in zip(considered, splits, strict=True) if split.fits and way in usual]
    one_node = [split for split in fitting if split.gpus <= NODE] or fitting
    latency = min(one_node, key=lambda s: (s.read_bytes or 0, s.gpus), default=None)
    throughput = max(fitting, key=lambda s: (s.cache_tokens / s.gpus, -(s.read_bytes or 0)), default=None)
    best = [way for way in considered if latency and str(way) == latency.options]
    of_forms, advice = _forms(loaded, best or usual, target, context)
    return ChoiceReport(
        gpu=target.gpu,
        memory_bytes=GPUS[target.gpu].memory_bytes,
        utilization=target.utilization,
        max_model_len=context,
        fp8_cache=target.fp8_cache or bool(model.cache and (model.cache.fp8 or model.cache.token_bytes)),
        mtp_bytes=_total(model) - _total(loaded),
        notes=[
            *memory.recoding_note(loaded),
            *advice,
            *needs.note(loaded),
            *_engine_notes(loaded, considered),
            *_window_note(loaded, considered, target),
        ],
        needed=_needed(loaded, target, context) if not fitting else None,
        splits=splits,
        latency=latency.options if latency else None,
        throughput=throughput.options if throughput else None,
        forms=of_forms,
        batches=[decode.best_for_batches(splits, count).options for count in decode.padded_counts(splits)],
    )


def _with_less_padding(model: Model, usual: Iterable[Parallel]) -> Iterator[Parallel]:
    for way in usual:
        yield way
        if way == Parallel(way.tp, sglang=way.sglang) and not split_refusal(model, way):
            yield from decode.with_less_padding(model, way)


def _forms(model: Model, ways: Iterable[Parallel], target: Target, context: int) -> tuple[list[FormReport], list[str]]:
    """Returns both forms of experts in MXFP4 for the first split in which one of them fits, and what to set."""
    for way in ways:
        splits = {name: _split(form, way, target, context) for name, form in forms.models(model, way).items()}
        found = [forms.of_split(name, split) for name, split in splits.items() if not split.refusal]
        if advice := forms.advice(model, way, target.tokens(way), found):
            return found, advice
    return [], []


def _engine_notes(model: Model, considered: Iterable[Parallel]) -> Iterator[str]:
    """Yields a sentence for all splits with the same layers on the engine's own kernels."""
    found: dict[tuple[EngineLayers, ...], list[Parallel]] = {}
    for way in considered:
        if not split_refusal(model, way) and (layers := engine_layers(model, way)):
            found.setdefault(tuple(layers), []).append(way)
    for same in found.values():
        text = engine_text(model, *same)
        assert text
        yield f"{text[0].upper()}{text[1:]}."


def _window_note(model: Model, considered: Iterable[Parallel], target: Target) -> list[str]:
    sizes = (
        all_to_all.window_bytes(model, way, target.tokens(way)) for way in considered if not split_refusal(model, way)
    )
    largest = max(sizes, default=0)
    return [f"Windows of FP8MOE_EP=push are counted, up to {largest / 2**20:.0f} MiB of a GPU."] if largest else []


def _needed(model: Model, target: Target, context: int) -> int | None:
    """Returns the fewest GPUs on which a split fits, if there is one."""
    for count in COUNTS:
        if any(_split(model, way, target, context).fits for way in ways(count, target.sglang, target.dense_tp1)):
            return count
    return None


def _vllm_refuses(model: Model, way: Parallel) -> bool:
    """Returns whether vLLM cannot split a model this way. It distributes experts over all ranks, or over none."""
    return way.ep not in (1, way.ranks) or bool(split_refusal(model, replace(way, sglang=False, dense_tp1=False)))


def _total(model: Model) -> int:
    """Returns the bytes of all weights, as on one GPU."""
    if split_refusal(model, Parallel()):
        return 0
    return sum(shape.bytes for shape in memory.weight_shapes(model, Parallel()))


def ways(gpus: int | None, sglang: bool, dense_tp1: bool) -> Iterator[Parallel]:
    """Returns the splits to consider: tensor parallel, whole experts, attention by replica, and stages across nodes."""
    for count in (gpus,) if gpus else COUNTS:
        own = {"sglang": sglang}
        data = own | {"dense_tp1": dense_tp1 and sglang}
        yield Parallel(count, **own)
        if count == 1:
            continue
        yield Parallel(count, ep=count, **own)
        nodes = count // NODE
        if nodes > 1 and count % NODE == 0:
            yield Parallel(NODE, pp=nodes, **own)
            yield Parallel(NODE, nodes, count, **data)
        yield Parallel(1, count, count, **data)


def _split(model: Model, way: Parallel, target: Target, context: int) -> SplitReport:
    gpus = way.gpus
    refusal = split_refusal(model, way)
    if refusal:
        return SplitReport(options=str(way), gpus=gpus, refusal=refusal)
    shapes = memory.weight_shapes(model, way)
    weights = sum(shape.bytes for shape in shapes)
    tokens = target.tokens(way)
    scratch = scratch_bytes(model, way, tokens)
    budget = int(GPUS[target.gpu].memory_bytes * target.utilization)
    free = budget - weights - memory.step_bytes(model, way, tokens, scratch, context)
    per_token = memory.cache_bytes(model, way, target.fp8_cache)
    per_token += ceil_div(memory.sequence_bytes(model, way), context)
    cached = max(0, free // per_token) * way.dp
    return SplitReport(
        options=str(way),
        gpus=gpus,
        fits=cached // way.dp >= context,
        weight_bytes=weights,
        scratch_bytes=scratch,
        cache_tokens=cached,
        sequences=cached // way.dp // context * way.dp,
        longest=cached // way.dp,
        padding=round(decode.padding(model, way), 3),
        read_bytes=decode.read_bytes(model, way),
        step_bytes=decode.read_bytes(model, way, decode.SEQUENCES),
        uneven=bool(model.experts.experts % way.ep),
    )


def text(found: ChoiceReport, remote_code: bool = False) -> str:
    """Returns the table of splits, and the commands of the best ones."""
    gpu, percent = GPUS[found.gpu], f"{found.utilization:.0%}"
    cache, width = "FP8" if found.fp8_cache else "BF16", max(len(_shown(split)) for split in found.splits)
    notes = [
        "Weights and scratch of one GPU; tokens of KV cache, and sequences of that length, of all GPUs. Padding of the "
        "experts, over an equal share."
    ]
    notes += found.notes
    if found.mtp_bytes:
        extra = f"{found.mtp_bytes / 1e9:.1f} GB in all"
        notes += [f"The layers for multi-token prediction (MTP) are left out, {extra}: engines load them only for "]
        notes[-1] += "speculative decoding."
    if any(split.uneven for split in found.splits):
        notes += ["Where ranks cannot share the experts equally, vLLM gives some of them one more."]
    if remote_code:
        notes += [f"{REMOTE_CODE} runs code of the checkpoint (auto_map in config.json): read it first."]
    header = f"{gpu.name}, of which {percent} of {found.memory_bytes / 1e9:.1f} GB is used; {cache} KV cache; "
    header += f"sequences of {found.max_model_len:,} tokens"
    lines = [
        fit(header, indent=2),
        "",
        f"GPUs  {'split':{width}s}  weights  scratch cached tokens sequences padding",
        *(_row(split, width) for split in found.splits),
        "",
        *(fit(note, indent=2) for note in notes),
    ]
    for count, options in zip(decode.padded_counts(found.splits), found.batches, strict=True):
        best = next(split for split in found.splits if split.options == options)
        lines += ["", *decode.table(found.splits, count, width, _shown)]
        lines += [fit(decode.advice(found.splits, count, best), indent=2)]
        lines += [] if options in (found.latency, found.throughput) else _commands(best)
    return "\n".join([*lines, "", *_best(found)])


def _shown(split: SplitReport) -> str:
    """Returns the options of a split for the table, shortened to its width; the commands have all of them."""
    short = split.options.replace("--enable-dp-attention ", "").replace(" --moe-dense-tp-size 1", "")
    return short.replace("-size ", " ")


def _row(split: SplitReport, width: int) -> str:
    start = f"{split.gpus:4d}  {_shown(split):{width}s}"
    if split.refusal:
        return fit(f"{start}  not supported: {split.refusal}", indent=10)
    assert split.weight_bytes is not None
    assert split.scratch_bytes is not None
    sizes = f"{split.weight_bytes / 1e9:7.1f}G {split.scratch_bytes / 1e9:7.2f}G"
    if not split.fits:
        longest = f": cache of {split.cache_tokens:,} tokens" if split.cache_tokens else ""
        return f"{start} {sizes}  does not fit{longest}"
    return f"{start} {sizes} {split.cache_tokens:13,d} {split.sequences:9,d} {split.padding:7.1%}"


def _best(found: ChoiceReport) -> list[str]:
    splits = {split.options: split for split in found.splits}
    if found.latency is None or found.throughput is None:
        return [fit(_what_would_fit(found), indent=0)]
    fast, busy = splits[found.latency], splits[found.throughput]
    if len(found.splits) == 1:
        return ["It fits:", *_commands(fast)]
    read = (fast.read_bytes or 0) / 1e9
    where, caveat = "of the splits that fit on one node", ""
    if fast.gpus > NODE:
        where = "of the splits that fit"
        caveat = " The network between nodes is not counted: measure --pipeline-parallel-size, too."
    why_fast = f"To decode one sequence, a GPU reads {read:.2f} GB of weights, the least {where}.{caveat}"
    tokens = f"{busy.cache_tokens // busy.gpus:,} tokens for each GPU"
    why_busy = f"Its KV cache holds {tokens}, the most of the splits that fit, so that a step"
    return [
        fit(f"Best for latency: {fast.options}. {why_fast}", indent=0),
        *_commands(fast),
        "",
        fit(f"Best for throughput: {busy.options}. {why_busy} has the most sequences.", indent=0),
        *(_commands(busy) if busy is not fast else ["  (the same commands)"]),
    ]


def _what_would_fit(found: ChoiceReport) -> str:
    supported = [split for split in found.splits if not split.refusal]
    if not supported:
        return "The model cannot be split over so many GPUs."
    what = "None of these splits fits" if len(supported) > 1 else "It does not fit"
    more = f"{found.needed} GPUs" if found.needed else f"more than {MOST_GPUS} GPUs, the most that are considered"
    best = max(supported, key=lambda split: split.longest)
    packed = next((form for form in found.forms if form.fits), None)
    other = f" Or unset {forms.SETTING}: with experts in MXFP4 {packed.options} fits." if packed else ""
    if not best.longest:
        return f"{what}: the weights leave no room for a KV cache. Take {more}.{other}"
    ways = ["this length", more, *(() if found.fp8_cache else ("--kv-cache-dtype fp8",))]
    longest = f"sequences of up to {best.longest:,} tokens would fit with {best.options}"
    return f"{what}: {longest} --max-model-len {best.longest}. Take {', '.join(ways[:-1])} or {ways[-1]}.{other}"


def _commands(split: SplitReport) -> list[str]:
    commands = {"vLLM": split.vllm, "SGLang": split.sglang}
    lines = [f"  {command}" if command else f"  ({engine} has no such split)" for engine, command in commands.items()]
    if split.gpus > NODE:
        note = "run it on each node, with RANK counting from 0; all of vLLM's but the first also need --headless."
        lines += [fit(f"  {note}", indent=2)]
    return lines
