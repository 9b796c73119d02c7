"""The plan of steps whose tokens the ranks store into each other's windows."""

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
