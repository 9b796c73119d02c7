"""MXFP4 in block FP8: every weight is exactly the same number."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.recode import (
    E2M1,
    HIGHEST_EXPONENT,
    SPAN,
    Halves,
    block_fp8,
    check_exponents,
    check_memory,
    copies_early,
    to_device,
)
from fp8moe_plugin.ops.reference import dequantize_blocks

VALUES = torch.tensor(E2M1 + tuple(-value for value in E2M1), dtype=torch.float64)
CPU = torch.device("cpu")
ZERO, MINUS_ZERO = 0x00, 0x88  # bytes of two codes


def dequantized(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    values = VALUES[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    return values * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)


def recode(codes: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return block_fp8("w", codes, exponents.view(torch.float8_e8m0fnu))


def test_each_code_with_each_exponent_is_exact():
    """In blocks of each largest exponent, with each smaller one that they may have."""
    largest = torch.arange(HIGHEST_EXPONENT + 1)
    codes = torch.arange(256, dtype=torch.uint8).repeat(SPAN + 1, len(largest))
    exponents = (largest - torch.arange(SPAN + 1)[:, None]).clamp(min=0).to(torch.uint8).repeat_interleave(16, 1)
    q, scales = recode(codes, exponents)
    expected = dequantized(codes, exponents)
    assert torch.equal(q.double() * scales.double().repeat_interleave(128, 1), expected)
    assert torch.equal(q.float().signbit(), expected.signbit())


@pytest.mark.parametrize(("n", "k"), [(300, 640), (128, 32), (1, 160)])
def test_blocks_at_the_edges_may_be_smaller(n, k):
    codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
    exponents = torch.randint(100, 100 + SPAN + 1, (n, k // 32), dtype=torch.uint8)
    q, scales = recode(codes, exponents)
    assert q.is_contiguous()
    assert list(scales.shape) == [-(-n // 128), -(-k // 128)]
    assert torch.equal(dequantize_blocks(q, scales).double(), dequantized(codes, exponents))


@pytest.mark.parametrize("zeros", [ZERO, MINUS_ZERO])
def test_exponents_of_zeros_do_not_count(zeros):
    codes, exponents = torch.full((128, 64), 0x11, dtype=torch.uint8), torch.full((128, 4), 127, dtype=torch.uint8)
    codes[:, :32] = zeros
    exponents[:, 0], exponents[:, 1] = 0, 246
    q, scales = recode(codes, exponents)
    assert torch.equal(q.double() * scales.double(), dequantized(codes, exponents))


def test_blocks_with_a_wider_span_are_counted_and_refused():
    codes, exponents = torch.full((300, 128), 0x11, dtype=torch.uint8), torch.full((300, 8), 120, dtype=torch.uint8)
    exponents[77, 2] = 120 - SPAN - 1
    exponents[128:256, 4] = 120 - SPAN
    exponents[299, 7] = 120 - SPAN - 3
    refusal = r"w: in 2 of 6 128x128 blocks the exponents differ by more than 14, by up to 17, .*Unset FP8MOE_FP4"
    with pytest.raises(UnsupportedError, match=refusal):
        recode(codes, exponents)


V4_FLASH = Experts(43, 256, 6, 4096, 2048)


def test_experts_that_a_gpu_cannot_hold_are_refused():
    """DeepSeek-V4-Flash has 277 GB of experts in block FP8."""
    half = replace(V4_FLASH, experts=128)
    check_memory(V4_FLASH, half, 150_000_000_000)
    refusal = r"277\.1 GB in all\. A GPU of 80\.0 GB would have to hold 138\.5 GB .*at least 4 GPUs .*explain --gpu"
    with pytest.raises(UnsupportedError, match=refusal):
        check_memory(V4_FLASH, half, 80_000_000_000)


@pytest.mark.parametrize(("exponent", "message"), [(255, "hold NaN"), (247, "range from .* damaged")])
def test_exponents_that_cannot_be_are_refused(exponent, message):
    """Also those of zeros."""
    codes, exponents = torch.zeros(128, 64, dtype=torch.uint8), torch.full((128, 4), 127, dtype=torch.uint8)
    exponents[5, 3] = exponent
    with pytest.raises(CheckpointError, match=f"the scales of w {message}"):
        recode(codes, exponents)


def test_halves_of_a_projection_meet_in_any_order():
    halves, tensor = Halves(), torch.zeros(1)
    assert halves.add("a", Role.SCALES, tensor, CPU) is None
    assert halves.add("b", Role.WEIGHT, torch.ones(1), CPU) is None
    tensor += 7  # the engine fills its buffer again
    assert halves.add("a", Role.WEIGHT, torch.full((1,), 2.0), CPU) == (2, 0)
    assert halves.add("b", Role.WEIGHT, torch.full((1,), 3.0), CPU) is None  # replaces the first one
    assert halves.add("b", Role.SCALES, tensor, CPU) == (3, 7)
    assert not halves.waiting


def test_the_host_works_on_one_thread():
    """With many short operations on several threads, a busy host loads 50 times slower."""
    threads, found = torch.get_num_threads(), []
    torch.set_num_threads(2)
    tensor, halves, meta = torch.full((256, 1024), 120, dtype=torch.uint8)[:, ::2], Halves(), torch.device("meta")

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            found.append(torch.get_num_threads())
            return op(*args, **(kwargs or {}))

    with Watched():
        check_exponents("w", tensor)
        halves.add("a", Role.SCALES, tensor, CPU)
        halves.add("a", Role.WEIGHT, tensor, meta)
        to_device(tensor, meta)
    restored = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert set(found) == {1}
    assert restored == 2


def test_exponents_stay_where_they_arrive():
    halves, meta = Halves(), torch.device("meta")
    codes, exponents = torch.ones(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    for first, second in ((Role.WEIGHT, Role.SCALES), (Role.SCALES, Role.WEIGHT)):
        tensors = {Role.WEIGHT: codes, Role.SCALES: exponents}
        assert halves.add("a", first, tensors[first], meta) is None
        found = halves.add("a", second, tensors[second], meta)
        assert [half.device.type for half in found] == ["meta", "cpu"]


def test_as_many_halves_wait_on_the_device_as_an_expert_has():
    """A checkpoint may have all codes before all exponents; then the device would hold the model twice."""
    halves = Halves()
    for name in "abcd":
        assert halves.add(name, Role.WEIGHT, torch.ones(1), torch.device("meta")) is None
    assert [half.device.type for _, half in halves.waiting.values()] == ["meta"] * 3 + ["cpu"]


@pytest.mark.parametrize(
    ("source", "to", "early"), [("cpu", "cuda", True), ("cpu", "cpu", False), ("meta", "cpu", False)]
)
def test_only_copies_of_host_memory_to_a_gpu_may_return_early(source, to, early):
    """A copy to the host that returned early would be read before it is there."""
    assert copies_early(torch.empty(1, device=source), torch.device(to)) == early


def test_a_copy_of_pinned_memory_does_not_return_early():
    """The GPU reads it later, when the engine may have overwritten it."""
    pinned = SimpleNamespace(is_cpu=True, is_pinned=lambda: True)
    assert not copies_early(pinned, torch.device("cuda"))
