"""What README.md and the documents show works as shown."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import overview
from tests import helpers as h
from warmup.options import parse
from warmup.parser import COMPLETION

ROOT = Path(__file__).parents[1]
README, OPS = ROOT / "README.md", ROOT / "docs" / "ops.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", OPS.read_text(), re.DOTALL)
TEXT = "".join(path.read_text() for path in (README, *(ROOT / "docs").glob("*.md")))
COMMANDS = [part for line in re.findall(r"(?m)^    (fp8moe-warmup .*)$", TEXT) for part in line.split(" && ")]
LONGEST = 150  # lines


@pytest.mark.parametrize("example", EXAMPLES, ids=["ops", "deep_gemm"])
def test_an_example_runs(example: str) -> None:
    exec(compile(example, str(OPS), "exec"), {})


def test_the_log_line_counts_the_kernels_that_a_worker_loads() -> None:
    """Those of dense layers and of experts; they do not depend on the checkpoint."""
    (loaded, bundled) = re.findall(
        r"layout contiguous, (\d+) kernels loaded .* \((\d+) from the bundle", README.read_text()
    )[0]
    counts = {len({*h.linear_kernels(ue8m0), *h.moe_kernels(ue8m0)}) for ue8m0 in (False, True)}
    assert counts == {int(loaded)} == {int(bundled)}


def test_the_first_page_is_short() -> None:
    assert len(README.read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_lines_are_valid(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)[1:]
    if "convert" in words or words[0] == COMPLETION:  # needs a folder with weights; tested with a shell
        return
    if words != ["COMMAND", "--help"]:
        parse(words)


def test_the_table_and_the_plot_are_those_of_the_results() -> None:
    text = README.read_text()
    assert overview.rendered(text) == text, "run python -m benchmarks.overview"
    for plot in overview.PLOTS:
        assert overview.digest() in plot.read_text(), "run python -m benchmarks.overview"


def test_a_changed_figure_makes_the_table_stale() -> None:
    text = README.read_text()
    assert "295.0 |" in text
    assert overview.rendered(text.replace("295.0 |", "295.1 |")) == text
