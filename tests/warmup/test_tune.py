"""`tune` with made-up times, the file that it writes, and what `doctor` says of it."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from fp8moe_plugin.bench import tune as measurement
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.tuning_file import TuningFile, tuning_of
from fp8moe_plugin.plan.gpu_tuning import GpuTuning
from fp8moe_plugin.plan.spec import LayerSpec
from tests import helpers as h
from tests.jit.conftest import set_variables
from warmup import diagnosis
from warmup.__main__ import main
from warmup.diagnosis import Driver, Gpu
from warmup.report import Report

H200 = "NVIDIA H200"
HOPPER = {"compute_capability": "9.0", "memory_bytes": 1, "served": True, "backend": "sm90", "refusal": None}


class Clock:
    """Of a GPU on which the kernels for few rows are the faster ones."""

    gpu, multiprocessors = H200, 132

    def __init__(self, specs: Mapping[str, LayerSpec]) -> None:
        self.specs = specs

    def __call__(self, name: str, tokens: int, plans: Sequence[Plan]) -> list[float]:
        return [
            80.0 if getattr(getattr(plan.choices, "tile", None), "streams_weights", True) else 100 for plan in plans
        ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns the folder in which the command runs."""
    monkeypatch.setattr(measurement, "GpuClock", Clock)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_is_what_the_setting_names(clock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--json", "report.json"]) == 0
    path = clock / "fp8moe-tuning.json"
    file = TuningFile.model_validate_json(path.read_bytes())
    assert Report.model_validate_json((clock / "report.json").read_bytes()).tune == file
    assert file.tuning == GpuTuning(few_rows_per_expert=128, packed_few_rows_per_expert=128)
    with h.environment("FP8MOE_TUNING", str(path)):
        assert tuning_of(H200) == file.tuning
    printed = capsys.readouterr()
    assert "few_rows_per_expert: 128\n" in printed.err
    assert "few_rows_per_expert         128 (default 40)\n" in printed.out
    assert "early_below                 192 (the default)\n" in printed.out
    assert "DeepSeek-V3 --tp 8                   4096    100.0   80.0            0.800\n" in printed.out
    assert printed.out.endswith(f"Serve with FP8MOE_TUNING={path}, on every rank.\n")
    assert max(map(len, printed.out.splitlines()[:-1])) <= 100


def test_a_models_own_layer_is_measured(
    clock: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(measurement, "GpuClock", lambda specs: seen.append(specs) or Clock(specs))
    assert main(["tune", "--model", str(checkpoint("DeepSeek-V3")), "--tp", "8", "--out", "other.json"]) == 0
    ((name, spec),) = seen[0].items()
    assert name == "DeepseekV3ForCausalLM --tp 8"
    assert spec.shape == (8, 7168, 256, 256, 256)
    assert {step.layer for step in TuningFile.model_validate_json(Path("other.json").read_bytes()).changed} == {name}


def test_help_names_the_layers_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    printed = capsys.readouterr().out
    for name in measurement.LAYERS:
        assert all(part in printed for part in name.removesuffix(" --tp 8").split(" in ")), name


@pytest.mark.parametrize("out", ["nowhere/tuning.json", "folder"])
def test_a_file_that_cannot_be_written_is_refused_first(
    clock: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (clock / "folder").mkdir()
    with pytest.raises(SystemExit):
        main(["tune", "--out", out])
    assert "cannot be written: " in capsys.readouterr().err


def test_a_checkpoint_is_not_overwritten(
    clock: Path, checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint("DeepSeek-V3")
    with pytest.raises(SystemExit):
        main(["tune", "--model", str(folder), "--out", str(folder / "config.json")])
    assert "--out and a file of the checkpoint are the same file" in capsys.readouterr().err


def test_the_file_goes_through_a_link_and_into_a_pipe(clock: Path) -> None:
    link, target, pipe = (clock / name for name in ("link.json", "target.json", "pipe"))
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert main(["tune", "--out", str(link)]) == main(["tune", "--out", str(pipe)]) == 0
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert os.read(reader, 1 << 16) == target.read_bytes()
    os.close(reader)


def test_the_report_does_not_overwrite_the_file(clock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--json", "fp8moe-tuning.json"])
    assert "--json and --out are the same file" in capsys.readouterr().err


@pytest.mark.parametrize("names", [[H200, H200], ["NVIDIA H20"], []])
def test_the_doctor_says_whether_the_file_is_used(
    clock: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    assert main(["tune"]) == 0
    gpus = [Gpu(ordinal=i, name=name, **HOPPER) for i, name in enumerate(names)]
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: (Driver(version=None, cuda="13.0"), gpus))
    path = clock / "fp8moe-tuning.json"
    set_variables(monkeypatch, FP8MOE_TUNING=str(path))
    main(["doctor"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "tuning: " in line]
    used = {
        H200: f"ok     tuning: {path}: few_rows_per_expert 128 (default 40), ",
        "NVIDIA H20": f"       tuning: {path} is not used: it is for NVIDIA H200 ",
    }
    wanted = [used[name] for name in dict.fromkeys(names)] or [f"       tuning: {path} is for NVIDIA H200 and version "]
    assert [line.startswith(start) for line, start in zip(lines, wanted, strict=True)] == [True] * len(wanted)


def test_the_doctor_advises_tuning_only_where_possible(
    clock: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = HOPPER | {"compute_capability": "8.9"}
    gpus = [
        Gpu(ordinal=0, name="NVIDIA L40S", **other | {"backend": "triton"}),
        Gpu(ordinal=1, name="NVIDIA L4", **other | {"served": False, "refusal": "the SM90 kernels need a Hopper GPU"}),
    ]
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: (Driver(version=None, cuda="13.0"), gpus))
    set_variables(monkeypatch, FP8MOE_TUNING=str(clock / "missing.json"))
    main(["doctor"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "tuning: " in line]
    assert [line.strip()[:56] for line in lines] == ["tuning: FP8MOE_TUNING has no effect on NVIDIA L40S, whic"]


@pytest.mark.parametrize("names", [[H200], []])
def test_a_file_of_something_else_is_wrong(
    clock: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    path = clock / "fp8moe-tuning.json"
    path.write_text(json.dumps({"gpu": H200}))
    gpus = [Gpu(ordinal=0, name=name, **HOPPER) for name in names]
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: (Driver(version=None, cuda="13.0"), gpus))
    set_variables(monkeypatch, FP8MOE_TUNING=str(path))
    assert main(["doctor"]) == 1
    assert (
        f"WRONG  tuning: FP8MOE_TUNING is {path}, which `fp8moe-warmup tune` did not write" in capsys.readouterr().out
    )
