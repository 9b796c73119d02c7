"""What the README shows works as shown."""

import re
from pathlib import Path

import pytest

from fp8moe_plugin.plan import linear_kernels, moe_kernels

README = Path(__file__).parents[1] / "README.md"


EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["ops", "deep_gemm"])
def test_an_example_runs(example: str) -> None:
    exec(compile(example, str(README), "exec"), {})


def test_the_log_line_counts_the_kernels_that_a_worker_loads() -> None:
    """Those of dense layers and of experts; they do not depend on the checkpoint."""
    (loaded, bundled) = re.findall(
        r"layout contiguous, (\d+) kernels loaded .* \((\d+) from the bundle", README.read_text()
    )[0]
    counts = {len({*linear_kernels(ue8m0), *moe_kernels(ue8m0, batched=False)}) for ue8m0 in (False, True)}
    assert counts == {int(loaded)} == {int(bundled)}
