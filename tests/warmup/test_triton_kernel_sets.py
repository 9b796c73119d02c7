"""The Triton kernels listed for a checkpoint are complete: no step on any supported split launches another one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model, rank_shapes, split_refusal
from fp8moe_plugin.launches.kernel_sets import model_kernels
from fp8moe_plugin.launches.operands import LAYER_SLOTS
from fp8moe_plugin.launches.triton.layer import layer_launches
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from fp8moe_plugin.plan.triton.catalog import CHUNK, TARGETS, TRITON_DENSE_TILE_ROWS
from fp8moe_plugin.plan.triton.plans import plan_batched, plan_dense, plan_layer
from fp8moe_plugin.plan.tuning import TRITON_FEW_ROWS
from tests import helpers as h
from warmup.__main__ import main

PARALLEL = [Parallel(tp) for tp in (1, 2, 4, 8)] + [Parallel(8 // dp, dp, 8) for dp in (1, 2, 4, 8)]
SMS = (132, 114, 78)  # H100 SXM and H200, H100 PCIe, H20
targets = pytest.mark.parametrize("target", TARGETS)


def splits(model: Model) -> Iterator[Parallel]:
    return (way for way in PARALLEL if split_refusal(model, way) is None)


@targets
def test_every_step_of_every_split_of_every_model_is_in_its_plan(models: dict[str, Model], target: str) -> None:
    for model in models.values():
        plan = set(model_kernels(model, target))
        shapes = {MoeShape.of(rank_shapes(model, way).experts, model.experts.experts) for way in splits(model)}
        for shape in shapes:
            spec = LayerSpec(shape, ue8m0=model.ue8m0)
            few = TRITON_FEW_ROWS * shape.global_experts // shape.topk
            pairs = CHUNK // shape.topk
            for tokens in (1, 2, 4, 16, pairs, pairs + 1, few, few + 1, 65_536):
                launches = layer_launches(plan_layer(target, spec, tokens), LAYER_SLOTS, False)
                assert {launch.key for launch in launches} <= plan
            for expected_m in (1, TRITON_FEW_ROWS, TRITON_FEW_ROWS + 1):
                batched = plan_batched(target, spec, 64, expected_m)
                assert {batched.gate_up, batched.down} <= plan


@targets
def test_every_dense_gemm_is_in_the_plan_of_its_layer(target: str) -> None:
    plan = set(h.linear_kernels(False, target))
    rows = [*range(1, 300), *(count for rows in TRITON_DENSE_TILE_ROWS for count in (rows, rows + 1)), 65_536]
    for n in (24, 576, 2112, 7168, 24_576):
        assert {plan_dense(target, m, n, False, sms, False).kernel for m in rows for sms in SMS} <= plan


@targets
def test_layers_load_the_plan_and_kernels_have_reasons(models: dict[str, Model], target: str) -> None:
    for model in models.values():
        layers = [h.moe_kernels(model.ue8m0, batched, target) for batched in (False, True)]
        found = model_kernels(model, target)
        assert set(found) == {*h.linear_kernels(model.ue8m0, target), *layers[0], *layers[1]}
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
