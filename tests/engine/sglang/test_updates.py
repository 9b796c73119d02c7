"""Any way in which weights reach a model of SGLang's: it holds those of one checkpoint, or it refuses to be used.

What a model holds is compared instead of what it says, so no engine runs; `test_engine.py` asks some.
"""

import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints.synthetic import write_checkpoint
from tests import faults
from tests.compressed import compress
from tests.engine.conftest import SHAPES
from tests.engine.damage import Change, only, poisoned
from tests.engine.sglang.conftest import ENVIRONMENT, ROOT
from tests.shared import built_once

pytestmark = pytest.mark.seam

ANSWER_S = 600
SEQUENCES = 125 if faults.FULL else 3  # of each of four kinds of models
STEPS = 5
KINDS = ("qwen3_moe-fp8", "qwen3_moe-compressed", "deepseek_v3-fp8", "deepseek_v3-bf16")
KEPT = "Nothing has been written"
DEAD = "cannot be used, so the engine ends at its next step"
LAST = "layers.0.self_attn.o_proj"  # the name of no other tensor of these layers comes later

BAD: dict[str, Change] = {
    "NaN": only(f"{LAST}.weight", poisoned),
    "shape": only(f"{LAST}.weight", lambda tensor: tensor[:128]),
    "dtype": lambda name, tensor: tensor.half() if f"{LAST}.weight" in name and tensor.element_size() == 1 else tensor,
    "negative": only(f"{LAST}.weight_scale", torch.neg),
    "unscaled": only(f"{LAST}.weight_scale", lambda tensor: None),
    "unweighted": only(f"{LAST}.weight", lambda tensor: None if tensor.element_size() == 1 else tensor),
}
OF_FP8 = ("dtype", "negative", "unscaled", "unweighted")


def write_variants(folder: Path) -> None:
    """`<kind>-first` and `<kind>-second` with other weights, `<kind>-<name>` of `BAD`, and `<kind>-cut`: its second
    file is incomplete."""
    for family in ("qwen3_moe", "deepseek_v3"):
        shape = replace(SHAPES[family], mtp_layers=0, yarn=True)
        for form in ("fp8", "bf16", "compressed"):
            kind = f"{family}-{form}"
            if kind not in KINDS:
                continue
            for seed, name in enumerate(("first", "second")):
                write_checkpoint(folder / f"{kind}-{name}", shape, fp8=form != "bf16", seed=seed)
                if form == "compressed":
                    compress(folder / f"{kind}-{name}")
            for name, change in BAD.items():
                if form != "bf16" or name not in OF_FP8:
                    write_changed(folder / f"{kind}-second", folder / f"{kind}-{name}", change)
            write_changed(folder / f"{kind}-second", folder / f"{kind}-cut", lambda name, tensor: tensor, files=2)
            last = max((folder / f"{kind}-cut").glob("*.safetensors"))
            os.truncate(last, last.stat().st_size - 1)


