"""The Triton kernels listed for a checkpoint are complete: no step on any supported split launches another one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.shapes import Model, rank_shapes
from fp8moe_plugin.ops.moe_launches import layer_launches
from fp8moe_plugin.ops.operands import LAYER_SLOTS, Router
from fp8moe_plugin.plan import MoeShape, Output, linear_kernels, model_kernels, moe_kernels
from fp8moe_plugin.plan.triton_catalog import CHUNK, DENSE_ROWS, TARGETS
from fp8moe_plugin.plan.triton_step import plan_triton_batched, plan_triton_dense, plan_triton_step
from fp8moe_plugin.plan.tuning import TRITON_FEW_ROWS
from tests import helpers as h
from tests.warmup.test_closure import SMS, splits
from warmup.__main__ import main

targets = pytest.mark.parametrize("target", TARGETS)


@targets
def test_every_step_of_every_split_of_every_model_is_in_its_plan(models: dict[str, Model], target: str) -> None:
    for model in models.values():
        plan = set(model_kernels(model, target))
        shapes = {MoeShape.of(rank_shapes(model, way).experts, model.experts.experts) for way in splits(model)}
        for shape in shapes:
            few = TRITON_FEW_ROWS * shape.global_experts // shape.topk
            pairs = CHUNK // shape.topk
            for tokens in (1, 2, 4, 16, pairs, pairs + 1, few, few + 1, 65_536):
                step = plan_triton_step(target, shape, tokens, model.ue8m0)
                launches = layer_launches(h.Recorder(), LAYER_SLOTS, step, Router(ids_64=False))
                assert {launch.key for launch in launches} <= plan
            for expected_m in (1, TRITON_FEW_ROWS, TRITON_FEW_ROWS + 1):
                batched = plan_triton_batched(
                    target, shape.local_experts, 64, shape.intermediate, expected_m, model.ue8m0
                )
                assert {batched.gate_up, batched.down} <= plan


@targets
def test_every_dense_gemm_is_in_the_plan_of_its_layer(target: str) -> None:
    plan = set(linear_kernels(False, target))
    rows = [*range(1, 300), *(count for rows in DENSE_ROWS for count in (rows, rows + 1)), 65_536]
    for n in (24, 576, 2112, 7168, 24_576):
        assert {plan_triton_dense(target, m, n, Output.BF16, sms).kernel for m in rows for sms in SMS} <= plan


@targets
def test_what_the_layers_load_is_the_plan_and_each_kernel_has_a_reason(models: dict[str, Model], target: str) -> None:
    for model in models.values():
        layers = [moe_kernels(model.ue8m0, batched, target) for batched in (False, True)]
        found = model_kernels(model, target)
        assert set(found) == {*linear_kernels(model.ue8m0, target), *layers[0], *layers[1]}
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
