"""Which backend serves a device, and what the plans of Triton kernels promise."""

import pytest

from fp8moe_plugin.launches.backends import choose_backend
from fp8moe_plugin.plan.triton.catalog import TARGETS, target_of


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
