"""The commands under a umask that removes the owner's own permissions."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ONE_KERNEL = """
import sys
from fp8moe_plugin.plan.keys import KernelKey
from warmup import kernels
from warmup.__main__ import main

kernels.plan_of = lambda *args: {KernelKey("combine"): "why"}
sys.exit(main())
"""


def as_a_plain_user(command: list[str]) -> list[str]:
    """Run a command as a user to whom permissions apply, unlike root."""
    if os.geteuid():
        return command
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("root cannot give up its privileges without setpriv")
    return [setpriv, "--bounding-set=-dac_override,-dac_read_search", *command]


@pytest.mark.parametrize("umask", [0o777, 0o077, 0o022], ids=oct)
def test_kernels_are_compiled_kept_bundled_and_reported(cache: Path, tmp_path: Path, umask: int) -> None:
    bundle, report = tmp_path / "b.tar", tmp_path / "r.json"
    command = [sys.executable, "-c", ONE_KERNEL, "bundle", "--bundle", str(bundle), "--json", str(report)]
    done = subprocess.run(as_a_plain_user(command), umask=umask, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "1 kernels: 0 present, 1 compiled, 0 failed" in done.stdout
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o644  # for the user who serves
    assert stat.S_IMODE(report.stat().st_mode) == 0o666 & ~umask | 0o600
