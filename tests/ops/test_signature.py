"""Signatures of tensors, by the C extension and by Python."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8moe_plugin.ops import signature
from fp8moe_plugin.ops.signature import addresses_of, described

Describe = Callable[..., tuple[Any, tuple[int, ...]]]
MEMORY = torch.zeros(1024, dtype=torch.uint8)


@pytest.fixture(params=["native", "python"])
def describe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Describe:
    if request.param == "python":
        monkeypatch.setattr(signature, "_native", lambda: None)
    elif signature._native() is None:
        pytest.skip("built without a C compiler, or an older torch")
    return described


def placed(begin: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns a tensor from this byte of memory that all share."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return MEMORY[begin : begin + size].view(dtype).view(shape)


def different() -> dict[str, tuple[Any, ...]]:
    """Calls that differ in what checks or plans depend on."""
    x = placed(0, torch.bfloat16, 4, 8)
    return {
        "one": (x,),
        "two": (x, x),
        "none": (x, None),
        "none first": (None, x),
        "dtype": (placed(0, torch.float16, 4, 8),),
        "fp8": (placed(0, torch.float8_e4m3fn, 4, 8),),
        "another fp8": (placed(0, torch.float8_e5m2, 4, 8),),
        "bytes": (placed(0, torch.uint8, 4, 8),),
        "signed bytes": (placed(0, torch.int8, 4, 8),),
        "bits of bytes": (placed(0, torch.uint8, 4, 8).view(torch.uint4),),
        "signed bits of bytes": (placed(0, torch.int8, 4, 8).view(torch.int4),),
        "truth": (placed(0, torch.bool, 4, 8),),
        "shape": (placed(0, torch.bfloat16, 8, 4),),
        "dimensions": (placed(0, torch.bfloat16, 4, 8, 1),),
        "fewer dimensions": (placed(0, torch.bfloat16, 32),),
        "no dimension": (placed(0, torch.bfloat16),),
        "strides": (placed(0, torch.bfloat16, 8, 4).t(),),
        "slice": (placed(0, torch.bfloat16, 4, 16)[:, :8],),
        "alignment": (placed(8, torch.bfloat16, 4, 8),),
        "empty": (placed(0, torch.bfloat16, 0, 8),),
    }


def test_different_calls_have_different_signatures(describe: Describe) -> None:
    found = {name: describe(call)[0] for name, call in different().items()}
    assert None not in found.values()
    for one, other in itertools.combinations(found, 2):
        assert found[one] != found[other], (one, other)


def test_a_gradient_that_is_expected_is_part_of_the_signature(describe: Describe) -> None:
    plain, wants = torch.zeros(4), torch.zeros(4, requires_grad=True)
    assert describe((plain,))[0] != describe((wants,))[0]
    with torch.no_grad():
        assert describe((plain,))[0] == describe((wants,))[0]


def test_equal_tensors_elsewhere_share_a_signature(describe: Describe) -> None:
    for name, call in different().items():
        moved = [t if t is None else MEMORY.clone()[t.data_ptr() - MEMORY.data_ptr() :] for t in call]
        copies = tuple(
            m if m is None else torch.as_strided(m.view(t.dtype), t.shape, t.stride())
            for m, t in zip(moved, call, strict=True)
        )
        assert describe(copies)[0] == describe(call)[0], name
        assert hash(describe(copies)[0]) == hash(describe(call)[0])


def test_addresses_are_those_of_the_tensors(describe: Describe) -> None:
    for call in different().values():
        assert describe(call)[1] == addresses_of(call)


@pytest.mark.parametrize(
    "argument", [[1.0], 3, torch.Tensor, torch.eye(2).to_sparse()], ids=["list", "int", "class", "sparse"]
)
def test_what_has_no_storage_has_no_signature(describe: Describe, argument: Any) -> None:
    for call in ((argument,), (torch.zeros(2), argument), (argument, None)):
        assert describe(call) == (None, ())


def test_inside_a_transform_there_is_no_signature(describe: Describe) -> None:
    seen = []
    torch.vmap(lambda each: (seen.append(describe((each,))), each)[1])(torch.zeros(2, 3))
    with torch.autograd.forward_ad.dual_level():
        seen.append(describe((torch.zeros(3),)))
    assert seen == [(None, ()), (None, ())]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("make", [FakeTensorMode().from_tensor, lambda x: x.to("meta")], ids=["fake", "meta"])
def test_a_tensor_without_data_never_has_the_signature_of_one_with_it(
    describe: Describe, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.zeros(2, 4)
    assert describe((make(x),))[0] != describe((x,))[0]


class ChangedByLooking(torch.Tensor):
    """Gets other data, of another shape, while it is looked at."""

    @property
    def requires_grad(self) -> bool:
        self.data = torch.zeros(2)
        return False


def test_changing_tensor_is_described_in_its_old_state(describe: Describe) -> None:
    x = torch.zeros([1] * 6)
    as_it_was = describe((x,))[0]
    assert describe((x.clone().as_subclass(ChangedByLooking),))[0] == as_it_was


@pytest.mark.parametrize("too_much", [(torch.zeros(1),) * 17, (torch.zeros([1] * 9),)], ids=["tensors", "dimensions"])
def test_what_does_not_fit_has_no_native_signature(too_much: tuple[torch.Tensor, ...]) -> None:
    native = pytest.importorskip("fp8moe_plugin.ops._signature", reason="built without a C compiler")
    assert native.describe(torch.Tensor.__dlpack_c_exchange_api__, too_much, False) is None


def test_native_refuses_other_arguments() -> None:
    native = pytest.importorskip("fp8moe_plugin.ops._signature", reason="built without a C compiler")
    for wrong in ((), (torch.Tensor.__dlpack_c_exchange_api__, [], False), (None, (), False)):
        with pytest.raises((TypeError, ValueError)):
            native.describe(*wrong)
