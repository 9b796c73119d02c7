"""One layer of experts through SGLang's `FusedMoE`: our method and SGLang's own backends in turns, on one GPU.

    python -m benchmarks.layer.sglang_layer --out benchmarks/results/sglang_layer-<date>.json

SGLang chooses a backend by settings of the process, so each has one of its own. All get the same weights, tokens and
routings, and compile what they need before anything is timed, all at the same time. `us` is the median of the rounds,
each of them CUDA-graph replays after a pause; `relative_l2` the distance from float32 math on unquantized activations.
`host_us` is the host's time of an eager call, measured on a layer that is small enough for the GPU to keep up. A
backend that fails is left out from then on; `errors` has the reason.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints.synthetic import PRESETS, config
from benchmarks.engine.serve_demo import free_port
from benchmarks.layer.host_cost import host_us
from benchmarks.report import write_report
from fp8moe_plugin.bench.layer import (
    REFERENCE_TOKENS,
    TOKENS,
    make_case,
    random_routing,
    random_weights,
)
from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.compare.process import EngineError, EngineProcess
from fp8moe_plugin.testing import PAUSE_S, captured, replay_us
from warmup.report import installed

BACKENDS: dict[str, dict[str, Any]] = {  # arguments of SGLang's server
    OURS: {"quantization": "fp8moe"},
    "triton": {"quantization": "fp8", "moe_runner_backend": "triton"},
    "deep_gemm": {"quantization": "fp8", "moe_runner_backend": "deep_gemm"},
    "cutlass": {"quantization": "fp8", "moe_runner_backend": "cutlass"},
}
LAYERS = {"dsv3-tp8": Experts(1, 256, 8, 7168, 256), "qwen3-30b": Experts(1, 128, 8, 2048, 768)}
HOST_LAYER, HOST_TOKENS = Experts(1, 64, 8, 512, 256), (1, 300)
QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TIMEOUT_S = 180


def start_rank(args: Any) -> None:
    """Makes this process the only rank of an engine of SGLang 0.5.17, without its model."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(args)
    torch.cuda.set_device(0)
    address = f"tcp://127.0.0.1:{free_port()}"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="nccl", distributed_init_method=address)
    initialize_model_parallel(1, 1, 1, backend="nccl")
    initialize_moe_config(args)


