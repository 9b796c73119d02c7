"""One layer of experts through SGLang's `FusedMoE`: our method and SGLang's own backends in turns, on one GPU.

    python -m benchmarks.layer.sglang_layer --out benchmarks/results/sglang_layer-<date>.json

SGLang chooses a backend by settings of the process, so each has one of its own. All get the same weights, tokens and
routings. `us` is the median of the rounds, each of them CUDA-graph replays after a pause; `relative_l2` the distance
from float32 math on unquantized activations. `host_us` is the host's time of an eager call, measured on a layer that is
small enough for the GPU to keep up.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints.synthetic import PRESETS, config
from benchmarks.engine.process import EngineError, EngineProcess
from benchmarks.layer.host_cost import host_us
from benchmarks.report import installed, sources_sha256, write_report
from fp8moe_plugin.bench.layer import REFERENCE_TOKENS, TOKENS, make_case, random_weights, time_graph
from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.testing import captured

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


class Backend:
    """One backend, in this process."""

    def __init__(self, name: str) -> None:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        from tests.layers.sglang.process import start

        load_plugins()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config(PRESETS["deepseek_v3", "tiny"], fp8=True)))
            start(ServerArgs(model_path=folder, device="cuda", **BACKENDS[name]))
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

    def capture(self, tokens: int) -> float:
        """Prepare `measure` for so many tokens; the relative L2 distance of the first ones."""
        with torch.inference_mode():
            case = make_case(self.experts, self.weights, tokens)
            out = self.call(case.hidden_states.clone(), *case.routings[0])[:REFERENCE_TOKENS].float()
            calls: list[Callable[[], Any]] = [partial(self.call, case.hidden_states, *each) for each in case.routings]
            self.graph, self.calls = captured(calls), len(calls)
        return ((out - case.expected).norm() / case.expected.norm()).item()

    def measure(self) -> float:
        """Microseconds of a call in CUDA-graph replays."""
        return time_graph(self.graph) / self.calls

    def host(self, tokens: int) -> float:
        """Microseconds of the host for an eager call, with eight sets of tokens and ids in turn."""
        with torch.inference_mode():
            routings = [make_case(self.experts, self.weights, tokens) for _ in range(8)]
            arguments = [(case.hidden_states, *routing) for case in routings for routing in case.routings[:1]]
            return host_us(self.call, arguments * 1000, rounds=5)


def turns(processes: dict[str, EngineProcess], method: str, *arguments: Any) -> dict[str, Any]:
    """What each process answers; one that fails is out, and the reason is its answer."""
    found: dict[str, Any] = {}
    for name in list(processes):
        try:
            found[name] = processes[name].call(method, *arguments, timeout=TIMEOUT_S)
        except EngineError as error:
            print(f"{name}: {error}", flush=True)
            del processes[name]
            found[name] = str(error)
    return found


def measure(processes: dict[str, EngineProcess], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of all backends at one number of tokens."""
    errors = turns(processes, "capture", tokens)
    rows = {name: {"tokens": tokens, "backend": name, "relative_l2": error} for name, error in errors.items()}
    taken: dict[str, list[float]] = {name: [] for name in processes}
    for _ in range(rounds):
        for name, us in turns(processes, "measure").items():
            taken[name].append(us)
    for name in processes:
        rows[name] |= {"us": round(statistics.median(taken[name]), 2), "us_least": round(min(taken[name]), 2)}
    return list(rows.values())


def host(processes: dict[str, EngineProcess], tokens: int) -> list[dict[str, Any]]:
    found = turns(processes, "host", tokens)
    return [{"tokens": tokens, "backend": name, "host_us": us} for name, us in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    processes = {name: EngineProcess(partial(Backend, name), {}) for name in options.backends}
    for process in processes.values():
        process.start()
    for name in list(processes):
        try:
            processes[name].wait_until_made(TIMEOUT_S)
        except EngineError as error:
            print(f"{name}: {error}", flush=True)
            del processes[name]
    rows: list[dict[str, Any]] = []
    packages = ("sglang", "sglang-kernel", "sgl-deep-gemm", "triton", "fp8moe-plugin")
    about = {name: installed(name) for name in packages} | {"sources_sha256": sources_sha256()}
    for name in ("host", *options.layers):
        turns(processes, "make", HOST_LAYER if name == "host" else LAYERS[name])
        for tokens in HOST_TOKENS if name == "host" else options.tokens:
            found = host(processes, tokens) if name == "host" else measure(processes, tokens, options.rounds)
            print(name, tokens, *(f"{row['backend']} {row.get('us', row.get('host_us'))}" for row in found), flush=True)
            rows += [{"layer": name} | row for row in found]
            write_report(options.out, about | {"rows": rows})


if __name__ == "__main__":
    main()
