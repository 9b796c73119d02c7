"""The replicas of a data-parallel engine: a process each, which meet where none may go on alone."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from benchmarks.engine.serve_demo import free_port

STORE = "ENGINE_SPLITS_STORE"  # environment variable: the port of the store in which replicas meet
MEETING_S = 600.0  # that a replica waits for the others; the limit of an engine ends it before


def joined(replicas: int, environment: dict[str, str], start: Callable[[dict[str, str]], Any]) -> dict[str, Any]:
    """Returns what the replicas have found, with answers in the order of the prompts."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"VLLM_DP_SIZE": str(replicas), "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(free_port())}
    common[STORE] = str(store.port)
    own = [{"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)} for rank in range(replicas)]
    with ThreadPoolExecutor(replicas) as pool:
        found = list(pool.map(lambda ranks: start(environment | common | ranks), own))
    if errors := [part["error"] for part in found if "error" in part]:
        return {"error": "; ".join(errors)}
    answers = [part["answers"] for part in found]
    together = {key: [x for turn in zip(*(a[key] for a in answers), strict=True) for x in turn] for key in answers[0]}
    if "misplaced" in found[0]:
        found[0]["misplaced"] = [problem for part in found for problem in part["misplaced"]]
    return found[0] | {"ready_s": max(part["ready_s"] for part in found), "answers": together}


def meet(replicas: int, where: str) -> None:
    """Wait until all replicas of this engine are here."""
    if replicas == 1:
        return
    store = TCPStore("127.0.0.1", int(os.environ[STORE]), timeout=timedelta(seconds=MEETING_S), wait_for_workers=False)
    if store.add(f"{where} count", 1) == replicas:
        store.set(where, "all")
    store.wait([where])


def rest(replicas: int, where: str) -> None:
    """Wait until no replica computes any more: idle ones take steps for up to 32 steps after the last request."""
    meet(replicas, where)
    if replicas > 1:
        time.sleep(1)
