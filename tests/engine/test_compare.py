"""`compare` with real engines: the reference on a CPU, or the kernels, beside the unquantized twin of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8moe_plugin.compare.engine import WINDOW
from tests.engine.conftest import ROOT
from warmup.__main__ import main

WINDOWS = 6


@pytest.fixture(scope="module")
def report(
    checkpoints: Path, environment_of_engines: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compare")
    text = (ROOT / "docs/architecture.md").read_text()
    (folder / "text.txt").write_text(text[: WINDOWS * WINDOW])  # characters, which are fewer tokens
    options: list[Any] = ["--model", checkpoints / "qwen3_moe-fp8", "--bf16", checkpoints / "qwen3_moe-bf16"]
    options += ["--text", folder / "text.txt", "--sequences", 1, 4, "--json", folder / "report.json"]
    options += ["--max-kl", 0.03]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment_of_engines.items():
            patch.setenv(name, value)
        status = main(["compare", *map(str, options), "--plot", str(folder / "plot.svg")])
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert status == 0, report
    assert "<svg" in (folder / "plot.svg").read_text()
    return report["compare"] | {"error": report["error"]}


def test_each_engine_reads_and_is_timed(report: dict[str, Any]) -> None:
    on_gpu = torch.cuda.is_available()
    assert [engine["name"] for engine in report["engines"]] == ["fp8moe", *(["fp8"] if on_gpu else []), "bf16"]
    assert (report["gpu"] is None, report["reference"]) == (not on_gpu, "bf16")
    assert 2 <= report["windows"] <= WINDOWS
    for engine in report["engines"]:
        assert engine["error"] is None
        assert engine["ready_s"] > 1
        assert engine["first_token_ms"]["value"] > 0
        assert sorted(engine["tokens_per_s"]) == ["1", "4"]
        assert all(found["value"] > 0 for found in engine["tokens_per_s"].values())


def test_fp8_says_nearly_what_bf16_says(report: dict[str, Any]) -> None:
    ours, bf16 = (next(e for e in report["engines"] if e["name"] == name) for name in ("fp8moe", "bf16"))
    assert 0 < ours["divergence"]["low"] < ours["divergence"]["value"] < ours["divergence"]["high"] < 0.02
    assert 0.9 < ours["same_token"]["value"] <= 1
    assert ours["perplexity"] == pytest.approx(bf16["perplexity"], rel=0.03)
    assert ours["perplexity"] != bf16["perplexity"]
    assert bf16["divergence"] is None
    assert "KL divergence" in report["verdict"]
    assert [limit["outcome"] for limit in report["limits"]] == ["met"]
