import itertools
import json

import pytest

SERVES = "fp8moe serves the experts: backend "
# In log-probability. Both engines round activations, ours to FP8: a lead smaller than that decides nothing.
CLEAR_LEAD = 0.5


def answers(done):
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"prompts"')))


def same_history(ours, twin):
    """Pairs of ours and the twin's (token, lead) after the same tokens: of an answer, up to the first difference."""
    for mine, other in zip(ours["prompts"], twin["prompts"], strict=True):
        yield from zip(mine, other, strict=True)
    for mine, other in zip(ours["generated"], twin["generated"], strict=True):
        pairs = list(zip(mine, other, strict=True))
        equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))
        yield from pairs[: equal + 1]


@pytest.mark.parametrize(
    ("family", "mode"),
    [("deepseek_v3", "eager"), ("deepseek_v3", "compile"), ("qwen3_moe", "eager")],
)
def test_the_engine_says_what_its_unquantized_twin_says(start_both, family, mode):
    ours, twin = start_both(family, mode)
    mine, other = answers(ours), answers(twin)
    positions = sum(len(tokens) for texts in other.values() for tokens in texts)
    decided = [(token, wanted) for (token, _), (wanted, lead) in same_history(mine, other) if lead > CLEAR_LEAD]
    assert SERVES + "reference" in ours.stdout + ours.stderr
    assert SERVES not in twin.stdout + twin.stderr
    assert len(decided) > positions / 2
    assert [pair for pair in decided if pair[0] != pair[1]] == []
