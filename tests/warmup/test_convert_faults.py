"""`fp8moe-warmup convert` on a full disk, twice at once, and with a source that changes in the meantime."""

import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.errors import CheckpointError
from tests.warmup.conversion import content, refused, run, weight_files, write_source
from warmup import convert

GO_ON = "then run the command again: it continues where it stopped."


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed conversion writes."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(write_source(folder / "bf16"), folder / "fp8") == 0
    return content(folder / "fp8")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "bf16")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def in_work(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act once, after the first weight was quantized."""
    quantize, left = convert.quantize_weight, [act]

    def acting(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        result = quantize(*arguments)
        if left:
            left.pop()()
        return result

    monkeypatch.setattr(convert, "quantize_weight", acting)


@pytest.mark.parametrize(("size", "name"), [(10, convert.SOURCE), (200_000, "model-0"), (2000, "model-0")])
def test_a_limit_on_the_size_of_files_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: dict[str, bytes], size: int, name: str
) -> None:
    out = tmp_path / "fp8"
    with file_size_limit(size):
        message = refused(capsys, source, out)
    assert f"{tmp_path}/fp8.partial/{name}" in message
    assert "File too large" in message
    assert "the limit on file sizes (ulimit -f)" in message
    assert message.endswith(f"{GO_ON}\n")
    assert run(source, out) == 0
    assert content(out) == whole
    assert not (tmp_path / "fp8.partial").exists()


@pytest.mark.parametrize("call", [0, 2])
def test_a_disk_that_fills_up_is_named_and_nothing_is_lost(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, bytes],
    call: int,
) -> None:
    out, saved = tmp_path / "fp8", []

    def full(tensors: object, path: Path, metadata: object) -> None:
        if len(saved) == call:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        saved.append(path.name)
        save(tensors, path, metadata)

    save = convert.save_file
    monkeypatch.setattr(convert, "save_file", full)
    message = refused(capsys, source, out)
    files = weight_files(source)
    assert f"{tmp_path}/fp8.partial/{files[call].name}' cannot be written" in message
    assert "No space left on device" in message
    assert message.endswith(f"{GO_ON}\n")
    assert {path.name for path in (tmp_path / "fp8.partial").iterdir()} == {convert.SOURCE, *saved}
    monkeypatch.undo()
    assert run(source, out) == 0
    assert content(out) == whole


def test_a_file_that_no_conversion_writes_is_not_published(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_write_description", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    refused(capsys, source, tmp_path / "fp8")
    monkeypatch.undo()
    (tmp_path / "fp8.partial" / "notes.txt").touch()
    message = refused(capsys, source, tmp_path / "fp8")
    assert "fp8.partial' contains 'notes.txt', which is not a part of this conversion. Move it away" in message


def test_a_file_in_the_place_of_the_folder_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fp8.partial").touch()
    assert "is not from an interrupted conversion of these files" in refused(capsys, source, tmp_path / "fp8")


def test_a_second_conversion_into_the_same_folder_is_told_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    out, second = tmp_path / "fp8", []
    command = [sys.executable, "-m", "warmup", "convert", "--model", str(source), "--out", str(out)]
    in_work(
        monkeypatch,
        lambda: second.append(subprocess.run(command, capture_output=True, text=True, timeout=120)),
    )
    assert run(source, out) == 0
    assert second[0].returncode == 1
    message = second[0].stderr
    assert f"error: Another conversion is writing to '{out}.partial'. Wait for it to finish, or choose" in message
    assert content(out) == whole


def test_a_file_system_without_locks_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: FileLock) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(FileLock, "acquire", missing)
    assert "fp8.partial' does not support locks, which keep two" in refused(capsys, source, tmp_path / "fp8")


def test_conversions_that_start_together_leave_one_result(
    source: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "work" / "fp8"
    out.parent.mkdir()
    command = [sys.executable, "-m", "warmup", "convert", "--model", str(source), "--out", str(out)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert 0 in [process.returncode for process in both]
    for process, error in zip(both, errors, strict=True):
        assert process.returncode == 0 or "Another conversion is writing" in error or "already exists" in error
    assert content(out) == whole
    assert list(out.parent.iterdir()) == [out]


SHRINK = """
import os, sys
from warmup import convert
from warmup.__main__ import main

quantize = convert.quantize_weight

def shrink(*arguments):
    for name in os.listdir(sys.argv[1]):
        if name.endswith(".safetensors"):
            os.truncate(os.path.join(sys.argv[1], name), 5000)
    return quantize(*arguments)

convert.quantize_weight = shrink
sys.exit(main(["convert", "--model", sys.argv[1], "--out", sys.argv[2]]))
"""


def test_a_source_that_shrinks_is_refused(source: Path, tmp_path: Path) -> None:
    """In its own process: if files were mapped, SIGBUS would end this one."""
    command = [sys.executable, "-c", SHRINK, str(source), str(tmp_path / "fp8")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert f"error: '{weight_files(source)[0]}' has changed during the conversion. Make sure that" in done.stderr
    assert not (tmp_path / "fp8").exists()


def touch_later(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("index", [0, -1], ids=["the file that is read", "a file that is read later"])
def test_a_source_that_is_rewritten_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    file = weight_files(source)[index]
    in_work(monkeypatch, lambda: touch_later(file))
    assert f"'{file}' has changed during the conversion." in refused(capsys, source, tmp_path / "fp8")
    assert not (tmp_path / "fp8.partial" / file.name).exists()


def test_a_source_that_vanishes_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = weight_files(source)[-1]
    in_work(monkeypatch, file.unlink)
    message = refused(capsys, source, tmp_path / "fp8")
    assert f"'{file}' cannot be read: No such file or directory. Check the file" in message


def test_a_config_that_is_garbled_before_the_conversion_reads_it_is_refused(source: Path, tmp_path: Path) -> None:
    model = read_model(source)
    (source / "config.json").write_text('{"architectures": [')
    with pytest.raises(CheckpointError, match=r"config\.json' is not valid JSON"):
        convert.convert_checkpoint(model, source, tmp_path / "fp8")


def test_a_config_that_is_garbled_meanwhile_does_not_matter(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    in_work(monkeypatch, lambda: (source / "config.json").write_text("garbled"))
    assert run(source, tmp_path / "fp8") == 0
    assert content(tmp_path / "fp8") == whole


def rewrite_unnoticed(path: Path) -> None:
    """Other weights, in place, with the size and the modification time of the old ones."""
    before = path.stat()
    content = path.read_bytes()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of file systems ticks every few milliseconds
        path.write_bytes(content[:-64] + bytes(64))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def replace_unnoticed(path: Path) -> None:
    """The same with another file, as `rsync -t` does it."""
    copy = path.with_name(f".{path.name}")
    shutil.copy2(path, copy)
    rewrite_unnoticed(copy)
    copy.replace(path)


CHANGES = pytest.mark.parametrize("rewrite", [rewrite_unnoticed, replace_unnoticed])


@CHANGES
@pytest.mark.parametrize("index", [0, -1], ids=["the file that is read", "a file that is read later"])
def test_a_rewritten_source_is_refused_even_with_its_old_modification_time(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    index: int,
    rewrite: Callable[[Path], None],
) -> None:
    file = weight_files(source)[index]
    in_work(monkeypatch, lambda: rewrite(file))
    assert f"'{file}' has changed during the conversion." in refused(capsys, source, tmp_path / "fp8")


@CHANGES
def test_a_conversion_does_not_resume_from_a_rewritten_source(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rewrite: Callable[[Path], None],
) -> None:
    monkeypatch.setattr(convert, "_write_description", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    refused(capsys, source, tmp_path / "fp8")
    monkeypatch.undo()
    rewrite(weight_files(source)[0])
    assert "is not from an interrupted conversion of these files" in refused(capsys, source, tmp_path / "fp8")


@pytest.mark.parametrize("change", [touch_later, rewrite_unnoticed, replace_unnoticed])
def test_a_source_that_changes_after_it_was_read_is_refused(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
) -> None:
    write, file = convert._write_description, weight_files(source)[0]

    def changing(*arguments: Any) -> None:
        write(*arguments)
        change(file)

    monkeypatch.setattr(convert, "_write_description", changing)
    assert f"'{file}' has changed during the conversion." in refused(capsys, source, tmp_path / "fp8")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda path: path.symlink_to("missing"), "cannot be copied: No such file or directory. Restore it, or remove"),
        (lambda path: path.symlink_to(path), "cannot be copied: Too many levels of symbolic links. Restore it, or"),
        (lambda path: path.symlink_to("/etc/hostname"), "outside of the checkpoint's folder"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: os.mknod(path, stat.S_IFSOCK), "cannot be copied: No such device or address. Restore it, or"),
    ],
    ids=["dangling link", "link to itself", "link out of the checkpoint", "FIFO", "socket"],
)
def test_a_tokenizer_that_cannot_be_copied_is_refused_before_weights_are_converted(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    place: Callable[[Path], None],
    message: str,
) -> None:
    tokenizer = source / "tokenizer.json"
    tokenizer.unlink()
    place(tokenizer)
    found = refused(capsys, source, tmp_path / "fp8")
    assert f"'{tokenizer}' " in found
    assert message in found
    assert not (tmp_path / "fp8.partial").exists()


@pytest.mark.parametrize(("there", "message"), [("fp8", "already exists"), ("fp8.partial", "is not from an")])
@pytest.mark.usefixtures("promptly")
def test_a_pipe_in_place_of_the_mark_is_not_read(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str, message: str
) -> None:
    (tmp_path / there).mkdir()
    os.mkfifo(tmp_path / there / convert.SOURCE)
    assert run(source, tmp_path / "fp8") == 1
    assert message in capsys.readouterr().err


def test_folders_in_the_source_are_not_copied(source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    (source / "original").mkdir()
    (source / "link").symlink_to("original")
    assert run(source, tmp_path / "fp8") == 0
    assert content(tmp_path / "fp8") == whole
