"""The command line."""

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

COMMANDS = {
    "compile": "compile what the cache lacks (the default)",
    "list": "show the kernels, why each is needed and whether it is there; the same as --dry-run",
    "explain": "show the shapes on each GPU, padding, memory, and the ways to spread the model",
    "verify": "check that every kernel is there and whole",
    "bundle": "compile what is missing, and write all into one archive for FP8MOE_BUNDLE",
    "doctor": "show the cache, versions, settings and GPU, and what would be refused",
    "bench": "time the layer beside vLLM's backends; needs a Hopper GPU and vLLM",
    "convert": "write an unquantized checkpoint as a block-FP8 one, with the bytes that loading it would give",
}
EPILOG = """
exit status: 0 all is well, 1 something failed or is refused, 2 the command line is wrong

examples:
  python -m warmup --model deepseek-ai/DeepSeek-V3 --tp 8
  python -m warmup bundle --model /models/DeepSeek-V3 --tp 8 --bundle kernels.tar
  FP8MOE_BUNDLE=kernels.tar FP8MOE_JIT=forbid vllm serve /models/DeepSeek-V3 --quantization fp8moe
  python -m warmup convert --model /models/Qwen3-30B-A3B --out /models/Qwen3-30B-A3B-fp8
  python -m warmup explain --model Qwen/Qwen3-235B-A22B-FP8 --tp 8 --ep 8
"""
MAX_TOKENS = 8192  # vLLM's own default for a server on such GPUs
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_COUNT = 1 << 20
MAX_GPUS = 4096
MAX_CAPTURE_SIZES = 1024  # ten times as many as vLLM captures by default
TAKE = {
    "bundle": ("compile", "bundle", "verify"),
    "plot": ("bench",),
    "tokens": ("bench",),
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
        """Leave the process with status 2; a terminal does not obey what the message quotes from the command line."""
        super().error("".join(char if char.isprintable() else ascii(char)[1:-1] for char in message))


def parse(arguments: list[str] | None) -> Options:
    """The options; leaves the process with status 2 where they are wrong."""
    parser = _parser()
    given = parser.parse_args(arguments)
    _check(parser, given)
    command = "list" if given.dry_run else given.command
    return Options(
        command=command,
        model=given.model,
        parallel=_parallel(parser, given),
        max_tokens=given.max_num_batched_tokens,
        capture_sizes=tuple(given.cudagraph_capture_sizes),
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
    for option, commands in TAKE.items():
        if getattr(given, option) and given.command not in commands:
            parser.error(f"{given.command} takes no --{option.replace('_', '-')}")
    if len(given.cudagraph_capture_sizes) > MAX_CAPTURE_SIZES:
        sizes = len(given.cudagraph_capture_sizes)
        parser.error(f"--cudagraph-capture-sizes takes at most {MAX_CAPTURE_SIZES} sizes, not {sizes}")
    _check_files(parser, given)


def _check_files(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    read = given.command == "verify"
    for path in (given.json, None if read else given.bundle, given.plot):
        refusal = _refusal(path) if path else None
        if refusal:
            parser.error(f"{str(path)!r} is no file that can be written: {refusal}")
    for name, path in _other_files(given) if given.json else ():
        if _same_file(given.json, path):
            parser.error(f"--json and {name} are the same file, {str(given.json)!r}: choose another report file")


def _other_files(given: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """What a report must not overwrite: what the command writes besides it, and what is read or may be read."""
    bundle = given.bundle or (BUNDLE if given.command == "bundle" else None)
    for name, path in (("--bundle", bundle), ("--plot", given.plot)):
        if path:
            yield name, path
    # The command itself reports settings, folders and checkpoints that cannot be used.
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
    """Why no file can be written there."""
    try:
        if path.name in ("", "..") or path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return "its folder is not there"
        os.lstat(path)  # its name may be too long
    except FileNotFoundError:
        pass
    except OSError as error:
        return error.strerror
    return None if os.access(path.parent, os.W_OK) else "its folder cannot be written"


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there yet
        return os.path.realpath(one) == os.path.realpath(other)


def _check_convert(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if not given.out:
        parser.error("convert needs an --out, the folder to write")
    try:
        if not is_folder(given.model):
            parser.error(
                f"convert needs the weights: {given.model!r} is no folder. Download it: hf download {given.model}"
            )
    except CheckpointError as error:
        parser.error(str(error))
    if given.out.name in ("", "..") or not os.access(given.out.absolute().parent, os.W_OK):
        parser.error(f"{str(given.out)!r} is no folder that can be made: its parent has to be there, and writable")
    try:
        given.out.with_name(f"{given.out.name}.partial").lstat()  # the longest name that is needed
    except FileNotFoundError:
        return
    except OSError as error:
        parser.error(f"{shown(str(given.out))} is no folder that can be made: {error.strerror}")


def _parallel(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Parallel:
    """vLLM spreads whole experts over all tp x dp ranks; `--ep` alone means as many ranks of tensor parallelism."""
    tp, dp, ep = given.tp, given.dp or 1, given.ep
    if tp is None:
        tp = ep if ep and not given.dp else 1
    if ep and ep != tp * dp:
        parser.error(f"--ep {ep} does not fit --tp {tp} --dp {dp}: vLLM spreads the experts over all {tp * dp} ranks")
    if tp * dp > MAX_GPUS:
        parser.error(f"--tp {tp} --dp {dp} are more than {MAX_GPUS} GPUs")
    return Parallel(tp, dp, bool(ep) or given.enable_expert_parallel)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m warmup",
        description="Compile every kernel that serving a checkpoint with --quantization fp8moe needs, before it is\n"
        "deployed. Needs neither a GPU nor the weights nor a CUDA toolkit.\n\ncommands:\n"
        + "\n".join(f"  {name:8s} {what}" for name, what in COMMANDS.items()),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="compile", metavar="command")
    parser.add_argument(
        "--model", help="folder of a checkpoint, or its id on the Hugging Face hub; without it, every kernel there is"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a report too")
    parser.add_argument(
        "--bundle", type=Path, metavar="FILE", help=f"write the archive here (bundle: {BUNDLE} if not given)"
    )
    as_in_vllm = parser.add_argument_group("as for vllm serve")
    as_in_vllm.add_argument("--tp", "--tensor-parallel-size", type=count, help="default: 1")
    as_in_vllm.add_argument("--dp", "--data-parallel-size", type=count, help="default: 1")
    as_in_vllm.add_argument("--ep", type=count, help="GPUs that share whole experts: tp x dp, else no expert is whole")
    as_in_vllm.add_argument("--enable-expert-parallel", action="store_true", help="the same as --ep TPxDP")
    as_in_vllm.add_argument(
        "--max-num-batched-tokens", type=count, default=MAX_TOKENS, metavar="N", help="explain: the longest step"
    )
    as_in_vllm.add_argument(
        "--cudagraph-capture-sizes", type=count, nargs="+", default=CAPTURE_SIZES, metavar="N", help="explain: steps"
    )
    convert = parser.add_argument_group(
        "convert",
        "quantizes the projections of attention, dense layers and experts, in 128x128 blocks, and keeps the rest.\n"
        "Works in OUT.partial, renamed at the end; run again, it goes on where it was interrupted.",
    )
    convert.add_argument("--out", type=Path, metavar="OUT", help="folder to write; must not be there yet")
    bench = parser.add_argument_group("bench")
    bench.add_argument("--tokens", type=count, nargs="+", metavar="N", help="tokens of a step")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw the times (.png or .svg)")
    return parser


def count(text: str) -> int:
    """A number of tokens, rounds and the like, as an argument.

    Raises:
        ArgumentTypeError: it is none from 1 to `MAX_COUNT`.
    """
    if not text.isdecimal() or not 1 <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {MAX_COUNT}")
    return int(text)
