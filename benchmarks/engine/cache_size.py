"""`explain`'s KV cache beside what vLLM reports: "GPU KV cache size: N tokens". Needs a Hopper GPU and vLLM.

    python -m benchmarks.engine.cache_size QWEN DSV3 --gpu h200 --out benchmarks/results/cache_size-<date>.json

Each checkpoint is started under each setting, in a process of its own, with small CUDA graphs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import installed, write_report
from fp8moe_plugin.checkpoint.model import read_model
from warmup.choose import choose
from warmup.target import GPUS, Target

SETTINGS: dict[str, dict[str, Any]] = {
    "server": {"gpu_memory_utilization": 0.9, "max_num_batched_tokens": 8192, "max_model_len": 8192},
    "small": {
        "gpu_memory_utilization": 0.5,
        "max_num_batched_tokens": 2048,
        "max_model_len": 4096,
        "kv_cache_dtype": "fp8",
    },
}
START = """
import json, sys
from vllm import LLM
LLM(**json.loads(sys.argv[1]))
"""
REPORTED = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
LIMIT_S = 100


def reported(model: Path, setting: dict[str, Any]) -> int:
    """The tokens of KV cache that vLLM reports. Raises `RuntimeError` if it does not start."""
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8]}
    options = {"model": str(model), "quantization": "fp8moe", "compilation_config": graphs, **setting}
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps(options)],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    found = REPORTED.search(done.stdout + done.stderr)
    if done.returncode or not found:
        raise RuntimeError(f"vLLM did not start: {(done.stdout + done.stderr)[-2000:]}")
    return int(found[1].replace(",", ""))


def predicted(model: Path, setting: dict[str, Any], gpu: str) -> int:
    """The tokens of KV cache that `explain` expects on one GPU."""
    target = Target(
        gpu=gpu,
        gpus=1,
        utilization=setting["gpu_memory_utilization"],
        fp8_cache="kv_cache_dtype" in setting,
        max_model_len=setting["max_model_len"],
        max_tokens=setting["max_num_batched_tokens"],
    )
    (split,) = choose(read_model(model), target, source=str(model)).splits
    return split.cache_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--gpu", choices=GPUS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    points = []
    for model in given.models:
        for name, setting in SETTINGS.items():
            engine, ours = reported(model, setting), predicted(model, setting, given.gpu)
            points.append({"model": model.name, "setting": name, "vllm": engine, "explain": ours})
            print(
                f"{model.name:20s} {name:8s} vLLM {engine:12,d}  explain {ours:12,d}  {ours / engine - 1:+.2%}",
                flush=True,
            )
            write_report(given.out, {"vllm": installed("vllm"), "settings": SETTINGS, "points": points})


if __name__ == "__main__":
    main()
