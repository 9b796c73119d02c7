"""Checks that passed are skipped for calls with the same signature, and only for those."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8moe_plugin import ops
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.ops import signature
from fp8moe_plugin.ops.checks import CheckedOnce
from tests import helpers as h
from tests.ops.test_bad_input import BATCHED, LINEAR, MOE, right_calls

TENSORS = [
    (op, name)
    for op, call in right_calls(torch.device("cpu")).items()
    for name, value in call.items()
    if isinstance(value, torch.Tensor)
]


@pytest.fixture
def counted() -> tuple[Callable[..., None], list[Any]]:
    """Checks that refuse float16, and the arguments for which they ran."""
    seen: list[Any] = []

    @CheckedOnce
    def check(*tensors: torch.Tensor | None) -> int:
        seen.append(tensors)
        if any(isinstance(t, torch.Tensor) and t.dtype == torch.float16 for t in tensors):
            raise InvalidInputError("float16")
        return len(tensors)

    return check, seen


def test_checks_run_once_for_a_signature(counted):
    check, seen = counted
    for _ in range(3):
        check(torch.zeros(4), None)
    assert len(seen) == 1
    check(torch.zeros(5), None)
    check(torch.zeros(4), torch.zeros(4))
    assert len(seen) == 3


def test_checks_are_cached_but_addresses_are_not(counted):
    check, _ = counted
    for _ in range(2):
        x = torch.zeros(4)
        assert check(x, None) == (2, (x.data_ptr(), 0))


def test_with_debug_each_call_is_checked(counted):
    check, seen = counted
    check(torch.zeros(4))
    with h.environment("FP8MOE_DEBUG", "1"):
        check(torch.zeros(4))
        check(torch.zeros(4))
    assert len(seen) == 3


def test_checks_that_failed_run_again(counted):
    check, seen = counted
    for _ in range(2):
        with pytest.raises(InvalidInputError):
            check(torch.zeros(4).half())
    assert len(seen) == 2


@pytest.mark.parametrize("argument", [[1.0], torch.eye(2).to_sparse()], ids=["list", "sparse"])
def test_checks_of_a_call_without_signature_run_each_time(counted, argument):
    check, seen = counted
    for _ in range(2):
        with pytest.raises(InvalidInputError):
            check(argument, torch.zeros(2).half())
    assert len(seen) == 2


def test_without_signature_there_are_addresses_all_the_same(counted):
    check, seen = counted
    x = torch.zeros(4)
    with torch.autograd.forward_ad.dual_level():
        for _ in range(2):
            assert check(x, None) == (2, (x.data_ptr(), 0))
    assert len(seen) == 2


def test_signatures_are_bounded(counted, monkeypatch):
    monkeypatch.setattr(signature, "MAX_SIGNATURES", 4)
    check, seen = counted
    for size in range(9):
        check(torch.zeros(size))
    assert len(check._passed) <= 4
    check(torch.zeros(8))
    assert len(seen) == 9


class ClearedInBetween(dict):
    """As if another thread cleared it right behind each look."""

    def __contains__(self, key):
        found = super().__contains__(key)
        self.clear()
        return found

    def get(self, key, default=None):
        found = super().get(key, default)
        self.clear()
        return found


def test_another_thread_may_clear_what_has_passed(counted):
    check, seen = counted
    x = torch.zeros(4)
    first = check(x)
    check._passed = ClearedInBetween(check._passed)
    assert check(x) == first
    assert len(seen) == 1


@pytest.mark.parametrize(("op", "argument"), TENSORS)
def test_a_tensor_inside_vmap_is_refused_each_time(device, op, argument):
    call = right_calls(device)[op]
    getattr(ops, op)(**call)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="has no strided storage"):
            torch.vmap(lambda each: getattr(ops, op)(**call | {argument: each}))(call[argument][None])


def test_after_a_refused_call_inside_vmap_others_are_still_checked(device):
    call = right_calls(device)[MOE]
    for dtype in (torch.bfloat16, torch.float16):
        wrong = call | {"hidden_states": call["hidden_states"].to(dtype)}
        with pytest.raises(InvalidInputError):
            torch.vmap(lambda each, wrong=wrong: ops.fused_moe(**wrong | {"topk_weights": each}))(
                call["topk_weights"][None]
            )


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("op", "argument"), [(MOE, "hidden_states"), (BATCHED, "hidden_states"), (LINEAR, "x"), (MOE, "topk_weights")]
)
def test_a_fake_tensor_is_refused_behind_a_right_call(device, op, argument):
    call = right_calls(device)[op]
    getattr(ops, op)(**call)
    call[argument] = FakeTensorMode().from_tensor(call[argument])
    with pytest.raises(InvalidInputError, match="holds no data"):
        getattr(ops, op)(**call)
