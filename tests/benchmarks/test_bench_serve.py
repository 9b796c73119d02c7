"""What `bench_serve` refuses before a server starts, and which results a run continues."""

import argparse
import contextlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.checkpoints.synthetic import PRESETS, config
from benchmarks.engine import bench_serve, serve_cells
from benchmarks.engine.serve_cells import Cell, CellError, parse_cells
from benchmarks.engine.serve_engines import SGLANG, Engine, Settings, parse_engine
from fp8moe_plugin.errors import UnsupportedError

ENGINES = {"fp8moe": Engine({}, ["--quantization", "fp8moe"])}
FIGURES = {"tokens_per_s": 2.0, "total_tokens_per_s": 4.0, "ttft_ms": 1.0}
TIMES = dict.fromkeys(("ttft_ms", "ttft_ms_p99", "tpot_ms", "tpot_ms_p99"), 1.0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--out", "nowhere/r.json"], "nowhere/r.json cannot be written: "),
        (["--out", "."], ". cannot be written: it is a folder"),
        (["--model", "nowhere"], "nowhere is no folder of a checkpoint: it has no config.json"),
        (["--engines"], "name an engine by --engines or --engine"),
        (["--engine", "own", "A='1"], """--engine own: "A='1": No closing quotation"""),
        (["--engine", "vllm", ""], "--engine 'vllm': choose a name of its own"),
        (["--engine", "a/b", ""], "--engine 'a/b': choose a name of its own"),
        (["--engine", "own", "python -m vllm"], "--engine own: 'python -m vllm': 'python' is no option. Begin with"),
        (["--engine", "own", f"nowhere -m {SGLANG}"], "nowhere does not run: "),
        (["--engine", "own", f"{sys.executable} -m {SGLANG}"], f"{sys.executable} has no SGLang. Name"),
        (["--cells", "1k"], "no such cells: '1k'"),
        (["--cells", "decode@4x2048"], "no such cells: 'decode@4x2048'"),
        (["--cells", "decode@512"], "--cells: fp8moe runs at most 256 requests at a time, not 512"),
    ],
    ids=" ".join,
)
def test_bad_options_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    what = [] if "--model" in options else ["--kind", "tiny"]
    monkeypatch.setattr("sys.argv", ["bench_serve", *what, "--out", "r.json", *options])
    with pytest.raises(SystemExit) as caught:
        bench_serve.main()
    assert caught.value.code == 2
    assert f"error: {why}" in capsys.readouterr().err.replace("argument --cells: ", "")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 256}))
    return Settings(tmp_path, [], [], tmp_path, gpus=1, kv_gib=None, deadline=0.0)


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("A='1 2' --quantization fp8", Engine({"A": "1 2"}, ["--quantization", "fp8"])),
        (f"A=1 /env/python -m {SGLANG} --tp-size 2", Engine({"A": "1"}, ["--tp-size", "2"], "/env/python")),
        (f"python -m {SGLANG}", Engine({}, [], "python")),
        ("", Engine({}, [])),
    ],
)
def test_engines_are_parsed_as_they_are_written(text: str, engine: Engine) -> None:
    assert parse_engine(text) == engine
    assert parse_engine(str(engine)) == engine


