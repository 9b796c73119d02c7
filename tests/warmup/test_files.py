"""The files that a command writes: refused before any work, written completely or not at all, and quoted safely."""

import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8moe_plugin.quoting import shown
from tests.jit.conftest import set_variables
from warmup import options
from warmup.__main__ import main
from warmup.report import Report

LONG = "x" * 300


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (f"/tmp/{LONG}.json", "File name too long"),
        (f"/tmp/{LONG}/report.json", "File name too long"),
        ("/dev/null/report.json", "its folder does not exist"),
        ("{}", "it is a folder"),
        ("{}/missing/report.json", "its folder does not exist"),
    ],
)
@pytest.mark.parametrize("option", ["--json", "--bundle"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, path: str, reason: str
) -> None:
    path = path.format(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["compile", option, path])
    assert caught.value.code == 2
    assert f"{path!r} cannot be written: {reason}" in capsys.readouterr().err
    assert not cache.exists()


def test_a_bundle_does_not_replace_a_pipe(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SystemExit):
        main(["bundle", "--bundle", str(pipe)])
    assert f"{str(pipe)!r} cannot be written: it is a pipe or a device" in capsys.readouterr().err
    assert pipe.is_fifo()


@pytest.mark.parametrize("folder", [LONG, "{}/none"])
def test_a_bundle_that_cannot_be_read_is_an_error(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    assert main(["verify", "--bundle", f"{folder.format(tmp_path)}/kernels.tar"]) == 1
    assert "cannot be read: " in capsys.readouterr().err


def test_verify_takes_a_bundle_from_a_folder_that_cannot_be_written(
    full_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = str(tmp_path / "kernels.tar")
    assert main(["bundle", "--bundle", bundle]) == 0
    monkeypatch.setattr(options.os, "access", lambda *_: False)
    assert main(["verify", "--bundle", bundle]) == 0


def test_two_files_at_one_place_are_refused(
    full_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle, folder = tmp_path / "fp8moe-kernels.tar", tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(bundle)
    (tmp_path / "other").symlink_to(tmp_path)
    assert main(["bundle"]) == 0
    (folder / "hard.tar").hardlink_to(bundle)
    before = bundle.read_bytes()
    for missing in (False, True):
        for json_file in ("fp8moe-kernels.tar", "./folder/../fp8moe-kernels.tar", "link", "other/fp8moe-kernels.tar"):
            for command in (["bundle"], ["bundle", "--bundle", str(bundle)], ["verify", "--bundle", str(bundle)]):
                with pytest.raises(SystemExit) as caught:
                    main([*command, "--json", json_file])
                assert caught.value.code == 2
                assert f"--json and --bundle are the same file, {str(Path(json_file))!r}" in capsys.readouterr().err
        if not missing:
            with pytest.raises(SystemExit):
                main(["bundle", "--json", "folder/hard.tar"])
            assert bundle.read_bytes() == before
            bundle.unlink()
    with pytest.raises(SystemExit):
        main(["bench", "--model", "x", "--json", "x.svg", "--plot", "x.svg"])
    assert not bundle.exists()


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
@pytest.mark.parametrize("victim", ["bundle", "checkpoint", "cache"])
def test_a_report_does_not_overwrite_what_is_read(
    full_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    victim: str,
    link: str | None,
) -> None:
    bundle, model, report = tmp_path / "kernels.tar", tmp_path / "model", tmp_path / "report.json"
    bundle.write_bytes(b"bundle")
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    set_variables(monkeypatch, FP8MOE_BUNDLE=bundle)
    path, name = {
        "bundle": (bundle, "FP8MOE_BUNDLE"),
        "checkpoint": (model / "model.safetensors", "a file of the checkpoint"),
        "cache": (min(full_cache.glob("*.cubin")), "a file in the kernel cache"),
    }[victim]
    before = path.read_bytes()
    if link:
        getattr(report, link)(path)
        path = report
    with pytest.raises(SystemExit) as caught:
        main(["list", "--model", str(model), "--json", str(path)])
    assert caught.value.code == 2
    assert f"--json and {name} are the same file, {str(path)!r}" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_new_report_may_go_beside_what_is_read(full_cache: Path, checkpoint: Callable[[str], Path]) -> None:
    report = full_cache / "report.json"
    assert main(["list", "--model", str(checkpoint("DeepSeek-V3")), "--json", str(report)]) == 0
    assert Report.model_validate_json(report.read_text()).command == "list"


def test_a_report_that_does_not_fit_leaves_the_old_one(full_cache: Path, tmp_path: Path) -> None:
    """A file-size limit stands for a full disk."""
    report = tmp_path / "folder" / "report.json"
    report.parent.mkdir()
    report.write_text("old")
    done = subprocess.run(
        [sys.executable, "-m", "warmup", "list", "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.returncode == 1
    assert done.stderr == f"error: {report} cannot be written: File too large. Choose another file.\n"
    assert report.read_text() == "old"
    assert list(report.parent.iterdir()) == [report]


def test_a_report_goes_through_a_link_and_into_a_pipe(full_cache: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    assert main(["list", "--json", str(link)]) == 0
    assert link.is_symlink()
    assert Report.model_validate_json(target.read_text()).command == "list"
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~current_umask()
    command = [sys.executable, "-m", "warmup", "list", "--json", "/dev/stderr"]
    piped = subprocess.run(command, capture_output=True, timeout=60)
    assert Report.model_validate_json(piped.stderr).command == "list"


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("command", ["list", "verify", "compile", "bundle", "doctor", "convert"])
def test_in_a_folder_that_is_gone_a_command_says_so(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    script = 'cd "$1" && rmdir "$1" && exec "${@:2}"'
    arguments = [command, "--model", "x", "--json", "report.json", *(["--out", "y"] if command == "convert" else [])]
    done = subprocess.run(
        ["bash", "-c", script, "bash", folder, sys.executable, "-m", "warmup", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: The current folder cannot be used: No such file or directory. Change to another folder.\n"
    )


def test_a_folder_whose_name_holds_escapes_is_quoted(
    full_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    evil = tmp_path / "\x1b]0;title\x07\n\x1b[31mname"
    evil.mkdir()
    shutil.copytree(full_cache, evil / "cache")
    monkeypatch.chdir(evil)
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=evil / "cache")
    bundle = ["--bundle", str(evil / "kernels.tar")]
    for arguments in (["list"], ["verify"], ["compile"], ["bundle"], ["bundle", *bundle], ["verify", *bundle]):
        assert main(arguments) == 0
    next((evil / "cache").glob("combine-*.cubin")).unlink()
    (evil / "kernels.tar").write_bytes(next((evil / "cache").glob("*.cubin")).read_bytes())
    assert main(["verify"]) == 1
    assert main(["list", "--json", "report.json"]) == 0
    assert json.loads((evil / "report.json").read_text())["kernels"][0]["place"] == shown(str(evil / "cache"))
    printed = capfd.readouterr()
    assert "\\x1b]0;title\\x07\\n\\x1b[31mname" in printed.out
    assert "\x1b" not in printed.out + printed.err
    assert "\x07" not in printed.out + printed.err
