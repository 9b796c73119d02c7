"""Parsing of the command line."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fp8moe_plugin.checkpoint.shapes import Parallel
from fp8moe_plugin.checkpoint.untrusted import shown
from fp8moe_plugin.errors import CheckpointError, Fp8MoeError
from fp8moe_plugin.jit.cache import cache_dir
from fp8moe_plugin.jit.lookup import bundle_path
from warmup.model import is_folder
from warmup.report import installed

COMMANDS = {
    "compile": "compile what the cache lacks (the default)",
    "list": "list the kernels, why each is needed and whether it is available; same as --dry-run",
    "explain": "show the shapes on each GPU, padding, memory, and other ways to split the model",
    "verify": "check that every kernel is available and intact",
    "bundle": "compile what is missing, and write all kernels to one archive for FP8MOE_BUNDLE",
    "doctor": "check the cache, versions, settings, GPU and model, and show what serving would refuse",
    "bench": "time the layer against vLLM's backends; needs a Hopper GPU and vLLM",
    "convert": "convert an unquantized checkpoint to block FP8, with the bytes of quantizing it at load time",
}
EPILOG = """
exit status: 0 success, 1 something failed or is not supported, 2 invalid command line

examples:
  python -m warmup --model deepseek-ai/DeepSeek-V3 --tp 8
  python -m warmup bundle --model /models/DeepSeek-V3 --tp 8 --bundle kernels.tar
  FP8MOE_BUNDLE=kernels.tar FP8MOE_JIT=forbid vllm serve /models/DeepSeek-V3 --quantization fp8moe
  python -m warmup convert --model /models/Qwen3-30B-A3B --out /models/Qwen3-30B-A3B-fp8
  python -m warmup explain --model Qwen/Qwen3-235B-A22B-FP8 --tp 8 --ep 8
  python -m warmup explain --model Qwen/Qwen3-235B-A22B-FP8 --tp-size 8 --ep-size 4   # as SGLang calls them
"""
MAX_TOKENS = 8192  # the engines' default for a server on Hopper GPUs
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_COUNT = 1 << 20
MAX_GPUS = 4096
MAX_CAPTURE_SIZES = 1024  # about ten times as many as vLLM captures by default
ACCEPTED_BY = {
    "bundle": ("compile", "bundle", "verify"),
    "plot": ("bench",),
    "tokens": ("explain", "bench"),
    "dry_run": ("compile",),
    "out": ("convert",),
}
BUNDLE = Path("fp8moe-kernels.tar")


@dataclass(frozen=True)
class Options:
    command: str
    model: str | None
    parallel: Parallel
    max_tokens: int
    capture_sizes: tuple[int, ...]
    bundle: Path | None
    json: Path | None
    tokens: tuple[int, ...] | None
    plot: Path | None
    out: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with status 2. Non-printable characters from the command line are escaped in the message."""
        super().error("".join(char if char.isprintable() else ascii(char)[1:-1] for char in message))


