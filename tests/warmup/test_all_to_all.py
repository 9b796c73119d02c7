"""`explain` and `doctor` say which all-to-all is used, with the decisions and the words of the engines' logs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda.bindings import driver

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.plan.sm90.push import window_layout
from tests.checkpoint.test_model import V3, describe
from tests.helpers import environment
from warmup import all_to_all, diagnosis, memory
from warmup.__main__ import main
from warmup.diagnosis import Driver, Gpu

DP8 = Parallel(1, 8, ep=8)
OWN = "FP8MOE_EP=push: vLLM's all-to-all is used, because there is "
GATHERED = "Tokens reach the experts of other GPUs by vLLM's all-gather"


@pytest.fixture
def v3(models: dict[str, Model]) -> Model:
    return models["DeepSeek-V3"]


@pytest.mark.parametrize(("parallel", "rows"), [(DP8, 4000), (Parallel(2, 4, ep=8), 2000)], ids=str)
def test_a_window_has_room_for_the_longest_step(v3: Model, parallel: Parallel, rows: int) -> None:
    with environment("FP8MOE_EP", "push"):
        found = all_to_all.all_to_all(v3, parallel, 4000)
    assert found
    nbytes = window_layout(8, rows, 7168, 8, 256).nbytes
    assert (found.used, found.window_rows, found.window_bytes) == ("push", rows, nbytes)
    assert ("a model whose tokens vLLM splits" in found.why) == (parallel.tp > 1)


def test_without_the_variable_it_says_what_that_would_use(v3: Model) -> None:
    found = all_to_all.all_to_all(v3, DP8, 8192)
    assert found
    assert (found.used, found.window_rows) == ("engine", 6159)
    assert found.why.startswith(GATHERED)
    assert "in e4m3 in steps of 256 or more tokens a rank" in found.why
    assert "With FP8MOE_EP=push, 8 ranks store tokens into each other's windows of 1024 MiB, in steps" in found.why


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        (Parallel(1, 16, ep=16), f"{OWN}a group of 16 ranks, of which the kernels support up to 8. {GATHERED}"),
        (Parallel(8, ep=8), f"{OWN}no data parallelism with --enable-expert-parallel"),
        (Parallel(1, 8), f"{OWN}no data parallelism with --enable-expert-parallel"),
        (Parallel(1, 8, ep=8, sglang=True), "FP8MOE_EP=push has no effect under SGLang"),
    ],
    ids=str,
)
def test_the_engines_own_is_used_and_it_says_why(v3: Model, parallel: Parallel, why: str) -> None:
    with environment("FP8MOE_EP", "push"):
        found = all_to_all.all_to_all(v3, parallel, 8192)
    assert found
    assert (found.used, found.window_bytes) == ("engine", None)
    assert found.why.startswith(why)


def test_weights_that_multiply_tokens_keep_the_all_gather(models: dict[str, Model]) -> None:
    llama = models["Llama-4-Scout-17B-16E-Instruct"]
    without = all_to_all.all_to_all(llama, DP8, 8192)
    with environment("FP8MOE_EP", "push"):
        found = all_to_all.all_to_all(llama, DP8, 8192)
    assert found
    assert without
    assert without.why == f"{GATHERED} (--all2all-backend allgather_reducescatter, its default), in BF16."
    assert found.why == f"{OWN}a router whose weights multiply the tokens. {without.why}"
    assert (found.used, found.window_bytes) == ("engine", None)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_another_backend_has_no_windows(v3: Model, backend: str) -> None:
    with environment("FP8MOE_EP", "push"), environment("FP8MOE_BACKEND", backend):
        found = all_to_all.all_to_all(v3, DP8, 8192)
    assert found
    assert found.why.startswith(f"{OWN}a device without our CUDA kernels. {GATHERED}")


def test_windows_are_counted_with_the_memory_of_a_step(v3: Model) -> None:
    def step_bytes() -> list[int]:
        return [memory.step_bytes(v3, parallel, 4000, scratch=0) for parallel in (DP8, Parallel(8))]

    without = step_bytes()
    with environment("FP8MOE_EP", "push"):
        assert step_bytes() == [without[0] + window_layout(8, 4000, 7168, 8, 256).nbytes, without[1]]


def test_explain_says_it(
    cache: Path, checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["explain", "--model", str(checkpoint("DeepSeek-V3"))]
    with environment("FP8MOE_EP", "push"):
        assert main([*command, "--dp", "8", "--ep", "8", "--json", str(tmp_path / "r.json")]) == 0
        reported = json.loads((tmp_path / "r.json").read_text())["explain"]["all_to_all"]
        assert f"\n\n{reported['why']}\n\n" in capsys.readouterr().out
        assert main([*command, "--gpu", "h200", "--gpus", "8"]) == 0
        assert "\nWindows of FP8MOE_EP=push are counted, up to 1024 MiB of a GPU.\n" in capsys.readouterr().out
    assert main([*command, "--tp", "8"]) == 0
    assert main([*command, "--gpu", "h200", "--gpus", "8"]) == 0
    assert "FP8MOE_EP" not in capsys.readouterr().out


def test_layers_of_the_engine_have_no_windows(tmp_path: Path) -> None:
    engines = read_model(describe(tmp_path, V3, hidden_size=7232))
    with environment("FP8MOE_EP", "push"):
        assert all_to_all.all_to_all(engines, DP8, 64) is None


def gpus(links: dict[int, tuple[list[int], list[int]]], backend: str = "sm90") -> list[Gpu]:
    shared = {"compute_capability": "9.0", "memory_bytes": 150 << 30, "served": True, "refusal": None}
    return [
        Gpu(ordinal=i, name="NVIDIA H200", backend=backend, peers=peers, nvlinks=nvlinks, **shared)
        for i, (peers, nvlinks) in links.items()
    ]


NVLINK = gpus({0: ([1], [1]), 1: ([0], [0])})
PCIE = gpus({0: ([1], []), 1: ([0], [])})
APART = gpus({0: ([], []), 1: ([], [])})


@pytest.mark.parametrize(
    ("found", "link", "fate"),
    [
        (NVLINK, "ok     GPU links: each GPU can store into the memory of the others, over NVLink\n", None),
        (
            PCIE,
            "       GPU links: each GPU can store into the memory of the others, but not over NVLink (GPU 0 and GPU 1",
            "a GPU that cannot store into the memory of another one over NVLink",
        ),
        (
            APART,
            "       GPU links: not every GPU can store into the memory of the others (GPU 0 into that of GPU 1 and 1",
            "a GPU that cannot store into the memory of another one over NVLink",
        ),
        (NVLINK[:1], "", "a group whose ranks are on several hosts"),
        (gpus({0: ([1], [1]), 1: ([0], [0])}, "triton"), "", "a device without our CUDA kernels"),
    ],
    ids=["NVLink", "PCIe", "apart", "two hosts", "Triton"],
)
def test_doctor_checks_the_links_between_gpus(
    cache: Path,
    checkpoint: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    found: list[Gpu],
    link: str,
    fate: str | None,
) -> None:
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: (Driver(version=None, cuda="13.0"), found))
    with environment("FP8MOE_EP", "push"):
        main(["doctor", "--model", str(checkpoint("Qwen3-30B-A3B-FP8")), "--dp", "2", "--ep", "2"])
    printed = capsys.readouterr().out
    assert link in printed
    assert ("GPU links" in printed) == (len(found) > 1)
    pushed = "ok     all-to-all: FP8MOE_EP=push: 2 ranks store tokens into each other's windows of "
    assert (f"       all-to-all: {OWN}{fate}. {GATHERED}" if fate else pushed) in printed


@pytest.mark.parametrize(
    ("parallel", "others", "used"),
    [
        (Parallel(1, 2, ep=2, pp=2), [], "push"),
        (Parallel(1, 4, ep=4, pp=2), [], "engine"),  # on two hosts
        (Parallel(1, 2, ep=2), ["triton"], "push"),  # which no rank uses
        (Parallel(1, 2, ep=2, pp=2), ["triton"], "push"),
        (Parallel(1, 8, ep=8), ["triton"], "engine"),
    ],
    ids=str,
)
def test_only_gpus_of_a_group_count(v3: Model, parallel: Parallel, others: list[str], used: str) -> None:
    reached = {0: [2, 1], 1: [0], 2: [0, 3], 3: [2]} if parallel.pp > 1 else {i: [*range(4)] for i in range(4)}
    found = gpus({i: (peers, peers) for i, peers in reached.items()})
    found += [gpu for backend in others for gpu in gpus({4: ([], [])}, backend)]
    with environment("FP8MOE_EP", "push"):
        report = all_to_all.all_to_all(v3, parallel, 64, found)
    assert report
    assert report.used == used


def test_doctor_asks_the_driver_about_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    atomics = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    reached, linked = {("a", "b"), ("a", "c")}, {(atomics, "a", "c"), (atomics, "a", "d")}
    monkeypatch.setattr(driver, "cuDeviceCanAccessPeer", lambda *pair: (0, int(pair in reached)))
    monkeypatch.setattr(driver, "cuDeviceGetP2PAttribute", lambda *which: (0, int(which in linked)))
    assert diagnosis._links(0, ["a", "b", "c", "d"]) == {"peers": [1, 2], "nvlinks": [2]}
    assert diagnosis._links(1, ["a", "b", "c", "d"]) == {"peers": [], "nvlinks": []}
