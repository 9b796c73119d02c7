"""The process of the command line: its environment, and its refusal of invalid arguments."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

from warmup.__main__ import main

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
    assert f"unrecognized arguments: {ascii(argument)[1:-1]}\n" in printed


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"fp8moe-plugin {metadata.version('fp8moe-plugin')}\n"
