"""Any sequence of loads: an engine says and holds what one started on the last checkpoint would, or it refuses."""

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from safetensors.torch import load_file, save_file

from fp8moe_plugin.layers.unquantized import is_quantized
from tests import faults
from tests.engine.conftest import COMPILED, EAGER, ROOT, needs_compiler

Tensors = dict[str, torch.Tensor]
Change = Callable[[str, torch.Tensor], torch.Tensor | None]

ANSWER_S = 600
SEQUENCES = 125 if faults.FULL else 5  # of each of four kinds of engines
STEPS = 5
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}}
ARGUMENTS = {"eager": EAGER} | ({"graphs": GRAPHS} if torch.cuda.is_available() else {"compile": COMPILED})
EXPERT = "model.layers.0.mlp.experts.11.down_proj"
DENSE = "model.layers.0.self_attn.o_proj"
SCALE = "weight_scale_inv"


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    damaged = tensor.clone()
    damaged.view(torch.uint8)[-1, -2:] = 0xFF
    return damaged


def only(target: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    """A change of the tensors whose names begin so."""
    return lambda name, tensor: change(tensor) if name.startswith(target) else tensor


def lacking(target: str) -> Change:
    return only(target, lambda _: None)


def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Other weights and, where the checkpoint has them, other scales."""
    return tensor.roll(1, 0) if is_quantized(name.rpartition(".weight")[0]) else tensor


def rescaled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The same e4m3 weights under other scales; an unquantized checkpoint has the scales in its weights."""
    if not is_quantized(name.rpartition(".weight")[0]) or tensor.dtype == torch.float8_e4m3fn:
        return tensor
    return tensor * 2


GOOD: dict[str, Change] = {"first": lambda _, tensor: tensor, "moved": moved, "rescaled": rescaled}
MISSING = {
    "lacks an expert's weight": lacking(f"{EXPERT}.weight"),
    "lacks a dense weight": lacking(f"{DENSE}.weight"),
    "lacks all experts": lacking("model.layers.0.mlp.experts."),
}
MISSING_SCALES = {
    "lacks an expert's scales": lacking(f"{EXPERT}.{SCALE}"),
    "lacks dense scales": lacking(f"{DENSE}.{SCALE}"),
}
DAMAGED = {
    "NaN in an expert": only(f"{EXPERT}.weight", poisoned),
    "NaN in a dense layer": only(f"{DENSE}.weight", poisoned),
}
DAMAGED_SCALES = {
    "NaN in scales": only(f"{EXPERT}.{SCALE}", poisoned),
    "negative scales": only(f"{DENSE}.{SCALE}", torch.neg),
    "scales that overflow": only(f"{EXPERT}.{SCALE}", lambda scales: scales * 0 + 3e38),
    "a weight as bytes": only(f"{EXPERT}.weight", lambda weight: weight.view(torch.uint8)),
}
WAYS = ("reload", "load")
UNREADABLE = "a shard cut in half"
BAD = {
    "fp8": {"reload": MISSING | MISSING_SCALES | DAMAGED | DAMAGED_SCALES, "load": DAMAGED | DAMAGED_SCALES},
    "bf16": {"reload": MISSING | DAMAGED, "load": DAMAGED},
}


def write_variant(source: Path, folder: Path, change: Change) -> None:
    shutil.copytree(source, folder)
    (shard,) = folder.glob("*.safetensors")
    changed = {name: change(name, tensor) for name, tensor in load_file(shard).items()}
    kept: Tensors = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(kept, shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(kept, shard.name)}))


