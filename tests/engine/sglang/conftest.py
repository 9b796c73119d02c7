"""The tiny checkpoints, and the engines of SGLang that the tests ask, on a CPU.

SGLang's whole engine runs there, with stubs in the place of two packages that have no build for it (`stubs`). One
process imports SGLang and forks once for each engine.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints.synthetic import write_checkpoint
from tests.compressed import BY_ROW, STATIC, compress, requantize
from tests.engine.conftest import SHAPES
from tests.engine.generate import BEGINS
from tests.shared import built_once
from warmup.__main__ import main as warmup

ROOT = Path(__file__).parents[3]
STUBS = Path(__file__).parent / "stubs"
FAMILIES = ("qwen3_moe", "deepseek_v3", "deepseek_v3_odd", "deepseek_v3_ue8m0")
OURS = {"quantization": "fp8moe"}
TP2 = OURS | {"tp_size": 2}
DP2 = TP2 | {"dp_size": 2, "enable_dp_attention": True}  # attention of each rank has requests of its own
A_CORE_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # for two ranks
WITHOUT_THE_PLUGIN = {"SGLANG_PLUGINS": "sglang_on_cpu"}
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles parts of the router, which takes longer than all else
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, STUBS))),
}


@dataclass(frozen=True)
class Engine:
    """What `generate` starts, lets answer, updates from other checkpoints, and lets answer after each."""

    checkpoint: str
    arguments: dict[str, Any]
    updates: tuple[str, ...] = ()
    swapped: bool = False  # every expert takes its gate for its up projection
    environment: dict[str, str] = field(default_factory=dict)


class Served(NamedTuple):
    """What an engine did."""

    answers: list[dict[str, Any]]
    log: str
    status: int  # of its process


ENGINES = {
    "qwen3_moe": Engine("qwen3_moe-fp8", OURS, ("qwen3_moe-other", "qwen3_moe-fp8")),
    "qwen3_moe tp2": Engine("qwen3_moe-fp8", TP2, environment=A_CORE_EACH),
    "qwen3_moe ep2": Engine("qwen3_moe-fp8", TP2 | {"ep_size": 2}, environment=A_CORE_EACH),
    "qwen3_moe swapped": Engine("qwen3_moe-fp8", OURS, swapped=True),
    "qwen3_moe unquantized": Engine("qwen3_moe-bf16", {}),
    "deepseek_v3": Engine("deepseek_v3-fp8", {}, environment={"FP8MOE_TAKE_FP8": "1"}),
    "deepseek_v3_ue8m0": Engine("deepseek_v3_ue8m0-fp8", OURS),
    "deepseek_v3_odd tp2": Engine("deepseek_v3_odd-fp8", TP2, environment=A_CORE_EACH),
    **{f"{family} twin": Engine(f"{family}-bf16", {}, environment=WITHOUT_THE_PLUGIN) for family in FAMILIES},
    "qwen3_moe online": Engine("qwen3_moe-bf16", OURS, ("qwen3_moe-bf16",)),
    "qwen3_moe compressed": Engine(
        "qwen3_moe-fp8-compressed", OURS, ("qwen3_moe-other-compressed", "qwen3_moe-fp8-compressed")
    ),
    "qwen3_moe compressed ep2": Engine("qwen3_moe-fp8-compressed", TP2 | {"ep_size": 2}, environment=A_CORE_EACH),
    "deepseek_v3 compressed": Engine("deepseek_v3-fp8-compressed", OURS),
    "qwen3_moe by row": Engine("qwen3_moe-by-row", OURS, ("qwen3_moe-by-row",)),
    "deepseek_v3 static": Engine("deepseek_v3-static", OURS),
    "qwen3_moe converted": Engine("qwen3_moe-converted", OURS),
    "deepseek_v3_odd online": Engine("deepseek_v3_odd-bf16", TP2, environment=A_CORE_EACH),
    "without a scale": Engine("qwen3_moe-without-a-scale", OURS),
    "other dtype": Engine("qwen3_moe-fp8", OURS, ("nowhere", "qwen3_moe-bf16")),
    "lacking ep2": Engine(
        "qwen3_moe-fp8", TP2 | {"ep_size": 2}, ("qwen3_moe-without-a-scale",), environment=A_CORE_EACH
    ),
    "lora": Engine("qwen3_moe-fp8", OURS | {"enable_lora": True, "lora_paths": ["adapter"]}),
    "runner backend": Engine("qwen3_moe-fp8", OURS | {"moe_runner_backend": "triton"}),
}
if list(metadata.distributions(name="sglang")) and metadata.version("sglang") >= "0.5.23":
    # Earlier ones pin memory for DP attention, which needs a GPU.
    ENGINES["qwen3_moe dp2"] = Engine("qwen3_moe-fp8", DP2, environment=A_CORE_EACH)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and importlib.util.find_spec("sglang") is None:
            item.add_marker(pytest.mark.skip(reason="needs SGLang (make sglang)"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `<family>-fp8` and its unquantized twin `<family>-bf16`; `qwen3_moe-other`, with other weights;
    `qwen3_moe-without-a-scale` of an expert."""
    return built_once(tmp_path_factory, "sglang_engines", write_checkpoints)


