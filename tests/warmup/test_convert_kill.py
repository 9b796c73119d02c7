"""A conversion killed at random moments, and before each change of a file. Full count: 200 random moments.

Run again, it gives the same bytes, and leaves no other file, folder or process.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests import faults
from tests.warmup.conversion import write_source


def test_a_killed_conversion_is_finished_by_the_next_run(tmp_path: Path) -> None:
    source, count = write_source(tmp_path / "bf16"), faults.rounds(200)
    command = [sys.executable, "-m", "tests.warmup.convert_killer", str(source), str(tmp_path / "work"), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    killed = json.loads(done.stdout)
    assert killed["changes"] > 20
    assert sum(killed["random"].values()) >= count
    assert killed["random"]["at work"] > count / 10
