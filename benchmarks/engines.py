"""vLLM engines with different FP8 backends, each in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FP32_SCALES = {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
UNFUSED = {"compilation_config": {"pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False}}}
TRITON = {"VLLM_USE_DEEP_GEMM": "0"}  # dense layers too
DEEP_GEMM = {"VLLM_DEEP_GEMM_WARMUP": "skip"}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # arguments of LLM, environment
    "fp8moe": ({"quantization": "fp8moe"}, {}),
    "triton": ({"moe_backend": "triton"} | UNFUSED, TRITON | FP32_SCALES),
    "deep_gemm": ({"moe_backend": "deep_gemm"} | UNFUSED, DEEP_GEMM | FP32_SCALES),
    "triton default": ({"moe_backend": "triton"}, TRITON),
    "deep_gemm default": ({"moe_backend": "deep_gemm"}, DEEP_GEMM),
    "fp8moe triton": ({"quantization": "fp8moe"}, {"FP8MOE_BACKEND": "triton"}),
    "reference": ({"quantization": "fp8moe", "enforce_eager": True}, {"FP8MOE_BACKEND": "reference"}),
    "bf16": ({}, {}),  # runs the unquantized twin of the checkpoint
}
# The DeepGEMM warm-up compiles for sizes that no round has. Variables that are already set keep their values.
DEFAULTS = {"VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
CONFIG_KEYS = (
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
)  # entries of config.json that a report has


def read_config(model: Path) -> dict[str, Any]:
    """Returns config.json, with the entries of the language model of one that also sees."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config | config.get("text_config", {})


def in_own_process(
    module: str,
    options: dict[str, Any],
    name: str,
    timeout: float,
    environment: dict[str, str],
    log: Path | None = None,
) -> dict[str, Any]:
    """Returns the JSON that `python -m module --run name` with these options writes to `--out`, or an `error`.

    All processes that it started have ended on return. What they print is kept in `log`, and printed after an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "answer.json"), log or Path(folder, "log")
        command = [sys.executable, "-m", module, "--run", name, "--out", str(out)]
        command += [str(part) for option in options.items() for part in option]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        found: dict[str, Any]
        try:
            status = process.wait(timeout)
            found = json.loads(out.read_text()) if out.exists() else {"error": f"ended with status {status}"}
        except subprocess.TimeoutExpired:
            found = {"error": f"not done within {timeout:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if "error" in found:
            print(log.read_text(errors="replace")[-12000:], flush=True)
        return found


def run_and_answer(run: Callable[[], dict[str, Any]], out: Path, longest: int = 300) -> None:
    """In that process: write the result of `run`, or its `error` in at most `longest` characters."""
    try:
        found = run()
    except Exception as failure:  # noqa: BLE001 (an engine may fail in any way; the report says how)
        traceback.print_exc()
        found = {"error": textwrap.shorten(f"{type(failure).__name__}: {failure}", longest)}
    out.write_text(json.dumps(found))