@pytest.fixture(scope="module")
def variants(checkpoints: Path) -> Path:
    """A folder with `<kind>-<name>` for each kind of checkpoint and each name of `GOOD` and `BAD`, and `UNREADABLE`."""
    folder = checkpoints / "variants"
    for kind, bad in BAD.items():
        for name, change in (GOOD | bad["reload"]).items():
            write_variant(checkpoints / f"qwen3_moe-{kind}", folder / f"{kind}-{name}", change)
        unreadable = folder / f"{kind}-{UNREADABLE}"
        shutil.copytree(folder / f"{kind}-first", unreadable)
        (shard,) = unreadable.glob("*.safetensors")
        os.truncate(shard, shard.stat().st_size // 2)
    return folder


class Host:
    """A process of `tests.engine.reloads`, for all kinds of engines: importing vLLM takes longer than starting one."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = os.environ | environment | {"TORCHDYNAMO_DISABLE": "0"}
        self.process = self.launch()

    def launch(self) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, "-m", "tests.engine.reloads"], subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, stdin=pipe, stdout=pipe, text=True)

    def renew(self) -> None:
        """Take a new process on a GPU: vLLM 0.25.1 gives the next engine the rotary embedding of this one, on meta."""
        if torch.cuda.is_available():
            self.end()
            self.process = self.launch()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], ANSWER_S)[0], f"no answer to {command}"
        answer: dict[str, Any] = json.loads(self.process.stdout.readline() or '{"refused": "the process ended"}')
        return answer


class Engines:
    """One engine at a time, started anew once it has refused."""

    def __init__(self, host: Host, variants: Path, mode: str, kind: str) -> None:
        self.host, self.variants, self.kind = host, variants, kind
        self.arguments = ARGUMENTS[mode] | {"quantization": "fp8moe"}
        self.fresh: dict[str, Any] = {}  # what an engine said that was started on the checkpoint
        self.seen: list[tuple[str, Any]] = []  # what engines said after they had loaded it
        self.failures: list[Exception] = []
        self.runs = False

    def do(self, command: str, name: str | None = None) -> dict[str, Any]:
        path = name and str(self.variants / f"{self.kind}-{name}")
        return self.host.ask({command: path, "arguments": self.arguments})

    def start(self) -> None:
        """On the checkpoint that no engine was started on yet, or else on the first."""
        name = next((name for name in GOOD if name not in self.fresh), "first")
        answer = self.do("start", name)
        assert "refused" not in answer, answer
        assert self.fresh.setdefault(name, answer) == answer
        self.runs = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """One of a sequence. Hypothesis repeats a sequence that fails, on engines in another state by then."""
        try:
            if not self.runs:
                self.start()
            yield
        except Exception as error:
            self.failures.append(error)
            raise


class Loads(RuleBasedStateMachine):
    """Good loads, up to the first that is refused: it ends an engine, and with it the sequence."""

    engines: Engines

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        good = [(self.serve, way, name) for way in WAYS for name in GOOD]
        bad = [(self.refuse, way, name) for way in WAYS for name in BAD[self.engines.kind][way]]
        bad.append((self.break_off, "reload", UNREADABLE))
        check, way, name = data.draw(st.sampled_from(good) | st.sampled_from(good) | st.sampled_from(bad))
        if not self.ended:
            with self.engines.step():
                check(way, name)

    def serve(self, way: str, name: str) -> None:
        answer = self.engines.do(way, name)
        assert "refused" not in answer, answer
        self.engines.seen.append((f"{way} {name}", answer))

    def refuse(self, way: str, bad: str) -> None:
        self.ended, self.engines.runs = True, False
        refused = self.engines.do(way, bad).get("refused", "")
        assert "Restart the engine" in refused, f"{way} of a checkpoint with {bad}: {refused or 'accepted'}"
        for command in (("ask", None), ("reload", "first"), ("load", "moved"), ("ask", None)):
            assert self.engines.do(*command) == {"refused": refused}, command
        self.engines.host.renew()

    def break_off(self, way: str, unreadable: str) -> None:
        """vLLM raises, and the layers wait for their tensors."""
        self.ended, self.engines.runs = True, False
        assert "SafetensorError" in self.engines.do(way, unreadable).get("raised", "")
        assert "the reload of its weights is unfinished" in self.engines.do("ask").get("refused", "")
        self.engines.host.renew()


@pytest.fixture(scope="module")
def host(environment_of_engines: dict[str, str]) -> Iterator[Host]:
    host = Host(environment_of_engines)
    yield host
    host.end()


@pytest.fixture
def engines(request: pytest.FixtureRequest, host: Host, variants: Path) -> Engines:
    return Engines(host, variants, *request.param)


@pytest.mark.parametrize(
    "engines",
    [
        pytest.param((mode, kind), id=f"{mode}-{kind}", marks=[needs_compiler] * (mode == "compile"))
        for mode in ARGUMENTS
        for kind in BAD
    ],
    indirect=True,
)
def test_an_engine_serves_the_last_checkpoint_or_refuses(engines):
    class Machine(Loads):
        pass

    Machine.engines = engines
    profile = hypothesis.settings(
        hypothesis.settings.get_profile("ci"),
        max_examples=SEQUENCES,
        stateful_step_count=STEPS,
        phases=[hypothesis.Phase.generate],  # to shrink a failure would start hundreds of engines
    )
    try:
        run_state_machine_as_test(Machine, settings=profile)
    except hypothesis.errors.HypothesisException:
        raise engines.failures[0] from None
    while len(engines.fresh) < len(GOOD):
        engines.start()
    assert len({json.dumps(answer) for answer in engines.fresh.values()}) == len(GOOD)
    assert engines.seen
    for step, answer in engines.seen:
        assert answer == engines.fresh[step.partition(" ")[2]], step