def parse(arguments: list[str] | None) -> Options:
    """Parse the command line; exits with status 2 if it is invalid."""
    parser = _parser()
    given = parser.parse_args(arguments)
    _check(parser, given)
    command, parallel = "list" if given.dry_run else given.command, _parallel(parser, given)
    return Options(
        command=command,
        model=given.model,
        parallel=parallel,
        # SGLang divides --chunked-prefill-size among the parts of DP attention
        max_tokens=max(1, given.max_num_batched_tokens // (parallel.dp if parallel.sglang else 1)),
        capture_sizes=tuple(given.tokens or given.cudagraph_capture_sizes or CAPTURE_SIZES),
        bundle=given.bundle or (BUNDLE if command == "bundle" else None),
        json=given.json,
        tokens=tuple(given.tokens) if given.tokens else None,
        plot=given.plot,
        out=given.out,
    )


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.model == "" or (given.model is None and given.command in ("explain", "bench", "convert")):
        parser.error(f"{given.command} needs a --model")
    if given.command == "convert":
        _check_convert(parser, given)
    for option, commands in ACCEPTED_BY.items():
        if getattr(given, option) and given.command not in commands:
            parser.error(f"{given.command} does not accept --{option.replace('_', '-')}")
    if given.tokens and given.cudagraph_capture_sizes:
        parser.error("explain shows either --tokens or the captured sizes, not both")
    for option, sizes in (("--tokens", given.tokens), ("--cudagraph-capture-sizes", given.cudagraph_capture_sizes)):
        if sizes and len(sizes) > MAX_CAPTURE_SIZES:
            parser.error(f"{option} accepts at most {MAX_CAPTURE_SIZES} sizes, not {len(sizes)}")
    _check_files(parser, given)


def _check_files(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    read = given.command == "verify"
    for path in (given.json, None if read else given.bundle, given.plot):
        refusal = _refusal(path) if path else None
        if refusal:
            parser.error(f"{str(path)!r} cannot be written: {refusal}")
    for name, path in _other_files(given) if given.json else ():
        if _same_file(given.json, path):
            parser.error(f"--json and {name} are the same file, {str(given.json)!r}: choose another report file")


def _other_files(given: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Files that a report must not overwrite: other outputs of the command, and its possible inputs."""
    bundle = given.bundle or (BUNDLE if given.command == "bundle" else None)
    for name, path in (("--bundle", bundle), ("--plot", given.plot)):
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


def _refusal(path: Path) -> str | None:
    """Why a file cannot be written to this path, or None if it can."""
    try:
        if path.name in ("", "..") or path.is_dir():
            return "it is a folder"
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


def _check_convert(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
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


def _parallel(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Parallel:
    """vLLM distributes whole experts over all tp x dp ranks. `--ep` without `--tp` and `--dp` implies `--tp`."""
    tp, dp, ep = given.tp, given.dp or 1, given.ep
    if given.tp_size or given.ep_size or given.dp_size or given.enable_dp_attention:
        if tp or ep or given.dp or given.enable_expert_parallel:
            parser.error("use either the options of vllm serve or those of sglang.launch_server, not both")
        return _sglang_parallel(parser, given)
    if tp is None:
        tp = ep if ep and not given.dp else 1
    if ep and ep != tp * dp:
        parser.error(
            f"--ep {ep} contradicts --tp {tp} --dp {dp}: vLLM distributes the experts over all {tp * dp} ranks"
        )
    if tp * dp > MAX_GPUS:
        parser.error(f"--tp {tp} --dp {dp} needs more than {MAX_GPUS} GPUs")
    return Parallel(tp, dp, tp * dp if ep or given.enable_expert_parallel else 1)


def _sglang_parallel(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Parallel:
    """In SGLang `--tp-size` counts all ranks of an engine; without DP attention, `--dp-size` is a number of engines."""
    ranks, ep = given.tp_size or 1, given.ep_size or 1
    dp = given.dp_size or 1 if given.enable_dp_attention else 1
    for option, size in (("--dp-size", dp), ("--ep-size", ep)):
        if ranks % size:
            default = "" if given.tp_size else ", the default,"
            parser.error(f"--tp-size {ranks}{default} is not a multiple of {option} {size}")
    if ranks > MAX_GPUS:
        parser.error(f"--tp-size {ranks} needs more than {MAX_GPUS} GPUs")
    return Parallel(ranks // dp, dp, ep, sglang=True)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m warmup",
        description="Compile all kernels needed to serve a checkpoint with --quantization fp8moe, before deployment.\n"
        "Needs neither a GPU, nor the weights, nor a CUDA toolkit.\n\ncommands:\n"
        + "\n".join(f"  {name:8s} {what}" for name, what in COMMANDS.items()),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="compile", metavar="command")
    parser.add_argument(
        "--model", help="folder of a checkpoint, or its id on the Hugging Face hub (default: all existing kernels)"
    )
    version = installed("fp8moe-plugin") or "(not installed)"
    parser.add_argument("--version", action="version", version=f"fp8moe-plugin {version}")
    parser.add_argument("--dry-run", action="store_true", help="only list the kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a report")
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="FILE",
        help=f"archive to write or, for verify, to check (default for bundle: {BUNDLE})",
    )
    _add_engine_options(parser)
    convert = parser.add_argument_group(
        "convert",
        "quantizes the projections of attention, MLPs and experts in 128x128 blocks, and copies the rest.\n"
        "Works in OUT.partial, which is renamed at the end; run again, it continues where it was interrupted.",
    )
    convert.add_argument("--out", type=Path, metavar="OUT", help="folder to create; must not exist")
    layer = parser.add_argument_group("explain and bench")
    layer.add_argument("--tokens", type=count, nargs="+", metavar="N", help="tokens of the steps to show or measure")
    layer.add_argument("--plot", type=Path, metavar="FILE", help="bench: draw the times (.png or .svg)")
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How an engine splits the model, and its steps, by the engines' own names."""
    as_in_vllm = parser.add_argument_group("options of vllm serve")
    as_in_vllm.add_argument("--tp", "--tensor-parallel-size", type=count, help="default: 1")
    as_in_vllm.add_argument("--dp", "--data-parallel-size", type=count, help="default: 1")
    as_in_vllm.add_argument(
        "--ep", type=count, help="GPUs with whole experts, tp x dp; without it, GPUs share each expert"
    )
    as_in_vllm.add_argument("--enable-expert-parallel", action="store_true", help="the same as --ep TPxDP")
    as_in_sglang = parser.add_argument_group("options of sglang.launch_server, instead of these")
    as_in_sglang.add_argument("--tp-size", type=count, metavar="TP", help="GPUs of the engine; default: 1")
    as_in_sglang.add_argument("--dp-size", type=count, metavar="DP", help="with DP attention, parts of these")
    as_in_sglang.add_argument("--enable-dp-attention", action="store_true")
    as_in_sglang.add_argument("--ep-size", type=count, metavar="EP", help="GPUs with experts of their own; default: 1")
    as_in_vllm.add_argument(
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        type=count,
        default=MAX_TOKENS,
        metavar="N",
        help="explain: tokens of the longest step",
    )
    as_in_vllm.add_argument(
        "--cudagraph-capture-sizes",
        "--cuda-graph-bs-decode",
        type=count,
        nargs="+",
        metavar="N",
        help="explain: tokens of further steps",
    )


def count(text: str) -> int:
    """Parse a count, such as a number of tokens or GPUs.

    Raises:
        ArgumentTypeError: it is not a number from 1 to `MAX_COUNT`.
    """
    if not text.isdecimal() or not 1 <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_COUNT}")
    return int(text)
