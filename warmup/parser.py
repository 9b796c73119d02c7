"""The grammar of the command line: commands and their options, which have the engines' names if there is one."""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from fp8moe_plugin.plan.triton.catalog import GPUS as TRITON_GPUS
from fp8moe_plugin.settings import NAME
from warmup.report import installed
from warmup.target import BUNDLE, CACHE_DTYPES, GPUS, MAX_TOKENS, MOST_GPUS, TUNING, UTILIZATION
from warmup.values import count, few, plot, positive, share, url

PROGRAM = "fp8moe-warmup"
COMMANDS = {
    "compile": "compile the kernels that the cache lacks (the default command)",
    "list": "list the kernels, why each is needed and whether it is available",
    "explain": "show which splits fit which GPUs, their commands, and shapes, padding and memory",
    "verify": "check that every kernel is available and intact",
    "bundle": "compile what is missing, and write all kernels to one archive for FP8MOE_BUNDLE",
    "doctor": "check the cache, versions, settings, GPU and model, and show what serving would refuse",
    "bench": "time the layer against vLLM's backends; needs a Hopper GPU and vLLM",
    "tune": "measure thresholds of the plans on this Hopper GPU, for FP8MOE_TUNING; takes about a minute",
    "compare": "compare a checkpoint with vLLM's own fp8, or two running servers: accuracy and speed, against limits",
    "convert": "convert an unquantized checkpoint to block FP8, with the bytes of quantizing it at load time",
    "cache": "show the kernel cache, delete what this version does not use (--prune), or all of it (--clear)",
}
EXAMPLES = {
    "compile": ["--model deepseek-ai/DeepSeek-V3 --tp 8"],
    "list": ["list --model deepseek-ai/DeepSeek-V3"],
    "explain": [
        "explain --model moonshotai/Kimi-K2-Instruct --gpu h200 --gpus 16",
        "explain --model Qwen/Qwen3-235B-A22B-FP8 --tp 8 --ep 8",
        "explain --model Qwen/Qwen3-235B-A22B-FP8 --tp-size 8 --ep-size 4  # as in SGLang",
    ],
    "verify": ["verify --model /models/DeepSeek-V3 --bundle kernels.tar"],
    "bundle": ["bundle --model /models/DeepSeek-V3 --tp 8 --bundle kernels.tar"],
    "doctor": ["doctor --model /models/DeepSeek-V3 --tp 8", "doctor --json -    # for a support ticket"],
    "bench": ["bench --model /models/DeepSeek-V3 --tp 8 --plot layer.svg"],
    "tune": ["tune --model /models/DeepSeek-V3 --tp 8 --out tuning.json"],
    "compare": [
        "compare --model Qwen/Qwen3-30B-A3B-FP8 --bf16 Qwen/Qwen3-30B-A3B --plot compare.svg",
        "compare --url http://canary:8000 --baseline http://stable:8000 --max-kl 0.01 --min-speed 0.95",
    ],
    "convert": ["convert --model /models/Qwen3-30B-A3B --out /models/Qwen3-30B-A3B-fp8"],
    "cache": ["cache --prune"],
}
STATUS = (
    "exit status: 0 success, 1 something failed or is not supported, 2 invalid command line,\n"
    "3 a limit of compare is not met"
)
COMPLETION = "--print-completion"
SHELLS = ("bash", "zsh", "tcsh")
CONFIG_ONLY = "\nFrom the hub, only config.json is downloaded."
HUB = """
Variables of the hub are huggingface_hub's: HF_TOKEN for gated models, HF_HUB_OFFLINE=1 for what
was downloaded before, HF_ENDPOINT for a mirror, HF_HOME for the folder of downloads.
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line. Non-printable characters from the command line are escaped in it."""
        text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in message)
        self.exit(2, f"{self.prog}: error: {text}. See {self.prog} --help\n")


