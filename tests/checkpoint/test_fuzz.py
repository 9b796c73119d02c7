"""Damaged checkpoints: each is read or refused, in bounded time and memory. Full count: 100,000."""

import json
import subprocess
import sys
from dataclasses import replace

from benchmarks.checkpoints.synthetic import PRESETS, write_checkpoint
from tests import faults


def test_damaged_checkpoints_are_read_or_refused(tmp_path):
    shape = replace(PRESETS["deepseek_v3", "tiny"], experts=4, moe_layers=1, mtp_layers=0, groups=1, topk_groups=1)
    write_checkpoint(tmp_path, shape)
    count = faults.rounds(100_000)
    command = [sys.executable, "-m", "tests.checkpoint.fuzzer", str(tmp_path), str(faults.SEED * count), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "fault" not in result, f"case {result['case']}: {result['fault']}"
    assert sum(result["outcomes"].values()) == count
    assert min(result["outcomes"][kind] for kind in ("Model", "CheckpointError", "UnsupportedError")) > count / 50
    assert result["slowest_s"] < 1
    assert result["growth_mib"] < 200
