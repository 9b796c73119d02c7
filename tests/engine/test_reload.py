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
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from safetensors.torch import load_file, save_file

from fp8moe_plugin.compare.cells import EAGER
from fp8moe_plugin.layers.unquantized import is_quantized
from tests import faults
from tests.engine.conftest import COMPILED, RELOADABLE, ROOT, needs_compiler
from tests.engine.damage import Change, only, poisoned
from tests.processes import kill_session

Tensors = dict[str, torch.Tensor]

ANSWER_S = 600
SEQUENCES = 42 if faults.FULL else 5  # of each of twelve kinds of engines; runs in part take five kinds
MULTIPROCESS_SEQUENCES = 42 if faults.FULL else 2  # they take longer to start
STEPS = 5
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}}
FAST = "graphs" if torch.cuda.is_available() else "compile"
ARGUMENTS = {"eager": EAGER, FAST: GRAPHS if torch.cuda.is_available() else COMPILED, "multiprocess": EAGER}
MULTIPROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
EXPERT = "mlp.experts.11.down_proj"
DENSE = "model.layers.0.self_attn.o_proj"
SCALE = "weight_scale_inv"
ATTENTION, REST = PARTS = ("self_attn", "mlp")


def lacking(target: str) -> Change:
    return only(target, lambda _: None)


def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Other weights and, where the checkpoint has them, other scales."""
    return tensor.roll(1, 0) if is_quantized(name.rpartition(".weight")[0]) else tensor


def rescaled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same e4m3 weights under other scales; an unquantized checkpoint has the scales in its weights."""
    if not is_quantized(name.rpartition(".weight")[0]) or tensor.dtype == torch.float8_e4m3fn:
        return tensor
    return tensor * 2


GOOD: dict[str, Change] = {"first": lambda _, tensor: tensor, "moved": moved, "rescaled": rescaled}
MISSING = {
    "lacks an expert's weight": lacking(f"{EXPERT}.weight"),
    "lacks a dense weight": lacking(f"{DENSE}.weight"),
    "lacks all experts": lacking("mlp.experts."),
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
ALL_MISSING, ALL_DAMAGED = MISSING | MISSING_SCALES, DAMAGED | DAMAGED_SCALES
BAD = {
    "fp8": {"reload": ALL_MISSING | ALL_DAMAGED, "load": ALL_DAMAGED},
    "bf16": {"reload": MISSING | DAMAGED, "load": DAMAGED},
}
SOURCES = {
    "fp8": "qwen3_moe-fp8",
    "bf16": "qwen3_moe-bf16",
    "mla-fp8": "deepseek_v3-fp8",
    "mla-bf16": "deepseek_v3-bf16",
}
KINDS = [(mode, kind) for mode in ARGUMENTS for kind in SOURCES]
IN_PART = [("eager", "fp8"), ("eager", "bf16"), ("eager", "mla-fp8"), (FAST, "fp8"), ("multiprocess", "mla-bf16")]


class Held(NamedTuple):
    """Which checkpoints the weights of an engine are from, by its parts."""

    attention: str
    rest: str

    def __str__(self) -> str:
        return self.attention if self.attention == self.rest else f"{self.attention} with the rest {self.rest}"


def write_variant(source: Path, folder: Path, change: Change) -> None:
    shutil.copytree(source, folder)
    (shard,) = folder.glob("*.safetensors")
    changed = {name: change(name, tensor) for name, tensor in load_file(shard).items()}
    kept: Tensors = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(kept, shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(kept, shard.name)}))


def write_mixture(folder: Path, attention: Path, rest: Path) -> None:
    other = load_file(next(attention.glob("*.safetensors")))
    write_variant(rest, folder, lambda name, tensor: other[name] if ATTENTION in name else tensor)


