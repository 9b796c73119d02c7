"""Which backend serves a device, and what the plans of Triton kernels promise."""

import pytest

from fp8moe_plugin.launches.backends import choose_backend
from fp8moe_plugin.launches.operands import LAYER_SLOTS
from fp8moe_plugin.launches.triton.layer import layer_launches
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from fp8moe_plugin.plan.triton.catalog import TARGETS, target_of
from fp8moe_plugin.plan.triton.plans import plan_dense, plan_layer

SHAPE = MoeShape(topk=8, hidden=7168, intermediate=256, local_experts=256, global_experts=256)
TOKENS = (1, 8, 16, 17, 512, 513, 4096)


@pytest.mark.parametrize(
    ("wanted", "capability", "backend", "need"),
    [
        ("auto", (9, 0), "sm90", None),
        ("auto", (8, 9), "triton", None),
        ("auto", (10, 3), "triton", None),
        ("auto", (12, 0), "triton", None),
        ("auto", None, "reference", None),
        ("auto", (8, 0), "triton", "an NVIDIA GPU with FP8"),
        ("auto", (11, 0), "triton", "an NVIDIA GPU with FP8"),
        ("triton", (9, 0), "triton", None),
        ("triton", None, "triton", "an NVIDIA GPU with FP8"),
        ("sm90", (9, 0), "sm90", None),
        ("sm90", (12, 0), "sm90", "a Hopper GPU"),
        ("sm90", None, "sm90", "a Hopper GPU"),
        ("reference", (7, 5), "reference", None),
    ],
)
def test_each_gpu_gets_the_backend_that_the_readme_says(
    wanted: str, capability: tuple[int, int] | None, backend: str, need: str | None
) -> None:
    found, lacking = choose_backend(wanted, capability)
    assert (found.name if found else "triton" if lacking else "reference") == backend
    assert (need in lacking) if need and lacking else need is lacking


def test_a_target_is_that_of_its_capability() -> None:
    assert [target_of(capability) for capability, _ in TARGETS.values()] == list(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_start_early_where_they_know_to_wait(target: str) -> None:
    launches = [
        launch
        for tokens in TOKENS
        for launch in layer_launches(plan_layer(target, LayerSpec(SHAPE), tokens), LAYER_SLOTS, False)
    ]
    assert {launch.pdl for launch in launches} == {target != "sm_89"}  # which has no PDL
    assert all(launch.pdl == bool(dict(launch.key.defines)["PDL"]) for launch in launches)


def test_batch_invariant_plans_depend_on_no_number_of_tokens() -> None:
    spec = LayerSpec(SHAPE, batch_invariant=True)
    steps = [plan_layer("sm_90", spec, tokens) for tokens in TOKENS]
    dense = [plan_dense("sm_90", m, n, False, 132, True) for m in TOKENS for n in (2112, 7168)]
    assert len({(step.gate_up, step.down) for step in steps}) == 1
    assert len({plan.kernel for plan in dense}) == 1
    assert len({plan_layer("sm_90", LayerSpec(SHAPE), tokens).down for tokens in TOKENS}) > 1
