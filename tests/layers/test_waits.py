"""Loading of experts in MXFP4 takes few launches, and reads no value from the device: the meta device has none."""

import pytest
import torch

from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.pack import Share, pack, part_of_rank
from fp8moe_plugin.layers.parameters import empty_pair
from fp8moe_plugin.layers.recode import block_fp8
from fp8moe_plugin.ops.fp4_blocks import SPAN
from tests.layers.operations import counted

META = torch.device("meta")
N, K = 320, 384  # channels of a gate projection
LAST = Share(N, 2, 1)  # it has 64 of 256 channels
PADDING = 2  # launches, of codes and exponents


def recode(codes: torch.Tensor, exponents: torch.Tensor) -> None:
    block_fp8("w", codes, exponents)


def pack_part(codes: torch.Tensor, exponents: torch.Tensor) -> None:
    given = zip(Role, (codes, exponents), strict=True)
    both = tuple(part_of_rank(role, tensor, False, LAST) for role, tensor in given)
    parameters = tuple(tensor[None] for tensor in empty_pair(PACKED_MXFP4, 512, K, META))
    pack("w", parameters, [0], "w1", both, running=False, balanced=False)


def projection(span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes on the device and exponents on the host."""
    exponents = torch.full((N, K // 32), 120, dtype=torch.uint8)
    exponents[-1, 3] -= span
    return torch.empty(N, K // 2, dtype=torch.uint8, device=META), exponents.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(("load", "launches"), [(recode, 9), (pack_part, 14)])
def test_exponents_are_judged_on_the_host(load, launches):
    given = projection(SPAN)
    load(*given)  # makes the tables
    with counted("meta") as operations:
        load(*given)
    assert operations.launches - PADDING == launches


@pytest.mark.parametrize("load", [recode, pack_part])
def test_wide_exponents_are_judged_with_their_codes(load):
    with pytest.raises(RuntimeError, match="meta"):
        load(*projection(SPAN + 1))
