"""Whatever is passed for an argument of an op or of a DeepGEMM name, it is taken, or refused by one of our errors."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from fp8moe_plugin import deep_gemm, ops
from fp8moe_plugin.errors import InvalidInputError, UnsupportedError
from fp8moe_plugin.ops import devices
from tests.deep_gemm import test_wrong_calls
from tests.ops import test_bad_input, test_mqa_logits

CPU = torch.device("cpu")
INDICES = {"block_table", "schedule_meta", "kv_cache"}  # whose values only FP8MOE_DEBUG=1 checks
ODD_VALUES = [
    *(None, 0, -1, 3, 2**63, 2**200, 1.5, float("nan"), "x", b"x", [], (), [1], (1, 0, 128), [[1]], {}, object(), True),
    *(torch.float64, torch.zeros(()), torch.zeros(0), torch.zeros(2, 2), torch.ones(1, dtype=torch.bool)),
    *(([], []), (None, None), (torch.zeros(0), torch.zeros(0)), [128, -128], [2**62, 2**62], 1j, range(3)),
]


def right_calls() -> Iterator[tuple[ModuleType, str, dict[str, Any]]]:
    for module, calls in (
        (ops, test_bad_input.right_calls(CPU) | test_mqa_logits.right_calls(CPU)),
        (deep_gemm, test_wrong_calls.right_calls(CPU)),
    ):
        for name, call in calls.items():
            yield module, name, call
            if "use_psum_layout" in inspect.signature(getattr(module, name)).parameters and module is deep_gemm:
                yield module, name, call | {"use_psum_layout": True}


def odd_tensors(tensor: torch.Tensor) -> list[Any]:
    """Other layouts and shapes, with and without shared elements, and tensors of other kinds."""
    return [
        *(tensor[:1].expand_as(tensor), tensor[..., :1].expand_as(tensor), tensor.flatten()[0], tensor[:0]),
        *(tensor[..., :0], tensor[None], tensor.flatten(), tensor.mT if tensor.dim() > 1 else tensor[::2]),
        *(tensor.double(), tensor.to(torch.uint8), tensor.to("meta"), tensor.float().requires_grad_(), tensor.tolist()),
        *(tensor.float().to_sparse(), tensor.as_strided(tensor.shape, (1,) * tensor.dim())),
    ]


def odd(value: Any) -> Iterator[Any]:
    yield from ODD_VALUES
    if isinstance(value, torch.Tensor):
        yield from odd_tensors(value)
    if isinstance(value, tuple | list):
        for i, part in enumerate(value):
            for other in (*ODD_VALUES, *(odd_tensors(part) if isinstance(part, torch.Tensor) else ())):
                yield type(value)((*value[:i], other, *value[i + 1 :]))


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (devices, "_num_sms"),
        (deep_gemm.process, "_alignment"),
        (deep_gemm.process, "_tc_util"),
        (deep_gemm.process, "_pdl"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def cases() -> Iterator[Any]:
    for module, name, call in right_calls():
        function = getattr(module, name)
        for argument in sorted(inspect.signature(function).parameters.keys() - INDICES):
            yield pytest.param(function, argument, call, id=f"{name}-{argument}")


@pytest.mark.parametrize(("function", "argument", "call"), list(cases()))
def test_an_odd_argument_is_taken_or_refused(
    function: Callable[..., object], argument: str, call: dict[str, Any]
) -> None:
    for value in odd(call.get(argument)):
        with contextlib.suppress(InvalidInputError, UnsupportedError):
            function(**call | {argument: value})