class Backend:
    """One backend, in this process."""

    def __init__(self, name: str) -> None:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        load_plugins()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config(PRESETS["deepseek_v3", "tiny"], fp8=True)))
            start_rank(ServerArgs(model_path=folder, device="cuda", **BACKENDS[name]))
        self.quantization = BACKENDS[name]["quantization"]

    def make(self, experts: Experts) -> None:
        """The layer that the other methods measure."""
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
        from sglang.srt.layers.quantization import get_quantization_config

        self.experts, self.weights = experts, random_weights(experts, torch.device("cuda"))
        with torch.device("cuda"):
            self.layer = FusedMoE(
                num_experts=experts.experts,
                hidden_size=experts.hidden,
                intermediate_size=experts.intermediate,
                layer_id=0,
                top_k=experts.topk,
                params_dtype=torch.bfloat16,
                quant_config=get_quantization_config(self.quantization).from_config(QUANTIZATION),
                prefix="model.layers.0.mlp.experts",
                inplace=False,
            )
        for name, (values, scales) in zip(("w13", "w2"), self.weights, strict=True):
            getattr(self.layer, f"{name}_weight").data.copy_(values)
            getattr(self.layer, f"{name}_weight_scale_inv").data.copy_(scales)
        self.layer.quant_method.process_weights_after_loading(self.layer)

    def call(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        logits = torch.empty(0, device=x.device)  # no backend looks at them
        out: torch.Tensor = self.layer.forward_impl(x, StandardTopKOutput(weights, ids, logits))
        return out

    def compile(self, layers: Sequence[Experts], tokens: Sequence[int]) -> None:
        """Call each of the layers once for each number of tokens: most backends compile at their first calls."""
        gen = torch.Generator("cuda").manual_seed(0)
        for experts in layers:
            self.make(experts)
            with torch.inference_mode():
                for count in tokens:
                    x = torch.randn(count, experts.hidden, generator=gen, device="cuda").bfloat16()
                    self.call(x, *random_routing(gen, count, experts))
            torch.cuda.synchronize()

    def capture(self, tokens: int) -> float:
        """Prepare `measure` for so many tokens; the relative L2 distance of the first ones."""
        with torch.inference_mode():
            case = make_case(self.experts, self.weights, tokens)
            out = self.call(case.hidden_states.clone(), *case.routings[0])[:REFERENCE_TOKENS].float()
            calls: list[Callable[[], Any]] = [partial(self.call, case.hidden_states, *each) for each in case.routings]
            self.graph, self.calls = captured(calls), len(calls)
        return ((out - case.expected).norm() / case.expected.norm()).item()

    def measure(self) -> float:
        """Microseconds of a call in CUDA-graph replays, after a pause."""
        time.sleep(PAUSE_S)
        return replay_us({OURS: self.graph})[OURS] / self.calls

    def host(self, tokens: int) -> float:
        """Microseconds of the host for an eager call, with eight sets of tokens and ids in turn."""
        with torch.inference_mode():
            routings = [make_case(self.experts, self.weights, tokens) for _ in range(8)]
            arguments = [(case.hidden_states, *routing) for case in routings for routing in case.routings[:1]]
            return host_us(self.call, arguments * 1000, rounds=5)


class Processes:
    """The backends that have not failed, by name, each in a process of its own; `errors` of those that have."""

    def __init__(self, names: list[str]) -> None:
        self.errors: dict[str, str] = {}
        self.running = {name: EngineProcess(partial(Backend, name), {}) for name in names}
        for process in self.running.values():
            process.start()

    def wait_until_made(self) -> None:
        for name, process in list(self.running.items()):
            with self._errors(name):
                process.wait_until_made(TIMEOUT_S)

    def turns(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Returns what each backend answers, one after the other."""
        answers = {}
        for name, process in list(self.running.items()):
            with self._errors(name):
                answers[name] = process.call(method, *arguments, timeout=TIMEOUT_S)
        return answers

    def together(self, method: str, *arguments: Any) -> None:
        """Call all at the same time."""

        def call(name: str) -> None:
            with self._errors(name):
                self.running[name].call(method, *arguments, timeout=TIMEOUT_S)

        with ThreadPoolExecutor(len(BACKENDS)) as pool:
            list(pool.map(call, list(self.running)))

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Drop a backend that fails; the others continue."""
        try:
            yield
        except EngineError as error:
            print(f"{name}: {error}", flush=True)
            self.errors[name] = str(error)
            del self.running[name]


def measure(processes: Processes, tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns the figures of each backend at one number of tokens."""
    errors = processes.turns("capture", tokens)
    taken: dict[str, list[float]] = {name: [] for name in errors}
    for _ in range(rounds):
        for name, us in processes.turns("measure").items():
            taken[name].append(us)
    return {
        name: {
            "us": round(statistics.median(taken[name]), 2),
            "us_least": round(min(taken[name]), 2),
            "relative_l2": errors[name],
        }
        for name in processes.running
    }


def measure_host(processes: Processes, tokens: int) -> dict[str, dict[str, Any]]:
    return {name: {"host_us": round(us, 2)} for name, us in processes.turns("host", tokens).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    processes = Processes(options.backends)
    processes.wait_until_made()
    processes.together("compile", [HOST_LAYER], HOST_TOKENS)
    processes.together("compile", [LAYERS[name] for name in options.layers], options.tokens)
    rows: list[dict[str, Any]] = []
    packages = ("sglang", "sglang-kernel", "sgl-deep-gemm", "triton", "fp8moe-plugin")
    about = {name: installed(name) for name in packages}
    for name in ("host", *options.layers):
        processes.turns("make", HOST_LAYER if name == "host" else LAYERS[name])
        for tokens in HOST_TOKENS if name == "host" else options.tokens:
            figures = measure_host(processes, tokens) if name == "host" else measure(processes, tokens, options.rounds)
            print(
                name, tokens, *(f"{backend} {next(iter(row.values()))}" for backend, row in figures.items()), flush=True
            )
            rows += [{"layer": name, "tokens": tokens, "backend": backend} | row for backend, row in figures.items()]
            write_report(options.out, about | {"errors": processes.errors, "rows": rows})


if __name__ == "__main__":
    main()