def with_command(arguments: list[str] | None) -> list[str]:
    """Returns the arguments, with the default command if they begin with an option."""
    given = sys.argv[1:] if arguments is None else arguments
    first = given[0] if given else "-"
    of_all = first in ("-h", "--help", "--version", COMPLETION) or not first.startswith("-")
    return given if of_all else ["compile", *given]


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """Returns the parser of the whole command line, and those of its commands."""
    parser = Parser(
        prog=PROGRAM,
        description="Compile all kernels needed to serve a checkpoint with --quantization fp8moe, before deployment.\n"
        "Needs neither a GPU, nor the weights, nor a CUDA toolkit.",
        epilog=f"{PROGRAM} COMMAND --help shows a command's options. python -m warmup is the same program.\n\n"
        f"{STATUS}\n\nexamples:\n" + "\n".join(f"  {PROGRAM} {line}" for lines in EXAMPLES.values() for line in lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = installed("fp8moe-plugin") or "(not installed)"
    parser.add_argument("--version", action="version", version=f"fp8moe-plugin {version}")
    parser.add_argument(COMPLETION, action=_Completion, choices=SHELLS, help="print a script that completes commands")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    return parser, {name: _command(commands, name) for name in COMMANDS}


class _Completion(argparse.Action):
    """Prints the script that makes a shell complete commands, options and files."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        import shtab

        for action in _actions(parser):
            if action.type is Path or action.dest == "model":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, values))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    """Yields the options of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _command(commands: "argparse._SubParsersAction[Parser]", name: str) -> Parser:
    needs_model = name in ("explain", "bench", "compare", "convert")
    parser = commands.add_parser(
        name,
        help=COMMANDS[name],
        description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.",
        epilog="\n".join([*(f"  {PROGRAM} {line}" for line in EXAMPLES[name]), _about_hub(name), STATUS]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a report; - for standard output")
    if name == "cache":
        _add_cache(parser)
        return parser
    default = "" if needs_model else f" (default: {'standard layers' if name == 'tune' else 'all existing kernels'})"
    parser.add_argument("--model", help=f"folder of a checkpoint, or its id on the Hugging Face hub{default}")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    parser.add_argument("--download-dir", type=Path, metavar="DIR", help="where downloads are kept")
    pasted = "accepted as in the engine's command"
    parser.add_argument("--quantization", "-q", choices=[NAME], help=pasted)
    runs = "as in vLLM: run code of the checkpoint" if name == "compare" else f"{pasted}; no code is run"
    parser.add_argument("--trust-remote-code", action="store_true", help=runs)
    if name not in ("compare", "convert"):
        _add_split(parser)
    if add := ADD.get(name):
        add(parser)
    return parser


def _about_hub(name: str) -> str:
    """Returns what a command's help says about the hub; the engines of `compare` download the weights."""
    return "" if name == "cache" else HUB if name == "compare" else CONFIG_ONLY + HUB


def _add_kernels(parser: Parser) -> None:
    parser.add_argument(
        "--gpu", dest="kernels", choices=TRITON_GPUS, help="Triton kernels for this GPU (default: CUDA ones for Hopper)"
    )


def _add_compile(parser: Parser) -> None:
    _add_kernels(parser)
    parser.add_argument("--dry-run", action="store_true", help="only list the kernels")
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="also write all kernels to this archive")


def _add_verify(parser: Parser) -> None:
    _add_kernels(parser)
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="archive to check, and nothing else")


def _add_bundle(parser: Parser) -> None:
    _add_kernels(parser)
    parser.add_argument("--bundle", type=Path, metavar="FILE", help=f"archive to write (default: {BUNDLE})")


def _add_bench(parser: Parser) -> None:
    parser.add_argument("--tokens", type=count, nargs="+", metavar="N", help="tokens of the steps to measure")
    parser.add_argument("--plot", type=plot, metavar="FILE", help="draw the times (.png or .svg)")


def _add_tune(parser: Parser) -> None:
    parser.description = (
        "Time the layer with each plan that thresholds choose between, and write the fastest ones for\n"
        "this GPU to a file. Without --model, for layers of DeepSeek-V3, Qwen3-30B-A3B and, in MXFP4,\n"
        "DeepSeek-V4-Flash."
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"file to write (default: {TUNING})")


def _add_compare(parser: Parser) -> None:
    parser.description = (
        "Compare fp8moe with vLLM's own fp8, and with BF16 if a twin is given, on this checkpoint and\n"
        "machine: log-probabilities of a text (KL divergence, most likely tokens, perplexity), time to\n"
        "first token, tokens per second, time to ready. Loads the weights, which vLLM downloads from\n"
        "the hub, with a process per engine, and takes minutes. Engines take turns if the weights of\n"
        "all fit into the GPU, else they run one after the other. With --url, it compares two servers\n"
        "instead. An interrupted comparison does not resume: another run measures everything anew."
    )
    parser.add_argument("--bf16", metavar="TWIN", help="the same model unquantized, as folder or id on the hub")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to read (default: Python's language reference)")
    most = "sequences to decode at once (default: 1 16 64 256)"
    parser.add_argument("--sequences", type=count, nargs="+", metavar="N", default=[1, 16, 64, 256], help=most)
    parser.add_argument("--plot", type=plot, metavar="FILE", help="draw the figures (.png or .svg)")
    parser.add_argument("--tp", "-tp", "--tensor-parallel-size", type=count, metavar="N", help="as in vLLM; default: 1")
    parser.add_argument("--enable-expert-parallel", "-ep", action="store_true", help="as in vLLM")
    about = "running servers of vLLM or SGLang, on any machine; needs neither an engine nor a GPU here"
    servers = parser.add_argument_group("two servers instead of a --model", about)
    servers.add_argument("--url", type=url, metavar="URL", help="server to check, such as http://canary:8000")
    servers.add_argument("--baseline", type=url, metavar="URL", help="server to compare it with")
    task = "also do this task of lm-eval with both, such as gsm8k, or a YAML file; needs its package"
    servers.add_argument("--task", metavar="TASK", help=task)
    about = "met if all of the 95% interval is within the limit; otherwise, the exit status is 3"
    limits = parser.add_argument_group("limits", about)
    kl = "most KL divergence from BF16, else from vLLM's fp8, or from the baseline"
    limits.add_argument("--max-kl", type=positive, metavar="NATS", help=kl)
    speed = "least speed of the first token and each number of sequences, over vLLM's fp8, else BF16, or the baseline"
    limits.add_argument("--min-speed", type=positive, metavar="RATIO", help=speed)


def _add_convert(parser: Parser) -> None:
    parser.description = (
        "Quantize the projections of attention, MLPs and experts in 128x128 blocks, and copy the rest.\n"
        "Works in OUT.partial, which is renamed at the end; run again, it continues where it was interrupted."
    )
    parser.add_argument("--out", type=Path, metavar="OUT", help="folder to create; must not exist")


def _add_cache(parser: Parser) -> None:
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--prune", action="store_true", help="delete kernels of other versions and compilers")
    ways.add_argument("--clear", action="store_true", help="delete all kernels")


def _add_explain(parser: Parser) -> None:
    choice = parser.add_argument_group("which split to serve with")
    choice.add_argument("--gpu", type=str.lower, choices=GPUS, help="kind of GPU; h20 is the one of 96 GB")
    choice.add_argument("--gpus", type=few, metavar="N", help=f"number of GPUs (default: 1 to {MOST_GPUS})")
    choice.add_argument(
        "--gpu-memory-utilization", type=share, metavar="SHARE", help=f"as in vLLM; default: {UTILIZATION}"
    )
    choice.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES, help="as in vLLM; default: auto, which is BF16")
    longest = "the longest sequence; default: that of config.json"
    steps = parser.add_argument_group("which steps to show")
    steps.add_argument("--tokens", type=count, nargs="+", metavar="N", help="tokens of the steps")
    in_vllm = parser.add_argument_group("further options of vllm serve")
    in_vllm.add_argument("--max-model-len", type=count, metavar="N", help=longest)
    most = f"tokens of the longest step; default: {MAX_TOKENS}"
    in_vllm.add_argument("--max-num-batched-tokens", type=count, metavar="N", help=most)
    in_vllm.add_argument("--cudagraph-capture-sizes", type=count, nargs="+", metavar="N", help="further steps")
    in_sglang = parser.add_argument_group("further options of sglang.launch_server")
    in_sglang.add_argument("--context-length", type=count, metavar="N", help=longest)
    in_sglang.add_argument("--chunked-prefill-size", type=count, metavar="N", help=most)
    in_sglang.add_argument("--cuda-graph-bs-decode", type=count, nargs="+", metavar="N", help="further steps")


ADD: dict[str, Callable[[Parser], None]] = {
    "compile": _add_compile,
    "list": _add_kernels,
    "doctor": _add_kernels,
    "explain": _add_explain,
    "verify": _add_verify,
    "bundle": _add_bundle,
    "bench": _add_bench,
    "tune": _add_tune,
    "compare": _add_compare,
    "convert": _add_convert,
}


def _add_split(parser: Parser) -> None:
    """Add the options for an engine's split of the model, with the engines' names."""
    vllm = parser.add_argument_group("options of vllm serve", "how the model is split; kernels do not depend on it")
    vllm.add_argument("--tp", "-tp", "--tensor-parallel-size", type=count, metavar="N", help="default: 1")
    vllm.add_argument("--pp", "-pp", "--pipeline-parallel-size", type=count, metavar="N", help="default: 1")
    vllm.add_argument("--dp", "-dp", "--data-parallel-size", type=count, metavar="N", help="default: 1")
    whole = "GPUs with whole experts, tp x dp; without it, GPUs share each expert"
    vllm.add_argument("--ep", type=count, metavar="N", help=whole)
    vllm.add_argument("--enable-expert-parallel", "-ep", action="store_true", help="the same as --ep TPxDP")
    sglang = parser.add_argument_group("options of sglang.launch_server, instead of these")
    sglang.add_argument("--tp-size", type=count, metavar="N", help="GPUs of the engine; default: 1")
    sglang.add_argument("--pp-size", type=count, metavar="N", help="default: 1")
    sglang.add_argument("--dp-size", type=count, metavar="N", help="with DP attention, parts of these")
    sglang.add_argument("--enable-dp-attention", action="store_true")
    dense = "with DP attention, each GPU holds dense MLPs as a whole"
    sglang.add_argument("--moe-dense-tp-size", type=int, choices=[1], help=dense)
    sglang.add_argument("--ep-size", type=count, metavar="N", help="GPUs with experts of their own; default: 1")
