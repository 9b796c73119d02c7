"""The tiny checkpoints, and engines that answer in processes of their own."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints.synthetic import PRESETS, write_checkpoint
from benchmarks.engine.small_engines import EAGER
from tests.conftest import has_hopper, vllm_builds
from warmup.__main__ import main as warmup

ROOT = Path(__file__).parents[2]
# The experts write to the last layer's output: what is wrong with them shows, and no later router amplifies what FP8
# rounds. Scales that differ from block to block show where one is taken for another.
SHAPES = {f: replace(PRESETS[f, "tiny"], moe_layers=1, block_spread=1.0) for f in ("deepseek_v3", "qwen3_moe")}
# Two ranks have 192 channels each of an expert, shared ones too, and 288 of the dense layer's 576, 4.5 scale blocks.
SHAPES["deepseek_v3_odd"] = replace(SHAPES["deepseek_v3"], moe_intermediate=384, dense_intermediate=576)
SHAPES["deepseek_v3_ue8m0"] = replace(SHAPES["deepseek_v3"], ue8m0=True)
MODES: dict[str, dict[str, Any]] = {
    "eager": EAGER,
    "compile": {"compilation_config": {"inductor_compile_config": {"reorder_for_peak_memory": False}}},
    "multiprocess": EAGER,
    "tp2": EAGER | {"tensor_parallel_size": 2},
    "ep2": EAGER | {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "mtp": EAGER | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
ENVIRONMENTS = {"multiprocess": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, "tp2": TWO_RANKS, "ep2": TWO_RANKS}

# On CPUs with AMX tiles vLLM's attention frees kv_b_proj when it has rearranged it: nothing can be loaded over it.
RELOADABLE: dict[str, Any] = {} if has_hopper() else {"attention_config": {"backend": "CPU_MLA"}}

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
    on_cpu = any("cpu" in build.name + build.version for build in vllm_builds())
    return None if on_cpu or has_hopper() else "needs a Hopper GPU, or vLLM's CPU build"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `<family>-fp8`, its unquantized twin `<family>-bf16`, what `convert` makes of that one, and
    `<family>-other`, unquantized with other weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family, shape in SHAPES.items():
        for kind in ("fp8", "bf16"):
            write_checkpoint(folder / f"{family}-{kind}", shape, fp8=kind == "fp8")
        write_checkpoint(folder / f"{family}-other", shape, fp8=False, seed=1)
        converted = ["convert", "--model", str(folder / f"{family}-bf16"), "--out", str(folder / f"{family}-converted")]
        assert warmup(converted) == 0
    return folder


@pytest.fixture(scope="session")
def environment_of_engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = str(tmp_path_factory.mktemp("vllm_cache"))  # what earlier versions of the plugin compiled proves nothing
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": cache}


@pytest.fixture(scope="session")
def start(environment_of_engines: dict[str, str]) -> Start:
    def start(
        model: Path,
        mode: str,
        environment: dict[str, str] | None = None,
        script: str = "generate",
        **arguments: object,
    ) -> Done:
        command = [sys.executable, "-m", f"tests.engine.{script}", str(model), json.dumps(MODES[mode] | arguments)]
        common = environment_of_engines | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        own = common | ENVIRONMENTS.get(mode, {}) | (environment or {})
        return subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=900)

    return start


@pytest.fixture(scope="session")
def engines(
    request: pytest.FixtureRequest, checkpoints: Path, start: Start
) -> Iterator[Callable[[str, str], Future[Done]]]:
    """Our engine on the FP8 checkpoint, or the plain "twin" on the BF16 one. The selected tests' run two at a time.

    Mode "tp2_online" is ours on the BF16 one, over which it loads the other weights, and then the first again.
    """
    with ThreadPoolExecutor(2) as pool:

        @functools.cache
        def engine(family: str, mode: str) -> Future[Done]:
            if mode == "twin":
                return pool.submit(start, checkpoints / f"{family}-bf16", "eager")
            if mode == "tp2_online":
                reload = [str(checkpoints / f"{family}-{kind}") for kind in ("other", "bf16")]
                arguments = RELOADABLE | {"quantization": "fp8moe", "reload": reload}
                return pool.submit(start, checkpoints / f"{family}-bf16", "tp2", **arguments)
            return pool.submit(start, checkpoints / f"{family}-fp8", mode, quantization="fp8moe")

        for item in request.session.items:
            parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
            if {"family", "mode"} <= parameters.keys():
                engine(parameters["family"], "twin")
                engine(parameters["family"], parameters["mode"])
        yield engine
