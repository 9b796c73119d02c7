"""The Triton kernels listed for a checkpoint are those that its layers load, each with a reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.launches.kernel_sets import model_kernels
from fp8moe_plugin.plan.triton.catalog import TARGETS
from tests import helpers as h
from warmup.__main__ import main

targets = pytest.mark.parametrize("target", TARGETS)


@targets
def test_layers_load_the_plan_and_kernels_have_reasons(models: dict[str, Model], target: str) -> None:
    for model in models.values():
        found = model_kernels(model, target)
        assert set(found) == h.loaded_kernels(model, target)
        assert all(found.values())
        assert len(found) <= 20


def test_list_and_verify_are_about_the_kernels_of_the_gpu(
    checkpoint: Callable[[str], Path], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(checkpoint("DeepSeek-V3")), "--gpu", "sm120"]
    assert main(["list", *model]) == 0
    listed = capsys.readouterr().out
    assert listed.count("(sm_120)") == len(listed.splitlines()) - 1
    assert main(["verify", *model]) == 1
    assert "--gpu sm120`" in capsys.readouterr().out