def write_checkpoints(folder: Path) -> None:
    for family in FAMILIES:
        shape = replace(SHAPES[family], mtp_layers=0, yarn=True)
        for kind in ("fp8", "bf16"):
            write_checkpoint(folder / f"{family}-{kind}", shape, fp8=kind == "fp8")
    write_checkpoint(folder / "qwen3_moe-other", SHAPES["qwen3_moe"], seed=1)
    for name in ("deepseek_v3-fp8", "qwen3_moe-fp8", "qwen3_moe-other"):
        compressed = folder / f"{name}-compressed"
        shutil.copytree(folder / name, compressed)
        compress(compressed)
    for family, name, quantization in (("qwen3_moe", "by-row", BY_ROW), ("deepseek_v3", "static", STATIC)):
        shutil.copytree(folder / f"{family}-fp8", folder / f"{family}-{name}")
        requantize(folder / f"{family}-{name}", quantization)
    twin, converted = str(folder / "qwen3_moe-bf16"), str(folder / "qwen3_moe-converted")
    assert warmup(["convert", "--model", twin, "--out", converted]) == 0
    lacking = folder / "qwen3_moe-without-a-scale"
    shutil.copytree(folder / "qwen3_moe-fp8", lacking)
    (shard,) = lacking.glob("*.safetensors")
    tensors = load_file(shard)
    del tensors["model.layers.0.mlp.experts.3.down_proj.weight_scale_inv"]
    save_file(tensors, shard, metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, shard.name)}
    (lacking / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="session")
def engines(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """What the engine of a name did; the first test that asks, of all workers, runs all of them."""

    @functools.cache
    def done() -> tuple[str, str]:
        folder = built_once(tmp_path_factory, "sglang_answers", functools.partial(run_engines, checkpoints))
        return (folder / "stdout").read_text(), (folder / "stderr").read_text()

    @functools.cache
    def engine(name: str) -> Served:
        stdout, stderr = done()
        said = [line for line in map(json.loads, stdout.splitlines()) if line["engine"] == name]
        assert said, stderr[-4000:]
        _, _, log = stderr.partition(f"\n{BEGINS}{name}\n")
        log, _, _ = log.partition(f"\n{BEGINS}")
        return Served([line["answer"] for line in said if "answer" in line], log, said[-1]["status"])

    return engine


def run_engines(checkpoints: Path, folder: Path) -> None:
    engines = json.dumps({name: asdict(engine) for name, engine in ENGINES.items()})
    command = [sys.executable, "-m", "tests.engine.sglang.generate", str(checkpoints), engines]
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=stdout, stderr=stderr, timeout=900)
