"""Two ranks of an engine with data and expert parallelism whose tokens go through windows (FP8MOE_EP=push), on a CPU.

No kernel pushes here: tests/emulator/test_ranks.py runs those. An engine decides who calls which window in which step.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints.answers import LARGEST_DIFFERENCE, compare
from benchmarks.checkpoints.synthetic import write_checkpoint
from benchmarks.engine.serve_demo import free_port
from tests.conftest import has_hopper
from tests.engine.conftest import ROOT, SHAPES, Served
from tests.processes import kill_session

pytestmark = pytest.mark.skipif(has_hopper(), reason="GPUs have windows: python -m benchmarks.engine.splits")
RANKS, LIMIT_S = 2, 300


def test_a_draft_model_has_a_window_of_its_own(
    checkpoints: Path, engines: Callable[[str], Served], environment_of_engines: dict[str, str], tmp_path: Path
) -> None:
    draft = replace(SHAPES["deepseek_v3"], experts=SHAPES["deepseek_v3"].experts // 2)
    write_checkpoint(tmp_path / "draft", draft, fp8=True)
    models = str(checkpoints / "deepseek_v3-fp8"), str(tmp_path / "draft")
    first, second = answers_of_ranks(models, environment_of_engines, tmp_path)
    sizes = [[draft.hidden, draft.topk, experts] for experts in (draft.experts, 2 * draft.experts)]
    assert first["windows"] == second["windows"] == [sizes]
    ours = {key: first["answers"][key] + second["answers"][key] for key in first["answers"]}
    difference, clear, same = compare(ours, engines("deepseek_v3 twin").answers[0])
    assert difference < LARGEST_DIFFERENCE
    assert clear > 0.5
    assert same > 0.95


def answers_of_ranks(models: tuple[str, ...], environment: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    common = os.environ | environment | {"FP8MOE_EP": "push", "VLLM_DP_SIZE": str(RANKS)}
    common |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.engine.generate_ranks", *models]
    found = []
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in map(str, range(RANKS)):
            log = stack.enter_context(Path(folder, f"{rank}.log").open("w"))
            own = common | {"VLLM_DP_RANK": rank, "VLLM_DP_RANK_LOCAL": rank}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=own, text=True, start_new_session=True, **pipes))
            stack.callback(kill_session, ranks[-1])
        limit = threading.Timer(LIMIT_S, lambda: [kill_session(process) for process in ranks])
        stack.callback(limit.cancel)
        limit.start()
        for rank, process in enumerate(ranks):
            line = process.stdout.readline()
            assert line, Path(folder, f"{rank}.log").read_text()[-4000:]
            found.append(json.loads(line))
        for process in ranks:
            process.communicate()
    return found
