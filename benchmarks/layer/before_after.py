"""Compare two versions of the package in one process on one GPU: the bits and the time of the layer, and the host cost.

    python -m pip install --no-deps --target OLD <wheel before the change>
    python -m benchmarks.layer.before_after --before OLD --out benchmarks/results/before_after-<date>.json

`after` is the package that this process imports. Each point captures one CUDA graph per version, over the same
tensors, and replays them in turns. `host_us` is the median time until an eager call of one token returns.

To compare compilers, OLD is the same package, and `--before-bundle` a bundle of kernels that the other one compiled.
"""

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer.host_cost import host_us
from benchmarks.report import write_report
from fp8moe_plugin.bench.layer import make_case, random_weights
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.settings import settings
from fp8moe_plugin.testing import captured, replay_us

LAYERS = {
    "dsv3-ep1": Experts(1, 256, 8, 7168, 2048),
    "dsv3-tp8": Experts(1, 256, 8, 7168, 256),
    "qwen3-30b": Experts(1, 128, 8, 2048, 768),
}
HOST_LAYER = Experts(1, 256, 8, 256, 128)
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384)
PACKAGE = "fp8moe_plugin"

FusedMoe = Callable[..., torch.Tensor]


def load_version(folder: Path, bundle: Path | None = None) -> FusedMoe:
    """Returns `fused_moe` of the package in a folder, next to the one that is imported already.

    Args:
        bundle: of its kernels.
    """
    settings()  # which keeps what it has read: from here on FP8MOE_BUNDLE is for the other version
    if bundle:
        os.environ["FP8MOE_BUNDLE"] = str(bundle)
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == PACKAGE}
    sys.path.insert(0, str(folder))
    try:
        ops = importlib.import_module(f"{PACKAGE}.ops")
        if not Path(str(ops.__file__)).is_relative_to(folder.resolve()):
            raise SystemExit(f"{folder} holds no {PACKAGE}: install the wheel there with pip's --target.")
        new = (folder / PACKAGE / "launches").is_dir()
        lists = importlib.import_module(f"{PACKAGE}.{'launches.kernel_sets' if new else 'plan'}")
        compiler = importlib.import_module(f"{PACKAGE}.jit.compiler")
        for key in lists.all_kernels():  # reads the sources while the package's name still leads to this folder
            compiler.translation_unit(key)
        return ops.fused_moe
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules.update(ours)


def compare(versions: dict[str, FusedMoe], experts: Experts, weights: Any, tokens: int) -> dict[str, Any]:
    case = make_case(experts, weights, tokens)

    def calls(layer: FusedMoe, outs: list[torch.Tensor]) -> list[Callable[[], Any]]:
        return [
            lambda w=w, ids=ids, out=out: layer(case.hidden_states, *weights.w13, *weights.w2, w, ids, out=out)
            for (w, ids), out in zip(case.routings, outs, strict=True)
        ]

    outs = {name: [torch.empty_like(case.hidden_states) for _ in case.routings] for name in versions}
    times = replay_us({name: captured(calls(layer, outs[name])) for name, layer in versions.items()})
    equal = all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(*outs.values(), strict=True))
    per_call = {f"{name}_us": round(value / len(case.routings), 2) for name, value in times.items()}
    return {"tokens": tokens, **per_call, "ratio": round(times["after"] / times["before"], 4), "equal": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder that holds the package before the change")
    parser.add_argument("--before-bundle", type=Path, help="bundle whose kernels the version before the change takes")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    versions = {"before": load_version(options.before, options.before_bundle), "after": fused_moe}
    device = torch.device("cuda")
    results: dict[str, Any] = {"layers": {}, "host_us": {}}
    for name in options.layers:
        weights = random_weights(LAYERS[name], device)
        results["layers"][name] = points = []
        for tokens in options.tokens:
            points.append(compare(versions, LAYERS[name], weights, tokens))
            print(name, *(f"{key} {value}" for key, value in points[-1].items()), flush=True)
        del weights
    weights = random_weights(HOST_LAYER, device)
    case = make_case(HOST_LAYER, weights, 1)
    for _ in range(2):  # in turns
        for name, layer in versions.items():
            args = case.hidden_states, *weights.w13, *weights.w2, *case.routings[0]
            cost = host_us(layer, itertools.repeat(args))
            results["host_us"].setdefault(name, []).append(round(cost, 2))
    print("host us", results["host_us"])
    write_report(options.out, results)


if __name__ == "__main__":
    main()
