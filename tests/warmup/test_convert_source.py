"""What `fp8moe-warmup convert` reads: indices that contradict the files, and dtypes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8moe_plugin.checkpoint.headers import INDEX_NAME
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.dtypes import DTYPES
from tests import helpers as h
from tests.warmup.conversion import EXPERT, refused, run, tensors, weight_files, write_source
from warmup.convert import convert_checkpoint
from warmup.convert_source import read_source, read_tensors

NORM = "model.norm.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "bf16")


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX_NAME).read_text())["weight_map"]


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def save(file: Path, found: dict[str, torch.Tensor]) -> None:
    save_file(found, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", [EXPERT, NORM])
def test_a_tensor_that_its_file_lacks_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = source / index_of(source)[name]
    save(file, {other: tensor for other, tensor in load_file(file).items() if other != name})
    message = refused(capsys, source, tmp_path / "fp8")
    assert f"says that '{file.name}' contains tensor '{name}', but no file contains it. Download" in message
    assert not (tmp_path / "fp8.partial").exists()


@pytest.mark.parametrize(("name", "status"), [("\ud800", 1), ("a\udfff", 1), ("\U0001f600", 0), ("\\\\ud800", 0)])
def test_names_of_tensors_are_unicode(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, status: int
) -> None:
    """Python reads halves of characters from JSON, but writes them to no file and no terminal."""
    file = source / index_of(source)[NORM]
    (source / INDEX_NAME).unlink()
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header[name] = header.pop(NORM)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[begin:])
    assert run(source, tmp_path / "fp8") == status
    if status:
        message = f"{str(file)!r} has a tensor name that is not Unicode: it contains {name[-1]!r}. Download the"
        assert message in capsys.readouterr().err
        assert not (tmp_path / "fp8.partial").exists()
    else:
        assert name in tensors(tmp_path / "fp8")


def test_a_tensor_in_another_file_than_the_index_says_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight_map = index_of(source)
    other = next(name for name in weight_map.values() if name != weight_map[EXPERT])
    write_index(source, weight_map | {EXPERT: other})
    message = refused(capsys, source, tmp_path / "fp8")
    assert f"says that '{other}' contains tensor '{EXPERT}', but it is in '{weight_map[EXPERT]}'" in message


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_files_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], indexed: bool
) -> None:
    """vLLM would load both, and the second would overwrite the first."""
    first, second = [file for file in weight_files(source) if EXPERT not in load_file(file)][:2]
    copied = next(iter(load_file(first)))
    save(second, load_file(second) | {copied: load_file(first)[copied]})
    if not indexed:
        (source / INDEX_NAME).unlink()
    message = refused(capsys, source, tmp_path / "fp8")
    assert f"The result would contain tensor '{copied}' twice, from '{first.name}' and from '{second.name}'." in message


def test_scales_that_are_there_already_are_not_written_over(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = weight_files(source)[0]
    save(file, load_file(file) | {f"{EXPERT}_scale_inv": torch.ones(2, 2)})
    message = refused(capsys, source, tmp_path / "fp8")
    assert f"The result would contain tensor '{EXPERT}_scale_inv' twice" in message


def test_a_tensor_that_the_index_does_not_list_is_converted(source: Path, tmp_path: Path) -> None:
    """vLLM loads all tensors of a file."""
    weight_map = index_of(source)
    write_index(source, {name: file for name, file in weight_map.items() if name != NORM})
    assert run(source, tmp_path / "fp8") == 0
    assert h.same_bits(tensors(tmp_path / "fp8")[NORM], tensors(source)[NORM])
    assert index_of(tmp_path / "fp8")[NORM] == weight_map[NORM]


def add_tensor(file: Path, name: str, dtype: str, size: int) -> None:
    """Written by hand, because safetensors' own writer does not have all dtypes."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:begin]), content[begin:]
    header[name] = {
        "dtype": dtype,
        "shape": [size * 8 // DTYPES[dtype].bits],
        "data_offsets": [len(data), len(data) + size],
    }
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data + bytes(range(1, size + 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_copied_or_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    add_tensor(weight_files(source)[0], "extra", dtype, 24)
    if DTYPES[dtype].bits >= 8:
        assert run(source, tmp_path / "fp8") == 0
        found = {
            tensor.name: (tensor.dtype, value.view(torch.uint8).tolist())
            for tensor, value in read_tensors(read_source(tmp_path / "fp8")[0])
            if tensor.name == "extra"
        }
        assert found == {"extra": (getattr(torch, DTYPES[dtype].torch), list(range(1, 25)))}
    else:
        message = refused(capsys, source, tmp_path / "fp8")
        assert f"Tensor 'extra' has dtype {dtype}, which convert cannot copy. Use a checkpoint that" in message


def test_tensors_are_read_as_safetensors_reads_them(source: Path) -> None:
    found = {tensor.name: value for file in read_source(source) for tensor, value in read_tensors(file)}
    wanted = tensors(source)
    assert found.keys() == wanted.keys()
    assert all(h.same_bits(found[name], wanted[name]) for name in wanted)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_checkpoint_that_is_quantized_under_another_key_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM reads `compression_config`, too."""
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    change_config(source, compression_config={"quant_method": "compressed-tensors"})
    message = refused(capsys, source, tmp_path / "fp8")
    assert "of compressed-tensors, only FP8 weights" in message
    model = read_model(write_source(tmp_path / "unquantized"))
    change_config(source, compression_config=fp8)
    with pytest.raises(UnsupportedError, match="is already quantized"):
        convert_checkpoint(model, source, tmp_path / "fp8")  # of a config.json that has changed since it was read


def test_infinity_in_a_field_that_is_not_used_is_kept(source: Path, tmp_path: Path) -> None:
    change_config(source, time_step_limit=[0.0, float("inf")])
    assert run(source, tmp_path / "fp8") == 0
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["time_step_limit"] == [0.0, float("inf")]