def test_both_servers_have_the_same_cache_and_context(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (settings.model / "config.json").write_text(json.dumps(config(PRESETS["qwen3_moe", "qwen3-24layer"], fp8=True)))
    of_run = replace(settings, kv_gib=12, traffic=[cell.traffic for cell in parse_cells("1k/8k@2")])
    vllm, _ = of_run.command("vllm", Engine({}, []), servers=2)
    sglang, variables = of_run.command("sglang", Engine({"A": "1"}, ["--log-level", "error"], "/env/python"), servers=2)
    assert sglang[:3] == ["/env/python", "-m", SGLANG]
    assert sglang[-2:] == ["--log-level", "error"]
    assert variables["A"] == "1"
    found_vllm, found_sglang = (dict(itertools.pairwise(command)) for command in (vllm, sglang))  # the last one wins
    token = 24 * 2 * 4 * 128 * 2  # layers, keys and values, heads, channels, bytes
    assert int(found_vllm["--kv-cache-memory-bytes"]) == int(found_sglang["--max-total-tokens"]) * token
    assert int(found_sglang["--context-length"]) == int(found_vllm["--max-model-len"]) + 2


def test_each_rank_of_data_parallelism_runs_requests() -> None:
    engine = Engine({}, ["--data-parallel-size", "8", "--enable-expert-parallel"])
    assert engine.most_requests == 8 * Engine({}, []).most_requests == 2048
    assert replace(engine, python="/env/python").most_requests == 256


def results(settings: Settings, **others: Any) -> bench_serve.Results:
    given = {"out": settings.folder / "r.json", "model": "m", "settings": settings, "engines": ENGINES, "waves": 2}
    return bench_serve.Results(**({"versions": {}} | given | others))


def test_a_run_measures_what_is_missing(settings: Settings) -> None:
    first, second = parse_cells("1k/8@2,0.5/s")
    results(settings).add(first, "fp8moe", dict(FIGURES))
    resumed = results(settings)
    assert [resumed.has(cell, "fp8moe") for cell in (first, second)] == [True, False]
    assert not resumed.has(first, "vllm")
    assert not results(settings, model="other").has(first, "fp8moe")


class Rounds:
    """A server that takes 9 ms in the first round of a cell, and 1 ms less in each later one."""

    def __init__(self) -> None:
        self.addresses = {"fp8moe": ""}
        self.calls: list[tuple[int, int]] = []

    def measure(self, name: str, cell: Cell, requests: int) -> dict[str, float]:
        self.calls.append((cell.traffic.prompt, requests))
        ms = 9.0 - (len(self.calls) - 1) % (1 + serve_cells.ROUNDS)
        return {"tpot_ms": ms, "all_ms": 10 * ms}


def test_steps_have_rows_for_each_start(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [*parse_cells("decode@1,64"), *parse_cells("prefill@4x2048")]
    found = results(settings)
    for start in (1, 2):
        servers = Rounds()
        bench_serve.measure(servers, found, cells, 2, start)  # type: ignore[arg-type]
        assert servers.calls == [(32, 1)] * 4 + [(32, 64)] * 4 + [(2048, 4)] * 4
    rows = [(r["cell"], r["engine"], r["start"], r["ms"], r["ms_least"]) for r in results(settings).rows]
    assert rows[:3] == [("decode 1", "fp8moe", 1, 7.0, 6.0), ("decode 64", "fp8moe", 1, 7.0, 6.0), rows[2]]
    assert rows[2] == ("prefill 4x2048", "fp8moe", 1, 70.0, 60.0)
    assert [row[2] for row in rows] == [1, 1, 1, 2, 2, 2]
    bench_serve.show(found)
    assert "| decode 64 | 7.00, 7.00 |  |" in capsys.readouterr().out


def test_requests_and_steps_have_a_table_each(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    found = results(settings)
    for cell in (*parse_cells("1k/8@2"), *parse_cells("decode@1")):
        found.add(cell, "fp8moe", FIGURES | TIMES | {"ms": 7.0, "tokens_per_s_per_gpu": 2.0})
    bench_serve.show(found)
    requests, steps = capsys.readouterr().out.split("\n\n")[:2]
    assert "| 1k/8 | 2 |" in requests
    assert "| decode 1 | 7.00 |" in steps


def test_a_table_has_the_last_of_several_results() -> None:
    def result(**tokens: float) -> dict[str, Any]:
        load = {"model": "m", "traffic": "8k/1k", "concurrency": 4, "rate": None}
        rows = [load | TIMES | {"engine": name, "tokens_per_s_per_gpu": n} for name, n in tokens.items()]
        return {"rows": rows, "engines": {"fp8moe": "--quantization fp8moe", "triton": "--quantization fp8"}}

    shown = tables.requests(result(fp8moe=1, triton=20), result(fp8moe=30), model="m")
    assert shown.splitlines()[2:] == ["| 8k/1k | 4 | 30 / 20 | 1 (1) / 1 (1) | 1.00 (1.00) / 1.00 (1.00) | 1.50 |"]


def test_other_cells_wait_for_the_last_start(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [parse_cells("decode@1"), parse_cells("1k/8@2")]
    starts: list[list[str]] = []
    monkeypatch.setattr(bench_serve, "started", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(bench_serve, "measure", lambda _, __, todo, *___: starts.append([cell.name for cell in todo]))
    args = argparse.Namespace(cells=cells, apart=True, starts=2, waves=1)
    bench_serve.run(args, settings, ENGINES, results(settings))
    assert starts == [["decode 1"], ["decode 1", "1k/8, concurrency 2"]]


@pytest.mark.parametrize("change", ["waves", "engine", "model", "sglang"])
def test_a_run_does_not_continue_another(settings: Settings, change: str) -> None:
    results(settings).add(*parse_cells("1k/8@2"), "fp8moe", dict(FIGURES))
    others: dict[str, Any] = {"waves": {"waves": 3}, "engine": {"engines": {"fp8moe": Engine({}, [])}}, "model": {}}
    others["sglang"] = {"versions": {"sglang": "0.5.17"}}
    if change == "model":
        (settings.model / "config.json").write_text(json.dumps({"hidden_size": 512}))
    with pytest.raises(
        UnsupportedError, match=r"holds results with another (waves|fp8moe|sglang|m \(model\))\. Name another"
    ):
        results(settings, **others[change])


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_file_is_refused(settings: Settings, text: str) -> None:
    (settings.folder / "r.json").write_text(text)
    with pytest.raises(UnsupportedError, match=r"r\.json holds no results: "):
        results(settings)


@pytest.mark.parametrize("answer", [None, {"completed": 1, "errors": ["", "it broke"]}])
def test_a_cell_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | None) -> None:
    def run_client(options: list[str], log: Path, timeout: float) -> dict[str, Any]:
        if answer is None:
            raise ValueError("Initial test run failed: it broke")
        return answer | {"total_input_tokens": 0, "total_output_tokens": 0}

    monkeypatch.setattr(serve_cells, "run_client", run_client)
    (cell,) = parse_cells("1k/8@2")
    with pytest.raises(CellError, match=r"^1k/8, concurrency 2: .*it broke The client's output is in log\.$"):
        serve_cells.measure("http://localhost", Path("tokenizer"), cell, 2, Path("log"), 1.0)
