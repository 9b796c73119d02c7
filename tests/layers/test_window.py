"""The windows of a group, as far as they need no GPU."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8moe_plugin.layers import window
from fp8moe_plugin.layers.all_to_all import place_refusal, windows
from fp8moe_plugin.plan.gpu_tuning import UNTUNED, GpuTuning
from fp8moe_plugin.plan.sm90.push import window_layout
from fp8moe_plugin.plan.tuning import EP_WINDOW_BYTES


def test_windows_are_found_inside_of_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(offsets: list[int], mine: int, group: object) -> None:
        offsets[:] = [256, mine]

    monkeypatch.setattr(window.dist, "all_gather_object", gather)
    memory = torch.zeros(64, dtype=torch.uint8)[32:]
    shared = [4096, memory.data_ptr() - 32]
    assert window.window_addresses(memory, shared, 1, None) == [4096 + 256, memory.data_ptr()]


@pytest.mark.parametrize(
    ("places", "reaches", "why"),
    [
        ([("a", 0), ("a", 1)], [True, True], None),
        ([("a", 0), ("b", 1)], [True, True], "a group whose ranks are on several hosts"),
        ([("a", 0), ("a", 0)], [True, True], "a GPU that several ranks share"),
        ([("a", 0), ("a", 1)], [True, False], "a GPU that cannot store into the memory of another one over NVLink"),
    ],
)
def test_places_of_ranks_that_cannot_store(places: list[tuple[str, int]], reaches: list[bool], why: str | None) -> None:
    assert place_refusal(places, reaches) == why


def test_a_window_is_no_larger_than_its_limit() -> None:
    assert windows(8, 8193, 2, 7168, 8, 256).rows == 4097
    assert 0.99 * EP_WINDOW_BYTES < windows(8, 8192, 1, 7168, 8, 256).nbytes <= EP_WINDOW_BYTES


@pytest.mark.parametrize(("ranks", "experts"), [(2, 256), (4, 256), (4, 384), (4, 1024), (8, 1024)])
def test_a_window_at_its_limit_has_room_for_pushed_rows(ranks: int, experts: int) -> None:
    """Which are more than the sums of its longest step, if there are many experts."""
    size = windows(ranks, 2**20, 1, 7168, 8, experts)
    assert size.nbytes == window_layout(ranks, size.rows, 7168, 8, experts).nbytes <= EP_WINDOW_BYTES
    assert window_layout(ranks, size.rows + 1, 7168, 8, experts).nbytes > EP_WINDOW_BYTES


DIFFERENT = "a group whose ranks differ in VLLM_BATCH_INVARIANT, FP8MOE_TUNING or GPUs, and would choose other formats"
PCIE = "a GPU that cannot store into the memory of another one over NVLink"


@pytest.mark.parametrize(
    ("peers", "linked", "why"),
    [
        ((UNTUNED, False, 132), True, None),
        ((UNTUNED, False, 132), False, PCIE),
        ((GpuTuning(small_batch_bytes=0), False, 132), True, DIFFERENT),
        ((UNTUNED, True, 132), True, DIFFERENT),
        ((UNTUNED, False, 114), True, DIFFERENT),
    ],
)
def test_ranks_that_do_not_push(
    monkeypatch: pytest.MonkeyPatch, peers: tuple[GpuTuning, bool, int], linked: bool, why: str | None
) -> None:
    def gather(found: list[Any], mine: tuple[Any, Any], group: object) -> None:
        found[:] = [mine, ("here", "1") if mine[0] == "here" else (True, peers)]

    monkeypatch.setattr(window.dist, "all_gather_object", gather)
    monkeypatch.setattr(window.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(window, "has_nvlinks", lambda gpu, others: linked and (gpu, others) == ("0", {"1"}))
    gpu = SimpleNamespace(uuid=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    refusal = window.window_refusal(SimpleNamespace(size=lambda: 2), 7168, torch.device("cuda", 0), UNTUNED)
    assert refusal == why


def test_the_log_names_the_rank_that_did_not_come(plugin_log: pytest.LogCaptureFixture) -> None:
    window._watch(torch.tensor([1 + 2], dtype=torch.int32), 600)
    assert "rank 2 of the expert-parallel group has not called a layer for 600 s" in plugin_log.text


EXIT = """
import threading, types, torch
from fp8moe_plugin.layers import window
window.time = types.SimpleNamespace(sleep=lambda seconds: None)
threading.Thread(target=window._watch, args=(torch.zeros(1, dtype=torch.int32), 1), daemon=True).start()
sum(range(10**7))
"""


def test_a_process_that_watches_windows_can_exit() -> None:
    """Also while the thread reads, which it does all the time here."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_is_kept_from_multicast_while_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(*_: object) -> None:
        assert os.environ[window.NO_MULTICAST] == "1"
        raise RuntimeError("a rank is missing")

    memory = SimpleNamespace(empty=lambda nbytes, **_: torch.zeros(nbytes, dtype=torch.uint8), rendezvous=meet)
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", memory)
    monkeypatch.setattr(torch.distributed, "_symmetric_memory", memory, raising=False)
    monkeypatch.delenv(window.NO_MULTICAST, raising=False)
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(RuntimeError, match="missing"):
        window.open_group_window(group, group, 4, 256, 2, 4, torch.device("cpu"))
    assert window.NO_MULTICAST not in os.environ
