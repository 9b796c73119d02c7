"""What vLLM needs for DeepSeek-V4 besides the plugin, as `explain` and `doctor` say it."""

import importlib.util
from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.shapes import Model
from tests.checkpoint.test_deepseek_v4 import FLASH
from tests.checkpoint.test_model import describe
from warmup import needs
from warmup.diagnosis import Diagnosis, Engine, Gpu

GPU = Gpu(ordinal=0, name="H200", compute_capability="9.0", memory_bytes=1, served=True, backend="sm90", refusal=None)
VLLM = Engine(
    name="vLLM", package="vllm", version="0.33.0", tested="", served=True, entry_point="fp8moe", excluded_by=None
)
SERVING = Diagnosis(gpus=[GPU], engines=[VLLM])
NOTE = (
    "Besides this plugin, vLLM needs TileLang with nvcc for hyper-connections and CUTLASS DSL (nvidia-cutlass-dsl) "
    "for compressed keys."
)


@pytest.fixture
def flash(tmp_path: Path) -> Model:
    return read_model(describe(tmp_path, FLASH))


def test_only_what_the_layers_use_is_needed(tmp_path: Path, flash: Model, models: dict[str, Model]) -> None:
    assert needs.note(flash) == [NOTE]
    windows = read_model(describe(tmp_path, FLASH, compress_ratios=[0] * 43))
    assert needs.needs_of(windows) == [needs.TILELANG]
    assert needs.note(models["DeepSeek-V3"]) == []
    assert list(needs.findings(models["DeepSeek-V3"], SERVING)) == []


@pytest.mark.parametrize(
    ("installed", "nvcc", "found", "ok"),
    [
        (("tilelang", "cutlass"), True, NOTE, True),
        (("cutlass",), True, f"{NOTE} Missing: TileLang", False),
        (("tilelang", "cutlass"), False, f"{NOTE} Missing: nvcc", False),
        ((), False, f"{NOTE} Missing: TileLang, CUTLASS DSL (nvidia-cutlass-dsl), nvcc", False),
    ],
)
def test_doctor_looks_for_them_where_vllm_serves(
    flash: Model,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    installed: tuple[str, ...],
    nvcc: bool,
    found: str,
    ok: bool,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if nvcc:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
    (finding,) = needs.findings(flash, SERVING)
    assert (finding.found, finding.ok, bool(finding.advice)) == (found, ok, not ok)
    for elsewhere in (Diagnosis(engines=[VLLM]), Diagnosis(gpus=[GPU])):
        (finding,) = needs.findings(flash, elsewhere)
        assert (finding.found, finding.ok) == (NOTE, None)
