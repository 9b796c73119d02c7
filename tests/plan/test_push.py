"""The plan of steps whose tokens the ranks store into each other's windows."""

import pytest

from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, plan_layer
from fp8moe_plugin.plan.sm90.push import plan_push
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from fp8moe_plugin.plan.tuning import MULTIPROCESSORS


def test_ranks_with_unequal_shares_agree_on_the_format() -> None:
    ranks, rows = 3, 4
    specs = [LayerSpec(MoeShape(4, 4096, 4096, local, 256)) for local in (85, 86)]
    assert len({type(plan_layer(spec, ranks * rows)) for spec in specs}) == 2, "alone they would differ"
    fewer, more = (plan_push(spec, ranks, rows, MULTIPROCESSORS) for spec in specs)
    assert fewer.push_tokens == more.push_tokens
    assert not any(isinstance(step.layer, SmallBatchStep) for step in (fewer, more))


@pytest.mark.parametrize("rows", [1, 4, 500])
def test_ranks_with_other_further_steps_agree_on_the_format(rows: int) -> None:
    alone = LayerSpec(MoeShape(6, 4096, 256, 32, 256), PACKED_MXFP4)
    without, with_steps = (plan_push(alone._replace(further_steps=(0, n)), 8, rows, MULTIPROCESSORS) for n in (0, 1))
    assert isinstance(plan_layer(alone, 8), SmallBatchStep), "without a group, few tokens are a small batch"
    assert without.push_tokens == with_steps.push_tokens
    assert not any(isinstance(step.layer, SmallBatchStep) for step in (without, with_steps))
