"""The command by which `bench_serve` starts SGLang's server is one that SGLang's parser takes."""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.checkpoints.synthetic import PRESETS, config
from benchmarks.engine.serve_cells import parse_cells
from benchmarks.engine.serve_engines import SGLANG, Settings, parse_engine, sglang_versions
from tests.engine.sglang.conftest import ENVIRONMENT

OPTIONS = "--quantization fp8 --load-format dummy --attention-backend triton"


@pytest.mark.seam
def test_the_command_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setitem(os.environ, name, value)
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps(config(PRESETS["deepseek_v3", "dsv3-tp8-30layer"], fp8=True)))
    traffic = [cell.traffic for cell in parse_cells("8k/1k@1")]
    settings = Settings(tmp_path, ["of vLLM"], traffic, tmp_path, gpus=2, kv_gib=16, deadline=0.0)
    engine = parse_engine(f"{sys.executable} -m {SGLANG} {OPTIONS}")
    assert sglang_versions({"sglang": engine})["sglang"]
    command, _ = settings.command("sglang", engine, servers=2)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = parser.parse_args(command[3:])
    assert (found.context_length, found.tp_size, found.load_format) == (9 * 1024 + 2, 2, "dummy")
    assert found.max_total_tokens == (16 << 30) // (30 * 576 * 2)  # layers, channels of MLA's vector, bytes
