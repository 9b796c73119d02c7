"""Seconds until `vllm serve` is ready with empty and with full caches, and whether a bundle avoids compilation.

python -m benchmarks.engine.serve_ready CHECKPOINT --bundle kernels.tar --out benchmarks/results/serve_ready-<date>.json
python -m benchmarks.engine.serve_ready CHECKPOINT --bundle kernels.tar --engines bundle --requests --out ...

The plugin serves from the bundle under FP8MOE_JIT=forbid, without HOME or a cache folder, and is compared with vLLM's
own fp8. All caches of vLLM, Triton, torch and DeepGEMM are empty at a cold start and full at a warm one. `--requests`
sends the cold server a prefill of every length up to the longest step, and a batch of every CUDA graph size.
"""

import argparse
import os
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from benchmarks.engine.serve_demo import (
    IN_USE,
    DemoError,
    free_port,
    log_lines,
    log_text,
    post,
    server,
    wait_until_ready,
)
from benchmarks.report import write_report

MAX_TOKENS = 8192
LENGTHS = range(1, MAX_TOKENS + 1)
CAPTURE_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
OPTIONS = ["--max-model-len", "8200", "--max-num-batched-tokens", str(MAX_TOKENS), "--max-num-seqs", "512"]
OPTIONS += ["--no-enable-prefix-caching", "--gpu-memory-utilization", "0.6", "--host", "127.0.0.1"]
OPTIONS += ["--cudagraph-capture-sizes", *map(str, CAPTURE_SIZES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder of a block-FP8 MoE checkpoint with a tokenizer")
    parser.add_argument("--bundle", type=Path, required=True, help="its kernels, from fp8moe-warmup bundle")
    parser.add_argument("--engines", nargs="+", default=["bundle", "fp8"], choices=["bundle", "fp8"])
    parser.add_argument("--requests", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.pop("HOME", None)
    results: dict[str, object] = {
        "vllm": metadata.version("vllm"),
        "checkpoint": args.checkpoint.name,
        "options": OPTIONS,
    }
    for engine in args.engines:
        with tempfile.TemporaryDirectory() as caches:
            for start in ("cold", "warm"):
                found = measure(engine, args, Path(caches), busy=args.requests and start == "cold")
                results[f"{engine} {start}"] = found
                print(f"{engine} {start}: {found}", flush=True)
                write_report(args.out, results)


def measure(engine: str, args: argparse.Namespace, caches: Path, busy: bool) -> dict[str, object]:
    """Start a server and stop it; with `busy`, send all requests in between."""
    address = f"http://127.0.0.1:{free_port()}"
    quantization = "fp8" if engine == "fp8" else "fp8moe"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(args.checkpoint), *OPTIONS]
    command += ["--quantization", quantization, "--port", address.rpartition(":")[2]]
    result: dict[str, object] = {}
    begin = time.monotonic()
    with server(command, environment(engine, args.bundle, caches)) as process:
        wait_until_ready(process, address)
        result["ready_s"] = round(time.monotonic() - begin, 1)
        if busy:
            result |= send_all(address, str(args.checkpoint))
        if process.poll() is not None:
            raise DemoError("the server ended while it was answering requests")
    if engine == "bundle":
        result["log"] = [line[line.index(IN_USE) :] for line in log_lines() if IN_USE in line]
        result["compiled"] = log_text().count("fp8moe: compiled ")
    return result


def environment(engine: str, bundle: Path, caches: Path) -> dict[str, str]:
    """Environment with every cache in one folder, and for the plugin only the bundle."""
    folders = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    folders |= {"DG_JIT_CACHE_DIR": "deep_gemm", "CUDA_CACHE_PATH": "cuda"}
    found = {name: str(caches / folder) for name, folder in folders.items()}
    if engine == "bundle":
        found |= {"FP8MOE_BUNDLE": str(bundle), "FP8MOE_JIT": "forbid", "FP8MOE_CACHE_DIR": "/nonexistent"}
    return found | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def send_all(address: str, model: str) -> dict[str, object]:
    """Returns a prefill of each length, then a batch of each size that decodes a few steps."""
    begin = time.monotonic()
    for length in LENGTHS:
        ask(address, model, [[1 + i % 1000 for i in range(length)]], 1)
    for size in CAPTURE_SIZES:
        ask(address, model, [[1 + i, 2] for i in range(size)], 4)
    seconds = round(time.monotonic() - begin, 1)
    return {"prefill_lengths": [LENGTHS[0], LENGTHS[-1]], "batch_sizes": CAPTURE_SIZES, "requests_s": seconds}


def ask(address: str, model: str, prompts: list[list[int]], tokens: int) -> None:
    body = {"model": model, "prompt": prompts, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    choices = post(f"{address}/v1/completions", body)["choices"]
    if len(choices) != len(prompts):
        raise DemoError(f"{len(prompts)} prompts got {len(choices)} answers")


if __name__ == "__main__":
    main()
