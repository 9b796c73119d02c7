"""The options of a command: parsed, checked, and converted to the types of the package."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.errors import CheckpointError, Fp8MoeError
from fp8moe_plugin.jit.cache import cache_dir
from fp8moe_plugin.jit.lookup import bundle_path
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.triton.catalog import GPUS as TRITON_GPUS
from fp8moe_plugin.quoting import shown
from warmup.model import is_folder
from warmup.parser import Parser, parsers, with_command
from warmup.target import BUNDLE, MAX_TOKENS, NODE, TUNING, UTILIZATION, Target

CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_GPUS = 4096
MAX_CAPTURE_SIZES = 1024  # about ten times as many as vLLM captures by default
STDOUT = Path("-")  # as the file of --json
OF_VLLM = (
    "tp", "pp", "dp", "ep", "enable_expert_parallel", "max_model_len", "max_num_batched_tokens",
    "cudagraph_capture_sizes",
)  # fmt: skip
OF_SGLANG = (
    "tp_size", "pp_size", "dp_size", "enable_dp_attention", "moe_dense_tp_size", "ep_size", "context_length",
    "chunked_prefill_size", "cuda_graph_bs_decode",
)  # fmt: skip
OF_MODEL = ("model", "revision", "download_dir", "quantization", "trust_remote_code")
OF_COMPARE = ("bf16", "text", "sequences", "url", "baseline", "task", "max_kl", "min_speed")
SIZES = ("tokens", "cudagraph_capture_sizes", "cuda_graph_bs_decode")


@dataclass(frozen=True)
class Options:
    command: str
    model: str | None
    revision: str | None
    remote_code: bool  # `compare` may run the checkpoint's code
    download_dir: Path | None
    parallel: Parallel
    max_tokens: int
    capture_sizes: tuple[int, ...]
    bundle: Path | None
    json: Path | None
    tokens: tuple[int, ...] | None
    plot: Path | None
    out: Path | None
    target: Target | None
    bf16: str | None
    text: Path | None
    sequences: tuple[int, ...]
    url: str | None
    baseline: str | None
    task: str | None
    max_kl: float | None
    min_speed: float | None
    clear: bool
    prune: bool
    kernels: str  # the kernels' target: a Triton target if a GPU is named, else SM90


def parse(arguments: list[str] | None) -> Options:
    """Returns the options of a command line; exits with status 2 if it is invalid."""
    main, commands = parsers()
    # An option that the command does not have is None.
    unset = dict.fromkeys((*OF_VLLM, *OF_SGLANG, *SIZES, "bundle", "dry_run", "plot", "out", "gpu", "gpus", "kernels"))
    main.set_defaults(
        **unset,
        **dict.fromkeys((*OF_MODEL, *OF_COMPARE, "clear", "prune")),
        gpu_memory_utilization=None,
        kv_cache_dtype=None,
    )
    given, unknown = main.parse_known_args(with_command(arguments))
    parser = commands[given.command]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    _check(parser, given)
    command, parallel = "list" if given.dry_run else given.command, _parallel(parser, given)
    # SGLang divides --chunked-prefill-size among the parts of DP attention.
    longest = given.max_num_batched_tokens or given.chunked_prefill_size or MAX_TOKENS
    captured = given.cudagraph_capture_sizes or given.cuda_graph_bs_decode
    return Options(
        command=command,
        model=given.model,
        revision=given.revision,
        remote_code=bool(given.trust_remote_code),
        download_dir=given.download_dir,
        parallel=parallel,
        max_tokens=max(1, longest // (parallel.dp if parallel.sglang else 1)),
        capture_sizes=tuple(given.tokens or captured or CAPTURE_SIZES),
        bundle=given.bundle or (BUNDLE if command == "bundle" else None),
        json=given.json,
        tokens=tuple(given.tokens) if given.tokens else None,
        plot=given.plot,
        out=_tuning_file(given) or given.out,
        target=_target(parser, given, longest, parallel),
        bf16=given.bf16,
        text=given.text,
        sequences=tuple(sorted(set(given.sequences or ()))),
        url=given.url,
        baseline=given.baseline,
        task=given.task,
        max_kl=given.max_kl,
        min_speed=given.min_speed,
        clear=bool(given.clear),
        prune=bool(given.prune),
        kernels=TRITON_GPUS.get(given.kernels, SM90),
    )


def _target(parser: Parser, given: argparse.Namespace, max_tokens: int, parallel: Parallel) -> Target | None:
    if given.gpu is None:
        return None
    number = parallel.gpus
    if number > 1 and given.gpus not in (None, number):
        parser.error(f"--gpus {given.gpus} contradicts {parallel}, which are {number} GPUs. Leave one of them out")
    if (total := given.gpus or number) > NODE and total % NODE:
        parser.error(f"{total} GPUs are neither one node of up to {NODE} nor whole nodes of {NODE}")
    return Target(
        gpu=given.gpu,
        gpus=given.gpus,
        utilization=given.gpu_memory_utilization or UTILIZATION,
        fp8_cache=(given.kv_cache_dtype or "auto").startswith("fp8"),
        max_model_len=given.max_model_len or given.context_length,
        max_tokens=max_tokens,
        split=parallel if number > 1 else None,
        sglang=parallel.sglang,
        dense_tp1=bool(given.moe_dense_tp_size),
    )


def _check(parser: Parser, given: argparse.Namespace) -> None:
    if given.command == "compare":
        _check_compare(parser, given)
    elif given.model == "" or (given.model is None and given.command in ("explain", "bench", "convert")):
        parser.error(f"{given.command} needs a --model")
    _check_engine(parser, given)
    if given.command == "convert":
        _check_convert(parser, given)
    of_gpu = "gpus", "gpu_memory_utilization", "kv_cache_dtype", "max_model_len", "context_length"
    for option, other in (dict.fromkeys(of_gpu, "gpu") | {"revision": "model", "download_dir": "model"}).items():
        if getattr(given, option) and not getattr(given, other):
            parser.error(f"{_name(option)} needs a --{other}")
    sizes = [option for option in SIZES if getattr(given, option)]
    if len(sizes) > 1:
        parser.error("explain shows either --tokens or the captured sizes, not both")
    for option in sizes:
        if (number := len(getattr(given, option))) > MAX_CAPTURE_SIZES:
            parser.error(f"{_name(option)} accepts at most {MAX_CAPTURE_SIZES} sizes, not {number}")
    _check_files(parser, given)


def _check_compare(parser: Parser, given: argparse.Namespace) -> None:
    if not given.url and not given.baseline:
        if not given.model:
            parser.error("compare needs a --model, or --url and --baseline")
        if given.task:
            parser.error("--task is done by two running servers: give --url and --baseline")
        return
    if not given.url or not given.baseline:
        parser.error("--url and --baseline are two servers: give both")
    of_engines = ("model", "revision", "download_dir", "trust_remote_code", "bf16", "tp", "enable_expert_parallel")
    for option in (option for option in of_engines if getattr(given, option)):
        parser.error(f"{_name(option)} is of engines that compare starts, and --url of running servers. Leave one out")


def _name(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _check_engine(parser: Parser, given: argparse.Namespace) -> None:
    vllm, sglang = ([_name(option) for option in options if getattr(given, option)] for options in (OF_VLLM, OF_SGLANG))
    if vllm and sglang:
        both = "use either the options of vllm serve or those of sglang.launch_server, not both"
        parser.error(f"{vllm[0]} and {sglang[0]}: {both}")


def _check_files(parser: Parser, given: argparse.Namespace) -> None:
    read = given.command == "verify"
    report: Path | None = None if given.json == STDOUT else given.json
    for path in (report, None if read else given.bundle, given.plot, _tuning_file(given)):
        refusal = _refusal(path, replaced=path is given.bundle) if path else None
        if refusal:
            parser.error(f"{str(path)!r} cannot be written: {refusal}")
    for option, written in (("--json", report), ("--out", _tuning_file(given))):
        for name, path in _other_files(given) if written else ():
            if written and name != option and _same_file(written, path):
                kind = "report " if written is report else ""
                parser.error(f"{option} and {name} are the same file, {str(written)!r}: choose another {kind}file")


def _tuning_file(given: argparse.Namespace) -> Path | None:
    """Returns the file that `tune` writes, None for other commands."""
    return given.out or TUNING if given.command == "tune" else None


def _other_files(given: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Files that a report and `tune` must not overwrite: other outputs of the command, and its possible inputs."""
    bundle = given.bundle or (BUNDLE if given.command == "bundle" else None)
    for name, path in (("--bundle", bundle), ("--plot", given.plot), ("--out", _tuning_file(given))):
        if path:
            yield name, path
    # Unusable settings, folders and checkpoints are reported later by the command itself.
    with contextlib.suppress(Fp8MoeError):
        in_use = bundle_path()
        if in_use:
            yield "FP8MOE_BUNDLE", in_use
    with contextlib.suppress(Fp8MoeError, OSError):
        yield from (("a file in the kernel cache", path) for path in cache_dir().iterdir())
    with contextlib.suppress(Fp8MoeError, OSError):
        if given.model and is_folder(given.model):
            yield from (("a file of the checkpoint", path) for path in Path(given.model).iterdir())


