"""The command in a refusal to compile is for the same model and split."""

import shlex
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.layers import kernels
from fp8moe_plugin.layers.vllm import config as seam
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.sm90.catalog import combine_key
from warmup.options import parse


@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V3", "/models/a name with spaces"])
@pytest.mark.parametrize(("tp", "dp", "expert_parallel"), [(1, 1, False), (8, 1, False), (8, 1, True), (2, 4, True)])
def test_it_names_the_model_and_the_split(
    monkeypatch: pytest.MonkeyPatch, model: str, tp: int, dp: int, expert_parallel: bool
) -> None:
    ranks = SimpleNamespace(tensor_parallel_size=tp, data_parallel_size=dp, enable_expert_parallel=expert_parallel)
    engine = SimpleNamespace(parallel_config=ranks, model_config=SimpleNamespace(model=model))
    monkeypatch.setattr(seam, "get_current_vllm_config", lambda: engine)
    words = shlex.split(seam.warmup_command())
    assert words[0] == "fp8moe-warmup"
    options = parse(words[1:])
    assert options.model == model
    assert options.parallel == Parallel(tp, dp, tp * dp if expert_parallel else 1)


def test_it_reaches_whoever_looks_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(kernels, "backend_of", lambda weight: BACKENDS[SM90])
    monkeypatch.setattr(kernels.driver, "load", lambda *arguments: asked.append(arguments))
    weight = SimpleNamespace(device=SimpleNamespace(index=3))
    kernels.prepare_kernels([combine_key()], weight, "the command")
    assert asked == [(combine_key(), 3, "the command")]