def write_changed(source: Path, folder: Path, change: Change, files: int = 1) -> None:
    shutil.copytree(source, folder)
    (shard,) = folder.glob("*.safetensors")
    changed = {name: change(name, tensor) for name, tensor in load_file(shard).items()}
    shard.unlink()
    kept = sorted((name, tensor.contiguous()) for name, tensor in changed.items() if tensor is not None)
    parts = {f"model-{i}.safetensors": dict(kept[i::files]) for i in range(files)}
    for name, tensors in parts.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, tensors in parts.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Model:
    """The model of a process of `tests.engine.sglang.updates`."""

    def __init__(self, folder: Path) -> None:
        self.folder, pipe = folder, subprocess.PIPE
        self.log = (folder / f"log-{os.getpid()}").open("wb")
        command = [sys.executable, "-m", "tests.engine.sglang.updates", str(folder)]
        environment = os.environ | ENVIRONMENT
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=self.log, text=True
        )
        self.fresh: dict[str, dict[str, str]] = {}

    def do(self, command: str, *arguments: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], ANSWER_S)[0], f"no answer to {command} {arguments}"
        line = self.process.stdout.readline()
        assert line, Path(self.log.name).read_text(errors="replace")[-4000:]
        return json.loads(line)

    def start(self, checkpoint: str, *load_format: str) -> None:
        assert self.do("start", checkpoint, *load_format) is None

    def held(self, checkpoint: str) -> dict[str, str]:
        """Returns what a model holds that was started on the checkpoint."""
        if checkpoint not in self.fresh:
            self.start(checkpoint)
            self.fresh[checkpoint] = self.do("step")
            self.do("keep", checkpoint)
        return self.fresh[checkpoint]

    def accept(self, *command: Any) -> None:
        answer = self.do(*command)
        assert answer is None or answer[0], (command, answer)

    def refuses(self, reason: str) -> bool:
        """Returns whether each step and each update is refused for this reason."""
        answers = [self.do("step"), self.do("disk", "qwen3_moe-fp8-first"), self.do("step")]
        return answers == [{"raised": f"CheckpointError: {reason}"}, [False, reason], answers[0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    model = Model(built_once(tmp_path_factory, "sglang_variants", write_variants))
    yield model
    model.process.kill()
    model.process.communicate()
    model.log.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load_format", ["presharded", "sharded_state"])
def test_formats_that_copy_whole_parameters_load_the_same(model, kind, load_format):
    """SGLang calls process_weights_after_loading before it copies them."""
    source, saved = f"{kind}-first", f"{kind}-{load_format}"
    held = model.held(source)
    model.start(source)
    shutil.copytree(model.folder / source, model.folder / saved)
    if load_format == "presharded":
        model.start(saved, load_format)
        assert (model.folder / saved / load_format).exists()
    else:
        (shard,) = (model.folder / saved).glob("*.safetensors")
        shard.unlink()
        model.do("save", saved)
    model.start(saved, load_format)
    assert model.do("step") == held


def test_a_model_without_any_tensor_is_not_served(model):
    name = "qwen3_moe-fp8-nothing"
    shutil.copytree(model.folder / "qwen3_moe-fp8-first", model.folder / name)
    (shard,) = (model.folder / name).glob("*.safetensors")
    save_file({"model.norm.weight": load_file(shard)["model.norm.weight"]}, shard, metadata={"format": "pt"})
    assert "qkv_proj.weight: a tensor is missing" in model.do("start", name)["raised"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_held_in_whichever_way_they_arrive(model, kind):
    held = {name: model.held(f"{kind}-{name}") for name in ("first", "second")}
    assert held["first"] != held["second"]
    for way, commands in ways(f"{kind}-second").items():
        model.start(f"{kind}-first")
        for command in commands:
            model.accept(*command)
        assert model.do("step") == held["second"], way


def ways(checkpoint: str, pattern: str = "") -> dict[str, list[list[Any]]]:
    """All ways to update a model; `pattern`: of the names that are passed."""
    parts = [rf"{pattern}.*\.\w*weight$", rf"{pattern}.*(scale|scale_inv|bias)$"]
    found = {
        "tensors": [["begin"], ["tensors", checkpoint, pattern], ["end"]],
        "buckets": [["begin"], *(["tensors", checkpoint, part] for part in parts), ["end"]],
        "flattened": [["begin"], ["flattened", checkpoint, pattern], ["end"]],
        "ipc": [["ipc", checkpoint, pattern, None]],
        "direct": [["begin"], *(["direct", checkpoint, part] for part in parts), ["end"]],
    }
    return found if pattern else {"disk": [["disk", checkpoint]], **found}


@pytest.mark.parametrize("kind", ["qwen3_moe-fp8", "qwen3_moe-compressed"])
def test_a_refused_tensor_is_not_written(model, kind):
    """SGLang itself would cast it, cut it or copy it. DeepSeek's models load tensors on the host in threads, so that
    the next ones may be written already."""
    held = model.held(f"{kind}-first")
    model.start(f"{kind}-first")
    refused = [
        ["tensors", f"{kind}-NaN", rf"{LAST}.weight$"],
        ["tensors", f"{kind}-shape", rf"{LAST}.weight$"],
        ["tensors", f"{kind}-dtype", rf"{LAST}.weight$"],
        ["tensors", f"{kind}-negative", rf"{LAST}.weight_scale"],
        ["tensors", "qwen3_moe-compressed-first" if kind.endswith("fp8") else "qwen3_moe-fp8-first", f"{LAST}.weight_"],
        ["direct", f"{kind}-first", f"{LAST}.weight$", "bfloat16"],
        ["direct", f"{kind}-first", f"{LAST}.weight_scale_inv$", "float64"],
        ["disk", "nowhere"],
    ]
    for command in refused:
        done, message = model.do(*command)
        assert (done, KEPT in message) == (False, True), (command, message)
        assert model.do("step") == held
    model.accept("disk", f"{kind}-second")
    assert model.do("step") == model.held(f"{kind}-second")


def test_a_part_of_a_layer_that_the_model_drops_is_refused(model):
    """SGLang fuses the two projections only if it gets both in one call."""
    model.start("deepseek_v3-fp8-first")
    for part in ("q_a_proj", "kv_a_proj_with_mqa"):
        answer = model.do("tensors", "deepseek_v3-fp8-second", rf"layers.0.*\.{part}")
        assert not answer[0]
        assert "arrived without" in answer[1]


class Updates(RuleBasedStateMachine):
    """Updates of a model, up to the first that leaves a mixture."""

    model: Model
    kind: str

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, str] | None = None  # what the model must hold; None: it refuses each step

    def begin(self) -> dict[str, str]:
        if self.held is None:
            self.held = self.model.held(f"{self.kind}-first")
            self.model.start(f"{self.kind}-first")
        return self.held

    @rule(data=st.data(), name=st.sampled_from(["first", "second"]), pattern=st.sampled_from(["", r"layers\.0\.self"]))
    def serve(self, data: st.DataObject, name: str, pattern: str) -> None:
        held, wanted = self.begin(), self.model.held(f"{self.kind}-{name}")
        commands = ways(f"{self.kind}-{name}", pattern)
        way = data.draw(st.sampled_from(sorted(commands)))
        for command in commands[way]:
            self.model.accept(*command)
        self.held = held | {key: of for key, of in wanted.items() if re.search(pattern, key)}
        assert self.model.do("step") == self.held

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        held = self.begin()
        bad = [*sorted(BAD.keys() - (OF_FP8 if self.kind.endswith("bf16") else ())), "cut", "lost"]
        name = data.draw(st.sampled_from(bad))
        if name == "lost":
            commands = [["ipc", f"{self.kind}-second", "", data.draw(st.integers(0, 9))]]
        else:
            commands = [["disk", f"{self.kind}-{name}"]]
            if name != "cut":
                pattern = data.draw(st.sampled_from(["", LAST]))
                found = ways(f"{self.kind}-{name}", pattern)
                del found["direct"]
                commands = found[data.draw(st.sampled_from(sorted(found)))]
        answers = [self.model.do(*command) for command in commands]
        reasons = [answer[1] for answer in answers if answer and not answer[0]]
        if not reasons:  # SGLang without sessions cannot know that no more will come
            assert commands[0] == ["begin"]
            reasons = [self.model.do("step")["raised"].removeprefix("CheckpointError: ")]
        if all(KEPT in reason for reason in reasons):
            assert self.model.do("step") == held
        else:
            assert DEAD in reasons[-1]
            assert self.model.refuses(reasons[-1])
            self.held = None


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_updates_leaves_one_set_of_weights_or_none(model, kind):
    class Machine(Updates):
        pass

    Machine.model, Machine.kind = model, kind
    settings = hypothesis.settings(
        hypothesis.settings.get_profile("ci"),
        max_examples=SEQUENCES,
        stateful_step_count=STEPS,
        phases=[hypothesis.Phase.generate],
    )
    run_state_machine_as_test(Machine, settings=settings)