def _refusal(path: Path, replaced: bool) -> str | None:
    """Returns why a file cannot be written to this path, or None if it can.

    Args:
        replaced: a new file takes the place of an old one, which may be no pipe or device then.
    """
    try:
        if path.name in ("", "..") or path.is_dir():
            return "it is a folder"
        if replaced and path.exists() and not path.is_file():
            return "it is a pipe or a device"
        if not path.parent.is_dir():
            return "its folder does not exist"
        os.lstat(path)  # fails if the name is too long
    except FileNotFoundError:
        pass
    except OSError as error:
        return error.strerror
    return None if os.access(path.parent, os.W_OK) else "its folder is not writable"


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(one) == os.path.realpath(other)


def _check_convert(parser: Parser, given: argparse.Namespace) -> None:
    if not given.out:
        parser.error("convert needs an --out, the folder to create")
    try:
        if not is_folder(given.model):
            parser.error(
                f"convert needs the weights, but {given.model!r} is not a folder. Run: hf download {given.model}"
            )
    except CheckpointError as error:
        parser.error(str(error))
    if given.out.name in ("", "..") or not os.access(given.out.absolute().parent, os.W_OK):
        parser.error(f"{str(given.out)!r} cannot be created: its parent folder must exist and be writable")
    try:
        given.out.with_name(f"{given.out.name}.partial").lstat()  # fails if the longest name needed is too long
    except FileNotFoundError:
        return
    except OSError as error:
        parser.error(f"{shown(str(given.out))} cannot be created: {error.strerror}")