@pytest.fixture(scope="module")
def variants(checkpoints: Path) -> Path:
    """A folder with `<kind>-<name>` for each kind of checkpoint and each name of `GOOD` and `BAD`, and `UNREADABLE`."""
    folder = checkpoints / "variants"
    for kind in sorted({kind for _, kind in (KINDS if faults.FULL else IN_PART)}):
        for name, change in (GOOD | BAD[kind.removeprefix("mla-")]["reload"]).items():
            write_variant(checkpoints / SOURCES[kind], folder / f"{kind}-{name}", change)
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
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )

    def renew(self) -> None:
        """Take a new process on a GPU: vLLM 0.25.1 gives the next engine the rotary embedding of this one, on meta."""
        if torch.cuda.is_available():
            self.end()
            self.process = self.launch()

    def end(self) -> None:
        kill_session(self.process)
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
        self.host, self.variants, self.kind, self.mode = host, variants, kind, mode
        reloadable = RELOADABLE if kind.startswith("mla") else {}
        self.arguments = ARGUMENTS[mode] | reloadable | {"quantization": "fp8moe"}
        self.bad = BAD[kind.removeprefix("mla-")]
        self.fresh: dict[Held, Any] = {}  # what an engine said that was started on the checkpoint
        self.seen: list[tuple[str, Held, Any]] = []  # what engines said after a load, and what they held then
        self.failures: list[Exception] = []
        self.runs = False
        self.held = Held("first", "first")

    def do(self, command: str, name: str | None = None, **how: Any) -> dict[str, Any]:
        path = name and str(self.variants / f"{self.kind}-{name}")
        return self.host.ask({command: path, "arguments": self.arguments, "how": how})

    def start(self, held: Held | None = None) -> None:
        """On the given checkpoint; if none is, on one that no engine was started on yet, or else on the first."""
        names = [name for name in GOOD if Held(name, name) not in self.fresh] or ["first"]
        held = held or Held(names[0], names[0])
        folder = self.variants / f"{self.kind}-{held}"
        if not folder.exists():
            write_mixture(folder, *(self.variants / f"{self.kind}-{name}" for name in held))
        answer = self.do("start", str(held))
        assert "tokens" in answer, answer
        assert self.fresh.setdefault(held, answer) == answer
        self.runs, self.held = True, held

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
    """Good loads, up to the first that ends an engine, and with it the sequence."""

    engines: Engines

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        good: list[tuple[Any, ...]] = [(self.serve, way, name, {}) for way in WAYS for name in GOOD]
        good += [(self.serve, "load", name, {"part": part}) for part in PARTS for name in GOOD]
        good += [(self.serve, "load", name, {"apart": True}) for name in GOOD]
        good += [(self.survive, "reload", UNREADABLE, {}), (self.survive, "load", "moved", {"after": 0})]
        bad: list[tuple[Any, ...]] = [(self.refuse, way, name, {}) for way in WAYS for name in self.engines.bad[way]]
        bad += [(self.refuse, "load", "moved", {"after": after}) for after in (1, 20)]
        if self.engines.kind.endswith("fp8"):
            halves = [{"part": part, "lacking": half} for part in PARTS for half in (".weight", SCALE)]
            bad += [(self.starve, "load", "moved", half) for half in halves]
        check, way, name, how = data.draw(st.sampled_from(good) | st.sampled_from(good) | st.sampled_from(bad))
        if not self.ended:
            with self.engines.step():
                check(way, name, how)

    def serve(self, way: str, name: str, how: dict[str, Any]) -> None:
        answer = self.engines.do(way, name, **how)
        assert "tokens" in answer, answer
        old = self.engines.held
        held = self.engines.held = {ATTENTION: Held(name, old.rest), REST: Held(old.attention, name)}.get(
            how.get("part"), Held(name, name)
        )
        self.engines.seen.append((f"{way} {name} {how}", held, answer))

    def survive(self, way: str, name: str, how: dict[str, Any]) -> None:
        """A load that fails before it changes anything."""
        assert "raised" in self.engines.do(way, name, **how)
        self.engines.seen.append((f"{way} {name} {how}", self.engines.held, self.engines.do("ask")))

    def refuse(self, way: str, bad: str, how: dict[str, Any], why: str = "Restart the engine") -> None:
        self.ended, self.engines.runs = True, False
        answer = self.engines.do(way, bad, **how)
        refused = answer.get("refused", "")
        own_process = self.engines.mode == "multiprocess"  # it ends, and its client may only learn that
        assert why in refused or (own_process and "tokens" not in answer), f"{way} of {bad} {how}: {answer}"
        for command in (("wait" if own_process else "ask",), ("reload", "first"), ("load", "moved"), ("ask",)):
            answer = self.engines.do(*command)
            assert "tokens" not in answer if own_process else answer == {"refused": refused}, command
        self.engines.host.renew()

    def starve(self, way: str, name: str, how: dict[str, Any]) -> None:
        """Weights without scales, or scales without weights."""
        self.refuse(way, name, how, "arrived without")


@pytest.fixture(scope="module")
def host_of(environment_of_engines: dict[str, str]) -> Iterator[Callable[[str], Host]]:
    hosts: dict[bool, Host] = {}

    def host(mode: str) -> Host:
        apart = mode == "multiprocess"
        if apart not in hosts:
            hosts[apart] = Host(environment_of_engines | (MULTIPROCESS if apart else {}))
        return hosts[apart]

    yield host
    for started in hosts.values():
        started.end()


@pytest.fixture
def engines(request: pytest.FixtureRequest, host_of: Callable[[str], Host], variants: Path) -> Engines:
    return Engines(host_of(request.param[0]), variants, *request.param)


@pytest.mark.parametrize(
    "engines",
    [
        pytest.param((mode, kind), id=f"{mode}-{kind}", marks=[needs_compiler] * (mode == "compile"))
        for mode, kind in (KINDS if faults.FULL else IN_PART)
    ],
    indirect=True,
)
def test_an_engine_serves_the_last_checkpoint_or_refuses(engines):
    class Machine(Loads):
        pass

    Machine.engines = engines
    profile = hypothesis.settings(
        hypothesis.settings.get_profile("ci"),
        max_examples=MULTIPROCESS_SEQUENCES if engines.mode == "multiprocess" else SEQUENCES,
        stateful_step_count=STEPS,
        phases=[hypothesis.Phase.generate],  # to shrink a failure would start hundreds of engines
    )
    try:
        run_state_machine_as_test(Machine, settings=profile)
    except hypothesis.errors.HypothesisException:
        raise engines.failures[0] from None
    for held in [Held(name, name) for name in GOOD] + [held for _, held, _ in engines.seen]:
        if held not in engines.fresh:
            engines.start(held)
    assert len({json.dumps(answer) for answer in engines.fresh.values()}) == len(engines.fresh)
    assert engines.seen
    for step, held, answer in engines.seen:
        assert answer == engines.fresh[held], (step, held)
