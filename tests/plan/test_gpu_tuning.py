"""The thresholds of a GPU: the file that FP8MOE_TUNING names, and the plans that follow from it."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.launches.tuning_file import TuningFile, tuning_of
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops import devices
from fp8moe_plugin.plan import tuning
from fp8moe_plugin.plan.gpu_tuning import OF_GPUS, UNTUNED, GpuTuning
from fp8moe_plugin.plan.keys import HOPPER, SM90
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, plan_layer
from fp8moe_plugin.plan.sm90.push import plan_push
from fp8moe_plugin.plan.sm90.tiles import PACKED_FEW_ROWS, PACKED_WIDE
from fp8moe_plugin.plan.spec import GroupedBy, Grouping, LayerSpec, MoeShape
from tests import helpers as h

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
TUNED = GpuTuning(few_rows_per_expert=56, small_batch_bytes=0, early_below=96, spare_multiprocessors=0)
MANY_CHANNELS, FEW_CHANNELS = LayerSpec(MoeShape(8, 7168, 2048, 256, 256)), LayerSpec(MoeShape(8, 7168, 256, 256, 256))


@pytest.fixture(autouse=True)
def nothing_logged_before() -> Iterator[None]:
    log_once.cache_clear()
    yield
    log_once.cache_clear()


def content(**changes: Any) -> dict[str, Any]:
    file = TuningFile(gpu=H200, version=metadata.version("fp8moe-plugin"), tuning=TUNED, steps=3, changed=[])
    return file.model_dump(mode="json") | changes


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(content()))
    with h.environment("FP8MOE_TUNING", str(path)):
        yield path


def test_the_defaults_are_the_constants() -> None:
    assert asdict(UNTUNED) == {name: getattr(tuning, name.upper()) for name in asdict(UNTUNED)}
    assert BACKENDS[SM90].tuning == UNTUNED
    assert tuning_of(H200) == UNTUNED


def test_an_h100_has_defaults_of_its_own(path: Path) -> None:
    assert tuning_of(H100) == OF_GPUS[H100] != UNTUNED
    path.write_text(json.dumps(content(gpu=H100)))
    assert tuning_of(H100) == TUNED
    with h.environment("FP8MOE_TUNING", ""):
        assert tuning_of(H100) == OF_GPUS[H100]


def test_the_document_names_what_differs_on_an_h100() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "tuning.md").read_text().split())
    (listed,) = re.findall(rf"an {H100} has the values that `tune` found there: (.*?) \(`OF_GPUS`", text)
    units = {"": 1, " MiB": 2**20}
    named = {name.lower(): int(n) * units[unit] for name, n, unit in re.findall(r"`(\w+)` (\d+)( MiB)?", listed)}
    assert named == dict(asdict(OF_GPUS[H100]).items() - asdict(UNTUNED).items())


def test_a_file_for_this_gpu_is_used_and_logged(path: Path, plugin_log: pytest.LogCaptureFixture) -> None:
    plugin_log.set_level(logging.INFO, "fp8moe")
    assert tuning_of(H200) == TUNED
    values = "few_rows_per_expert 56 (default 40), packed_few_rows_per_expert 60, "
    values += "small_batch_bytes 0 (default 8589934592), packed_small_batch_bytes 335544320, "
    values += "early_below 96 (default 192), spare_multiprocessors 0 (default 8)"
    assert plugin_log.messages == [f"fp8moe: FP8MOE_TUNING={path}: {values}"]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"gpu": "NVIDIA H20"}, "it is for NVIDIA H20 and version "),
        ({"version": "0.0.1"}, "it is for NVIDIA H200 and version 0.0.1 of the plugin, and this is NVIDIA H200 and "),
        ({"version": "9.0", "tuning": {"of_the_future": 1}, "more": 1}, "it is for NVIDIA H200 and version 9.0 "),
    ],
)
def test_a_file_for_others_leaves_the_defaults(
    path: Path, plugin_log: pytest.LogCaptureFixture, changes: dict[str, Any], found: str
) -> None:
    path.write_text(json.dumps(content(**changes)))
    assert tuning_of(H200) == tuning_of(H200) == UNTUNED
    (line,) = plugin_log.messages
    assert line.startswith(f"fp8moe: FP8MOE_TUNING={path} is not used: {found}")
    assert line.endswith("Run `fp8moe-warmup tune` on this GPU")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ("{}", "gpu: Field required"),
        (json.dumps(content(more=1)), "more: Extra inputs are not permitted"),
        (json.dumps(content(tuning={"few_rows": 1})), "tuning: few_rows: Unexpected keyword argument"),
        (json.dumps(content(tuning={"early_below": -1})), "tuning: early_below: Input should be greater than"),
        (
            json.dumps(content(tuning={"spare_multiprocessors": 133})),
            "tuning: spare_multiprocessors: Input should be less",
        ),
        (json.dumps(content(tuning={"early_below": 1.5})), "tuning: early_below: Input should be a valid integer"),
    ],
)
def test_a_file_that_tune_did_not_write_is_refused(path: Path, text: str, why: str) -> None:
    path.write_text(text)
    with pytest.raises(UnsupportedError, match=f"which `fp8moe-warmup tune` did not write: '?{why}") as caught:
        tuning_of(H200)
    assert str(caught.value).endswith("Write it again, or unset the variable.")


def test_a_file_that_is_missing_is_refused(path: Path) -> None:
    path.unlink()
    with pytest.raises(UnsupportedError, match=f"{path}, which cannot be read: No such file or directory. Correct or"):
        tuning_of(H200)


def test_plans_follow_the_tuning() -> None:
    default, tuned = BACKENDS[SM90], BACKENDS[SM90].tuned(TUNED)
    assert tuned.tuning == TUNED
    assert isinstance(default.plan_layer(FEW_CHANNELS, 8, 132).choices, SmallBatchStep)
    assert not isinstance(tuned.plan_layer(FEW_CHANNELS, 8, 132).choices, SmallBatchStep)
    for rows, few in ((40, (True, True)), (56, (False, True)), (57, (False, False))):
        plans = [backend.plan_layer(MANY_CHANNELS, 32 * rows, 132).choices for backend in (default, tuned)]
        assert tuple(plan.tile.streams_weights for plan in plans) == few
        grouped = [
            backend.plan_grouped(Grouping(GroupedBy.COUNTS), 128 * 32, 32, 4096, 7168, rows, 132).choices
            for backend in (default, tuned)
        ]
        assert tuple(plan.tile.streams_weights for plan in grouped) == few
    keeps = [backend.plan_layer(FEW_CHANNELS, 32 * 128, 132).choices.keep_b for backend in (default, tuned)]
    assert keeps == [False, True]
    batched = [backend.plan_batched(FEW_CHANNELS, 512, 128, 132).choices.down for backend in (default, tuned)]
    assert len(set(batched)) == 2
    clusters = [plan_layer(FEW_CHANNELS, 16, 132, GpuTuning(spare_multiprocessors=spare)).clusters for spare in (0, 8)]
    assert clusters == [16, 15]
    assert isinstance(plan_push(FEW_CHANNELS, 4, 2, 132).layer, SmallBatchStep)
    assert not isinstance(plan_push(FEW_CHANNELS, 4, 2, 132, TUNED).layer, SmallBatchStep)


def test_packed_experts_have_thresholds_of_their_own() -> None:
    few, many = FEW_CHANNELS._replace(weights=PACKED_MXFP4), MANY_CHANNELS._replace(weights=PACKED_MXFP4)
    of_packed = GpuTuning(packed_few_rows_per_expert=40, packed_small_batch_bytes=0)
    for thresholds, packed_changes in ((TUNED, False), (of_packed, True)):
        backend = BACKENDS[SM90].tuned(thresholds)
        assert isinstance(backend.plan_layer(FEW_CHANNELS, 4, 132).choices, SmallBatchStep) == packed_changes
        assert isinstance(backend.plan_layer(few, 4, 132).choices, SmallBatchStep) != packed_changes
        plans = backend.plan_layer(many, 32 * 56, 132), backend.plan_batched(many, 512, 56, 132)
        assert [plan.choices.tile is PACKED_FEW_ROWS for plan in plans] == [not packed_changes] * 2


@pytest.mark.parametrize(
    ("intermediate", "few_rows", "rows", "wide"),
    [
        (1024, 60, 60, False),
        (1024, 60, 61, True),
        (1024, 60, 100, True),
        (1024, 60, 101, False),
        (896, 60, 100, False),
        (1024, 1, 2, True),
        (1024, 0, 1, False),
        (1024, 0, 100, False),
    ],
)
def test_wide_tiles_follow_rows_and_channels(intermediate: int, few_rows: int, rows: int, wide: bool) -> None:
    """`few_rows`: the threshold, of which 0 asks for many rows in each step."""
    spec = LayerSpec(MoeShape(8, 7168, intermediate, 256, 256), PACKED_MXFP4)
    tuning = GpuTuning(packed_few_rows_per_expert=few_rows, packed_small_batch_bytes=0)
    assert (plan_layer(spec, 32 * rows, 132, tuning).tile is PACKED_WIDE) == wide


def test_plans_of_both_do_not_mix() -> None:
    assert BACKENDS[SM90].tuned(UNTUNED) is BACKENDS[SM90]
    assert BACKENDS["sm_89"].tuned(TUNED) is BACKENDS["sm_89"]
    plans = [BACKENDS[SM90].tuned(each).plan_layer(FEW_CHANNELS, 1, 132) for each in (UNTUNED, TUNED, UNTUNED)]
    assert plans[0] is plans[2]
    assert plans[0] is not plans[1]


def test_the_file_decides_for_a_gpu_with_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    for name, found in ((H200, TUNED), ("NVIDIA H20", UNTUNED)):
        gpu = SimpleNamespace(name=name, multi_processor_count=78)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        device = devices._gpu.__wrapped__(torch.device("cuda", 0))
        assert device is not None
        assert device.backend.tuning == found


def test_triton_kernels_do_not_read_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    path.unlink()
    gpu = SimpleNamespace(name="NVIDIA L40S", multi_processor_count=142)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    device = devices._gpu.__wrapped__(torch.device("cuda", 0))
    assert device is not None
    assert device.backend is BACKENDS["sm_89"]
    (line,) = plugin_log.messages
    assert line.startswith("fp8moe: FP8MOE_TUNING has no effect on NVIDIA L40S, which Triton kernels serve")
