"""`fp8moe-warmup convert`: the bytes it writes, what it refuses, and what an interruption leaves."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints.synthetic import PRESETS, write_checkpoint
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.layers.weights import per_block_cast_to_fp8
from tests import helpers as h
from tests.warmup.conversion import EXPERT, QWEN, change, content, refused, run, tensors, write_source
from warmup import convert
from warmup.__main__ import main
from warmup.report import Report

FAMILIES = ("qwen3_moe", "deepseek_v3")
SHAPES = {"qwen3_moe": QWEN, "deepseek_v3": replace(PRESETS["deepseek_v3", "tiny"], moe_layers=1)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unquantized checkpoints, each in several files."""
    folder = tmp_path_factory.mktemp("sources")
    for family, shape in SHAPES.items():
        write_source(folder / family, shape)
    return folder


@pytest.fixture
def source(sources: Path, tmp_path: Path) -> Path:
    """A checkpoint for one test."""
    return shutil.copytree(sources / "qwen3_moe", tmp_path / "bf16")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_checkpoint_is_the_quantized_one(sources: Path, tmp_path: Path, family: str) -> None:
    source, out = sources / family, tmp_path / "fp8"
    assert run(source, out) == 0
    before, after = tensors(source), tensors(out)
    scales = {name for name in after if name.endswith("_scale_inv")}
    assert after.keys() - scales == before.keys()
    for name, tensor in before.items():
        if f"{name}_scale_inv" in scales:
            q, scale = per_block_cast_to_fp8(tensor)
            assert h.same_bits(after[name], q)
            assert h.same_bits(after[f"{name}_scale_inv"], scale)
        else:
            assert h.same_bits(after[name], tensor)
    write_checkpoint(tmp_path / "wanted", SHAPES[family])
    assert {n: (t.dtype, t.shape) for n, t in after.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors(tmp_path / "wanted").items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_config_index_and_tokenizer_come_along(sources: Path, tmp_path: Path, family: str) -> None:
    source, out = sources / family, tmp_path / "fp8"
    assert run(source, out) == 0
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    kept = quantization.pop("modules_to_not_convert")
    assert {"lm_head", "model.embed_tokens", f"model.layers.{SHAPES[family].dense_layers}.mlp.gate"} <= set(kept)
    assert not [name for name in kept if name.endswith("_proj") and "eh_proj" not in name]
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = tensors(out)
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}
    assert {oct(path.stat().st_mode & 0o777) for path in out.glob("*.safetensors")} == {
        oct(path.stat().st_mode & 0o777) for path in source.glob("*.safetensors")
    }
    model = read_model(out)
    assert model.quantized
    assert replace(model, quantized=False) == read_model(source)


def test_a_checkpoint_of_one_file_without_an_index_is_converted(source: Path, tmp_path: Path) -> None:
    whole = tensors(source)
    for path in [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]:
        path.unlink()
    save_file(whole, source / "model.safetensors", metadata={"format": "pt"})
    assert run(source, tmp_path / "fp8") == 0
    assert read_model(tmp_path / "fp8").quantized


def test_the_report_counts(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = tmp_path / "fp8", tmp_path / "report.json"
    assert main(["convert", "--model", str(source), "--out", str(out), "--json", str(file)]) == 0
    found = Report.model_validate_json(file.read_text()).convert
    assert found
    assert (found.path, found.tensors, found.quantized) == (str(out), len(tensors(source)), 16)
    assert found.bytes == sum(tensor.nbytes for tensor in tensors(out).values())
    printed = capsys.readouterr()
    assert f"{out}: 16 of {found.tensors} tensors quantized" in printed.out
    assert "warning" not in printed.err


def test_nothing_that_is_there_is_overwritten(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fp8"
    out.mkdir()
    assert run(source, out) == 1
    assert f"{str(out)!r} already exists. Delete it, or choose another --out." in capsys.readouterr().err
    assert not list(out.iterdir())


def test_a_quantized_checkpoint_is_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(source, tmp_path / "fp8") == 0
    assert "is already quantized. Serve it as it is." in refused(capsys, tmp_path / "fp8", tmp_path / "again")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    change(source, EXPERT, lambda tensor: tensor.index_fill(0, torch.tensor([7]), value))
    assert f"{EXPERT}: The weight to quantize holds NaN or infinity" in refused(capsys, source, tmp_path / "fp8")


def test_a_full_disk_is_noticed_before_anything_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, wanted = shutil.disk_usage(tmp_path), "are free. Free some space, or choose an --out on another disk."
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage._replace(free=convert.SPARE_BYTES))
    message = refused(capsys, source, tmp_path / "fp8")
    assert "The converted checkpoint needs another 68.8 MB for" in message
    assert f"but only 67.1 MB {wanted}" in message
    assert not (tmp_path / "fp8.partial").exists()
    monkeypatch.setattr(convert, "SPARE_BYTES", 10**12)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    message = refused(capsys, source, tmp_path / "fp8")
    assert "The converted checkpoint needs another 1000.0 GB for" in message
    assert f"but only 1.0 GB {wanted}" in message


def test_experts_in_one_tensor_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sorted(source.glob("*.safetensors"))[0]
    together = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 512, 256, dtype=torch.bfloat16)}
    save_file(load_file(file) | together, file, metadata={"format": "pt"})
    assert "has shape [4, 512, 256], but only checkpoints with one matrix" in refused(capsys, source, tmp_path / "fp8")


