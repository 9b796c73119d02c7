import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import helpers as h
from tests.steps import combine


def random_call(gen: torch.Generator, tokens: int, topk: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """Rows, slots, a third of them -1, and router weights; rows without a slot are NaN."""
    rows = h.random_tokens(gen, tokens * topk, hidden)
    slots = torch.randperm(tokens * topk, generator=gen, device=gen.device).view(tokens, topk)
    weights = torch.rand(tokens, topk, generator=gen, device=gen.device)
    missing = slots % 3 == 0
    rows[slots[missing]] = float("nan")
    weights[missing] = float("nan")
    return rows, torch.where(missing, -1, slots).int(), weights


@given(tokens=h.row_counts, topk=st.integers(1, 40), hidden=st.sampled_from((128, 640, 2048)), seed=h.seeds)
def test_each_token_gets_the_weighted_sum_of_its_rows_and_nothing_else(device, tokens, topk, hidden, seed):
    rows, slots, weights = random_call(h.seeded(seed, device), tokens, topk, hidden)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
    for t, j in (slots >= 0).nonzero().tolist():
        expected[t] += weights[t, j].double() * rows[slots[t, j]].double()
    out = h.poisoned(tokens, hidden, dtype=torch.bfloat16, device=device)
    assert combine(rows, slots, weights, out) is out
    h.assert_rounded(out, expected)


def test_a_token_without_rows_gets_exact_zeros(device):
    rows, slots, weights = random_call(h.seeded(0, device), 7, 4, 256)
    slots[3] = -1
    out = combine(rows, slots, weights, h.poisoned(7, 256, dtype=torch.bfloat16, device=device))
    assert (out[3] == 0).all()
    assert not out.isnan().any()


def test_nan_stays_in_the_token_of_its_row(device):
    rows, slots, weights = random_call(h.seeded(0, device), 9, 4, 256)
    slots[5, 2] = 17
    slots[(slots == 17) & (torch.arange(9, device=device) != 5)[:, None]] = -1
    weights[5, 2] = 0.5
    rows[17] = 1.0
    out = combine(rows, slots, weights, torch.empty(9, 256, dtype=torch.bfloat16, device=device))
    rows[17, 100] = float("nan")
    broken = combine(rows, slots, weights, torch.empty_like(out))
    assert broken[5, 100].isnan()
    broken[5, 100] = out[5, 100]
    assert h.same_bits(broken, out)


def test_two_runs_agree_bitwise(device):
    call = random_call(h.seeded(0, device), 129, 8, 2048)
    first, second = (combine(*call, torch.empty(129, 2048, dtype=torch.bfloat16, device=device)) for _ in range(2))
    assert h.same_bits(first, second)
