"""Damaged checkpoints: each is read or refused, in bounded time and memory. Full count: 100,000."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.checkpoints.synthetic import PRESETS, write_checkpoint
from fp8moe_plugin.checkpoint.headers import INDEX_NAME
from tests import faults
from tests.checkpoint.fuzzer import SHARD
from tests.checkpoint.test_deepseek_v4 import FLASH
from tests.checkpoint.test_model import Tensors, describe, header, write_shard


def write_deepseek_v4(folder: Path) -> None:
    """Write a small DeepSeek-V4 with experts in MXFP4, whose weights are a hole."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "compress_ratios": [0, 4], "vocab_size": 512}
    tensors: Tensors = {"layers.0.attn.wo_a.weight": ("F8_E4M3", [8192, 4096]), "norm.weight": ("BF16", [256])}
    for name in (f"layers.{i}.ffn.experts.{e}" for i in range(2) for e in range(4)):
        tensors |= {f"{name}.w2.weight": ("I8", [256, 64]), f"{name}.w2.scale": ("F8_E8M0", [256, 4])}
        for w in ("w1", "w3"):
            tensors |= {f"{name}.{w}.weight": ("I8", [128, 128]), f"{name}.{w}.scale": ("F8_E8M0", [128, 8])}
    folder.mkdir()
    describe(folder, FLASH, **sizes)
    write_shard(folder / SHARD, header(tensors))
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, SHARD)}))


def test_damaged_checkpoints_are_read_or_refused(tmp_path):
    shape = replace(PRESETS["deepseek_v3", "tiny"], experts=4, moe_layers=1, mtp_layers=0, groups=1, topk_groups=1)
    v3, v4 = tmp_path / "v3", tmp_path / "v4"
    write_checkpoint(v3, shape)
    write_deepseek_v4(v4)
    count = faults.rounds(100_000)
    command = [sys.executable, "-m", "tests.checkpoint.fuzzer", str(faults.SEED * count), str(count), str(v3), str(v4)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "fault" not in result, f"case {result['case']}: {result['fault']}"
    assert sum(result["outcomes"].values()) == count
    assert min(result["outcomes"][kind] for kind in ("Model", "CheckpointError", "UnsupportedError")) > count / 50
    assert result["slowest_s"] < 1
    assert result["growth_mib"] < 200