def _parallel(parser: Parser, given: argparse.Namespace) -> Parallel:
    """Returns the split from an engine's options.

    vLLM distributes whole experts over all tp x dp ranks. `--ep` without `--tp` and `--dp` implies `--tp`.
    """
    if any(getattr(given, option) for option in OF_SGLANG):
        return _sglang_parallel(parser, given)
    tp, dp, ep, pp = given.tp, given.dp or 1, given.ep, given.pp or 1
    if tp is None:
        tp = ep if ep and not given.dp else 1
    if ep and ep != tp * dp:
        parser.error(
            f"--ep {ep} contradicts --tp {tp} --dp {dp}: vLLM distributes the experts over all {tp * dp} ranks"
        )
    if tp * dp * pp > MAX_GPUS:
        parser.error(f"--tp {tp} --dp {dp}{f' --pp {pp}' * (pp > 1)} needs more than {MAX_GPUS} GPUs")
    return Parallel(tp, dp, tp * dp if ep or given.enable_expert_parallel else 1, pp=pp)


def _sglang_parallel(parser: Parser, given: argparse.Namespace) -> Parallel:
    """Returns the split from SGLang's options.

    `--tp-size` counts all ranks of an engine; without DP attention, `--dp-size` is a number of engines.
    """
    ranks, ep, pp = given.tp_size or 1, given.ep_size or 1, given.pp_size or 1
    dp = given.dp_size or 1 if given.enable_dp_attention else 1
    for option, size in (("--dp-size", dp), ("--ep-size", ep)):
        if ranks % size:
            default = "" if given.tp_size else ", the default,"
            parser.error(f"--tp-size {ranks}{default} is not a multiple of {option} {size}")
    if ranks * pp > MAX_GPUS:
        parser.error(f"--tp-size {ranks}{f' --pp-size {pp}' * (pp > 1)} needs more than {MAX_GPUS} GPUs")
    return Parallel(ranks // dp, dp, ep, sglang=True, pp=pp, dense_tp1=bool(given.moe_dense_tp_size) and dp > 1)
