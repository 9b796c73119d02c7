"""The process of the command line: its environment, its refusal of invalid arguments, and how wide its texts are."""

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

import fp8moe_plugin
from fp8moe_plugin.checkpoint.parallel import Parallel
from warmup.__main__ import main
from warmup.options import parse
from warmup.parser import COMMANDS
from warmup.report import Report

POLICY = "OMP_WAIT_POLICY"
SHOW_POLICY = f"""
import os, sys
from warmup.__main__ import main
sys.argv = ["warmup", "--help"]
try:
    main()
except SystemExit:
    print(os.environ["{POLICY}"], "torch" in sys.modules)
"""


@pytest.mark.parametrize(("given", "policy"), [(None, "passive"), ("active", "active")])
def test_idle_threads_do_not_spin_unless_the_user_wants_it(given: str | None, policy: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != POLICY}
    if given:
        environment[POLICY] = given
    done = subprocess.run(
        [sys.executable, "-c", SHOW_POLICY], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    assert done.stdout.splitlines()[-1] == f"{policy} False"


def test_a_call_from_python_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICY, raising=False)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert POLICY not in os.environ


@pytest.mark.parametrize("argument", ["--\x1b[31mred\x07", "--t\x1b]0;title\n", "--\udcff\u202e"], ids=ascii)
def test_an_unknown_option_reaches_no_terminal_raw(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["list", argument])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.replace("\n", "").isprintable()
    assert f"unrecognized arguments: {ascii(argument)[1:-1]}. See fp8moe-warmup list --help\n" in printed


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"fp8moe-plugin {metadata.version('fp8moe-plugin')}\n"
    assert fp8moe_plugin.__version__ == metadata.version("fp8moe-plugin")
    assert not hasattr(fp8moe_plugin, "__other__")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: fp8moe-warmup {command} ")
    assert ("--plot" in printed) is (command in ("bench", "compare"))
    assert all((name in printed) == (command != "cache") for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"))
    assert ("only config.json is downloaded" in printed) == (command not in ("cache", "compare"))


@pytest.mark.parametrize(
    ("spelled", "parallel"),
    [
        ("--tensor-parallel-size 4 --data-parallel-size 2 -ep", Parallel(4, 2, 8)),
        ("-tp 4 -pp 2", Parallel(4, pp=2)),
        ("--pipeline-parallel-size 2", Parallel(pp=2)),
        ("--quantization fp8moe --tensor-parallel-size 8 --trust-remote-code", Parallel(8)),
        ("--tp-size 8 --pp-size 2", Parallel(8, pp=2, sglang=True)),
        (
            "--tp-size 8 --dp-size 8 --enable-dp-attention --moe-dense-tp-size 1",
            Parallel(1, 8, sglang=True, dense_tp1=True),
        ),
    ],
)
def test_the_spellings_of_the_engines(spelled: str, parallel: Parallel) -> None:
    assert parse(spelled.split()).parallel == parse(str(parallel).split()).parallel == parallel


def test_the_report_is_all_that_standard_output_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["doctor", "--json", "-"])
    printed = capsys.readouterr()
    assert Report.model_validate_json(printed.out).diagnosis
    assert "settings: " in printed.err
    assert not list(tmp_path.iterdir())


def completions(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns what bash offers at the end of this line."""
    with pytest.raises(SystemExit) as caught:
        main(["--print-completion", "bash"])
    assert caught.value.code == 0
    script = capsys.readouterr().out
    words = line.split(" ")
    script += f'\nCOMP_WORDS=({line} ""); COMP_CWORD={len(words) - 1}; _shtab_fp8moe_warmup; echo "${{COMPREPLY[@]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fp8moe-warmup expl", ["explain"]),
        ("fp8moe-warmup explain --gpu", ["--gpu", "--gpus", "--gpu-memory-utilization"]),
        ("fp8moe-warmup explain --gpu h2", ["h200", "h20"]),
        ("fp8moe-warmup verify --bundle pyproj", ["pyproject.toml"]),
    ],
)
def test_a_shell_completes_commands_options_and_files(
    line: str, offered: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert completions(line, capsys) == offered


def on_a_terminal(arguments: list[str], columns: int) -> list[str]:
    """Returns the lines that a command prints to a terminal of this width."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "warmup", *arguments]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment):
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # how Linux says that the command has ended
            while part := os.read(ours, 1 << 16):
                printed += part
    os.close(ours)
    return printed.decode().splitlines()


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", ["list", "verify", "doctor", "explain"])
def test_lines_fit(  # a short name: it is part of the paths that are printed
    command: str, columns: int, checkpoint: Callable[[str], Path], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, "--model", str(checkpoint("DeepSeek-V3"))]
    shown = on_a_terminal(arguments, columns)
    main(arguments)
    piped = capsys.readouterr().out.splitlines()
    texts = [line for line in shown if not line.lstrip().startswith("Run `")]  # a command to copy is one line
    assert max(map(len, texts)) <= 100 < max(map(len, piped))
    assert len(shown) > len(piped)
    if command in ("list", "explain"):
        assert max(map(len, shown)) <= columns