def test_a_last_block_that_is_not_full_gets_its_scale(tmp_path: Path) -> None:
    """Ranks hold zero padding after it; the checkpoint does not."""
    write_checkpoint(tmp_path / "bf16", replace(QWEN, moe_intermediate=192), fp8=False)
    assert run(tmp_path / "bf16", tmp_path / "fp8") == 0
    after = tensors(tmp_path / "fp8")
    assert (after[EXPERT].shape, after[f"{EXPERT}_scale_inv"].shape) == ((192, 256), (2, 2))


def test_sizes_that_the_kernels_do_not_take_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "bf16", replace(QWEN, hidden=320), fp8=False)
    message = refused(capsys, tmp_path / "bf16", tmp_path / "fp8")
    assert "not a multiple of 128, the size of a scale block" in message


def test_weights_of_unknown_names_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in source.glob("*.safetensors"):
        renamed = {f"tower.{name}": tensor for name, tensor in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    assert "has no weights to quantize: none is named like those of a language model's layers" in refused(
        capsys, source, tmp_path / "fp8"
    )


def test_missing_weights_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(source.glob("*.safetensors"))
    files[0].unlink()
    assert "lacks 1 of its" in refused(capsys, source, tmp_path / "fp8")
    for file in files[1:]:
        file.unlink()
    assert "has no weights. Download the whole checkpoint." in refused(capsys, source, tmp_path / "fp8")


def test_folders_whose_names_are_not_text(source: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    shutil.copytree(source, odd)
    out = tmp_path / os.fsdecode(b"\xfe")
    assert run(odd, out) == 0
    assert run(source, tmp_path / "plain") == 0
    assert content(out) == content(tmp_path / "plain")


def test_an_interrupted_conversion_is_gone_on_with(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial = tmp_path / "fp8", tmp_path / "fp8.partial"
    converted, done = convert._converted, []

    def interrupted(path: Path, *arguments: object) -> dict[str, torch.Tensor]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(path.name)
        return converted(path, *arguments)

    monkeypatch.setattr(convert, "_converted", interrupted)
    assert "Interrupted. Finished work is kept; run the command again" in refused(capsys, source, out)
    assert {path.name for path in partial.glob("*")} == {convert.SOURCE, *done}
    first = done.copy()
    monkeypatch.setattr(convert, "_converted", lambda path, *rest: done.append(path.name) or converted(path, *rest))
    assert run(source, out) == 0
    assert sorted(done) == sorted(path.name for path in source.glob("*.safetensors"))  # none of them twice
    assert done[:2] == first
    assert not partial.exists()
    assert run(source, tmp_path / "at_once") == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "at_once").iterdir()
    }


def test_the_rest_of_another_conversion_is_not_gone_on_with(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_write_weights", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    refused(capsys, source, tmp_path / "fp8")
    monkeypatch.undo()
    change(source, EXPERT, torch.zeros_like)
    assert "is not from an interrupted conversion of these files. Delete it" in refused(
        capsys, source, tmp_path / "fp8"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "convert needs a --model"),
        (["--model", "{source}"], "convert needs an --out, the folder to create"),
        (["--model", "Qwen/Qwen3-30B-A3B", "--out", "{out}"], "is not a folder. Run: hf download Qwen/Qwen3-30B"),
        (["--model", "{source}", "--out", "{out}/deep/fp8"], "its parent folder must exist and be writable"),
        (["--model", "x" * 300, "--out", "{out}"], "xxx' cannot be opened: File name too long. Check the name"),
        (["--model", "{source}", "--out", "{out}" + "x" * 300], "cannot be created: File name too long"),
        (["--model", "{source}", "--out", "{out}" + "x" * 245], "cannot be created: File name too long"),
    ],
)
def test_a_wrong_command_line_is_refused(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    places = {"source": sources / "qwen3_moe", "out": tmp_path / "fp8"}
    with pytest.raises(SystemExit) as caught:
        main(["convert", *(argument.format(**places) for argument in arguments)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_out_of_reach_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated, because the tests may run as root, who can open all folders."""
    ask = os.stat

    def closed(path: object, **arguments: Any) -> os.stat_result:
        if str(path) == str(source):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return ask(path, **arguments)

    monkeypatch.setattr(os, "stat", closed)
    message = f"'{source}' cannot be opened: Permission denied. Check the name, and the permissions of the folders"
    with pytest.raises(SystemExit) as caught:
        run(source, tmp_path / "fp8")
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert main(["list", "--model", str(source)]) == 1
    assert message in capsys.readouterr().err
