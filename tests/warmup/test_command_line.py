"""The process of the command line: its environment, and its refusal of invalid arguments."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.shapes import Parallel
from warmup.__main__ import main
from warmup.options import parse
from warmup.parser import COMMANDS
from warmup.report import Report

POLICY = "OMP_WAIT_POLICY"
SHOW_POLICY = f"""
import os, sys
from fp8moe_plugin.checkpoint.shapes import Parallel
from warmup.__main__ import main
from warmup.options import parse
from warmup.parser import COMMANDS
from warmup.report import Report
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
    assert f"unrecognized arguments: {ascii(argument)[1:-1]}. See fp8moe-warmup --help\n" in printed


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"fp8moe-plugin {metadata.version('fp8moe-plugin')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: fp8moe-warmup {command} ")
    assert ("--plot" in printed) is (command == "bench")
    assert all(name in printed for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"))


@pytest.mark.parametrize(
    ("spelled", "parallel"),
    [
        ("--tensor-parallel-size 4 --data-parallel-size 2 -ep", Parallel(4, 2, 8)),
        ("-tp 4 -pp 2", Parallel(4, pp=2)),
        ("--pipeline-parallel-size 2", Parallel(pp=2)),
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
