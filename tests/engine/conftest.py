"""The tiny checkpoints, and the engines that the tests ask. A process starts several, one after the other."""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints.synthetic import PRESETS, write_checkpoint
from fp8moe_plugin.compare.cells import EAGER
from tests.compressed import BY_ROW, STATIC, requantize
from tests.conftest import has_hopper, vllm_builds
from tests.engine import tiny_gpt_oss
from tests.engine.generate import BEGINS
from tests.shared import built_once
from warmup.__main__ import main as warmup

ROOT = Path(__file__).parents[2]
# The experts write to the last layer's output: what is wrong with them shows, and no later router amplifies what FP8
# rounds. Scales that differ from block to block show where one is taken for another.
SHAPES = {f: replace(PRESETS[f, "tiny"], moe_layers=1, block_spread=1.0) for f in ("deepseek_v3", "qwen3_moe")}
# Two ranks have 192 channels each of an expert, shared ones too, and 288 of the dense layer's 576, 4.5 scale blocks.
SHAPES["deepseek_v3_odd"] = replace(SHAPES["deepseek_v3"], moe_intermediate=384, dense_intermediate=576)
SHAPES["deepseek_v3_ue8m0"] = replace(SHAPES["deepseek_v3"], ue8m0=True)
NARROW = "qwen3_moe_narrow"  # whose hidden size is not a multiple of a scale block: its experts are vLLM's
COMPILED = {"compilation_config": {"inductor_compile_config": {"reorder_for_peak_memory": False}}}
OURS = {"quantization": "fp8moe"}
TP2 = EAGER | {"tensor_parallel_size": 2}
EP2 = TP2 | {"enable_expert_parallel": True}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
# On CPUs with AMX tiles vLLM's attention frees kv_b_proj when it has rearranged it: nothing can be loaded over it.
RELOADABLE: dict[str, Any] = {} if has_hopper() else {"attention_config": {"backend": "CPU_MLA"}}

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="tensor parallelism needs two GPUs")
needs_compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++")), reason="torch.compile on a CPU needs a C++ compiler"
)


needs_attention_with_sinks = pytest.mark.skipif(
    has_hopper(), reason="on a GPU, vLLM's gpt-oss needs packages that are not installed here"
)


@dataclass(frozen=True)
class Engine:
    """What `tests.engine.generate` starts, lets answer, reloads from other checkpoints, and lets answer after each."""

    checkpoint: str
    arguments: dict[str, Any]
    reload: tuple[str, ...] = ()
    swapped: bool = False  # every expert takes its gate for its up projection


class Served(NamedTuple):
    """What an engine did."""

    answers: list[dict[str, Any]]
    refused: str | None  # the plugin's error, where it did not start
    log: str
    status: int  # of the process, which a failure in another process ends


# Of gpt-oss, where no test would skip them, and one that fails would end the others of its process.
GPT_OSS: dict[str, dict[str, Engine]] = {
    "ours": {"gpt_oss": Engine("gpt_oss-fp4", EAGER | OURS, ("gpt_oss-other", "gpt_oss-fp4"))},
    "without the plugin": {"gpt_oss twin": Engine("gpt_oss-bf16", EAGER)},
    "multiprocess": {"gpt_oss multiprocess": Engine("gpt_oss-fp4", EAGER | OURS)},
    "two ranks": {
        "gpt_oss tp2": Engine("gpt_oss-fp4", TP2 | OURS),
        "gpt_oss ep2": Engine("gpt_oss-fp4", EP2 | OURS),
    },
}
if has_hopper():
    GPT_OSS = {process: {} for process in GPT_OSS}
# Those of a process by their names. What may end it is started last.
PROCESSES: dict[str, dict[str, Engine]] = {
    "ours": {
        "deepseek_v3": Engine("deepseek_v3-fp8", EAGER | OURS),
        "deepseek_v3_ue8m0": Engine("deepseek_v3_ue8m0-fp8", EAGER | OURS),
        "qwen3_moe": Engine("qwen3_moe-fp8", EAGER | OURS),
        "qwen3_moe unquantized": Engine("qwen3_moe-bf16", EAGER),
        "qwen3_moe swapped": Engine("qwen3_moe-fp8", EAGER | OURS, swapped=True),
        "deepseek_v3 mtp": Engine("deepseek_v3-fp8", EAGER | OURS | MTP),
        "qwen3_moe by row": Engine("qwen3_moe-by-row", EAGER | OURS),
        "deepseek_v3 static": Engine("deepseek_v3-static", EAGER | OURS),
        NARROW: Engine(f"{NARROW}-bf16", EAGER | OURS),
        **GPT_OSS["ours"],
        "qwen3_moe without a scale": Engine("qwen3_moe-without-a-scale", EAGER | OURS),
    },
    "without the plugin": {
        **{f"{family} twin": Engine(f"{family}-bf16", EAGER) for family in (*SHAPES, NARROW)},
        **GPT_OSS["without the plugin"],
    },
    "compiled": {"deepseek_v3 compiled": Engine("deepseek_v3-fp8", COMPILED | OURS)},
    "multiprocess": {
        "deepseek_v3 unmerged": Engine("deepseek_v3-fp8", EAGER),
        **GPT_OSS["multiprocess"],
        "qwen3_moe multiprocess": Engine(
            "qwen3_moe-fp8", EAGER | {"quantization": "fp8"}, ("qwen3_moe-without-a-weight",)
        ),
    },
    "two ranks": {
        "deepseek_v3_odd tp2": Engine("deepseek_v3_odd-fp8", TP2 | OURS),
        "deepseek_v3_odd online": Engine(
            "deepseek_v3_odd-bf16", TP2 | OURS | RELOADABLE, ("deepseek_v3_odd-other", "deepseek_v3_odd-bf16")
        ),
        **GPT_OSS["two ranks"],
        "qwen3_moe ep2": Engine("qwen3_moe-fp8", EP2 | OURS, ("qwen3_moe-without-a-weight",)),
    },
    "two ranks of the other family": {"qwen3_moe tp2": Engine("qwen3_moe-fp8", TP2 | OURS)},
}
ENVIRONMENTS = {
    "multiprocess": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "FP8MOE_MERGE_SHARED_EXPERT": "0", "FP8MOE_TAKE_FP8": "1"},
    "without the plugin": {"VLLM_PLUGINS": ""},
    "ours": {"FP8MOE_FP4_EXPERTS": "fp8"},
    "compiled": {"TORCHDYNAMO_DISABLE": "0"},
}

Start = Callable[..., subprocess.CompletedProcess[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = _why_no_engine()
    for item in items:
        if item.path.parent == Path(__file__).parent:  # those in `sglang` have a conftest.py of their own
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
    """A folder with `<family>-fp8`, its unquantized twin `<family>-bf16`, what `convert` makes of the twin, and
    `<family>-other`, unquantized with other weights; and `qwen3_moe-without-a-scale` and `-weight` of an expert."""
    return built_once(tmp_path_factory, "engines", write_checkpoints)


def write_checkpoints(folder: Path) -> None:
    for name in ("gpt_oss-fp4", "gpt_oss-bf16", "gpt_oss-other"):
        tiny_gpt_oss.write(folder / name, not name.endswith("bf16"), "other" * name.endswith("other"))
    write_checkpoint(folder / f"{NARROW}-bf16", replace(SHAPES["qwen3_moe"], hidden=320), fp8=False)
    for family, shape in SHAPES.items():
        for kind in ("fp8", "bf16"):
            write_checkpoint(folder / f"{family}-{kind}", shape, fp8=kind == "fp8")
        write_checkpoint(folder / f"{family}-other", shape, fp8=False, seed=1)
        converted = ["convert", "--model", str(folder / f"{family}-bf16"), "--out", str(folder / f"{family}-converted")]
        assert warmup(converted) == 0
    for family, name, quantization in (("qwen3_moe", "by-row", BY_ROW), ("deepseek_v3", "static", STATIC)):
        shutil.copytree(folder / f"{family}-fp8", folder / f"{family}-{name}")
        requantize(folder / f"{family}-{name}", quantization)
    # Expert 11 is one of the second of two ranks.
    for name, tensor in (("scale", "3.down_proj.weight_scale_inv"), ("weight", "11.down_proj.weight")):
        lacking = folder / f"qwen3_moe-without-a-{name}"
        shutil.copytree(folder / "qwen3_moe-fp8", lacking)
        (shard,) = lacking.glob("*.safetensors")
        tensors = load_file(shard)
        del tensors[f"model.layers.0.mlp.experts.{tensor}"]
        save_file(tensors, shard, metadata={"format": "pt"})
        index = {"weight_map": dict.fromkeys(tensors, shard.name)}
        (lacking / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="session")
def environment_of_engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        # Of this run alone: what earlier versions of the plugin compiled proves nothing.
        "VLLM_CACHE_ROOT": str(built_once(tmp_path_factory, "vllm_cache", lambda _: None)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # of eager engines vLLM compiles only a part of its sampler, which takes seconds
    }


@pytest.fixture(scope="session")
def start(environment_of_engines: dict[str, str]) -> Start:
    def start(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"tests.engine.{script}", *map(str, arguments)]
        own = os.environ | environment_of_engines | environment
        return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=900)

    return start


@pytest.fixture(scope="session")
def engines(checkpoints: Path, start: Start) -> Callable[[str], Served]:
    """What the engine of a name did; the first test that asks for one of a process runs all of that process."""

    @functools.cache
    def process(name: str) -> subprocess.CompletedProcess[str]:
        engines = {name: asdict(engine) for name, engine in PROCESSES[name].items()}
        return start("generate", checkpoints, json.dumps(engines), **ENVIRONMENTS.get(name, {}))

    @functools.cache
    def engine(name: str) -> Served:
        (of,) = (of for of, engines in PROCESSES.items() if name in engines)
        done = process(of)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        said = [line for line in lines if line["engine"] == name]
        assert said, done.stderr[-4000:]
        _, _, log = done.stderr.partition(f"\n{BEGINS}{name}\n")
        log, _, _ = log.partition(f"\n{BEGINS}")
        answers = [line["answer"] for line in said if "answer" in line]
        return Served(answers, said[-1].get("refused"), log, done.returncode)

    return engine
