"""Packed MXFP4: every weight is exactly the same number, whatever its exponent and in whichever order parts arrive."""

import pytest
import torch

from fp8moe_plugin.formats.mxfp4 import CHUNK_BYTES, PACKED_MXFP4
from fp8moe_plugin.layers.recode import block_fp8
from fp8moe_plugin.ops import torch_ops
from fp8moe_plugin.ops.fp4_blocks import LARGEST_EXPONENT, SPAN, BelowLargest, Fp4Blocks
from fp8moe_plugin.ops.mxfp4 import (
    codes_of,
    dequantize,
    further_steps,
    steps_of,
    swizzled,
    widened,
    words,
    write_down,
    write_half,
)
from fp8moe_plugin.plan.options import layer_options
from tests.helpers import random_routing, random_tokens, same_bits, seeded
from tests.layers.test_recode import MINUS_ZERO, ZERO, dequantized
from tests.mxfp4 import random_experts

CPU = torch.device("cpu")


def weight(gen: torch.Generator, n: int, k: int, span: int, largest: int = 160) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes, and exponents that differ by at most `span`."""
    codes = torch.randint(256, (n, k // 2), generator=gen, dtype=torch.uint8)
    return codes, torch.randint(largest - span, largest + 1, (n, k // 32), generator=gen, dtype=torch.uint8)


def empty(n: int, k: int, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors of an expert that hold neither zeros nor numbers."""
    weights, scales = (t.shape(n, k, extra) for t in (PACKED_MXFP4.weight, PACKED_MXFP4.scales))
    return torch.full(weights, 0xA5, dtype=torch.uint8), torch.full(scales, float("nan"))


def down_and_up_again(codes: torch.Tensor, exponents: torch.Tensor, room: int = 0) -> tuple[torch.Tensor, int]:
    steps = steps_of(Fp4Blocks.of(codes, exponents))
    expert = empty(len(codes), 2 * codes.shape[1], steps.extra + room)
    assert further_steps(*expert) == steps.extra + room
    write_down(*expert, steps)
    return dequantize(*expert, gate_up=False).double(), steps.extra


@pytest.mark.parametrize("largest", [14, 20, 127, 246])
def test_each_code_with_each_exponent_is_exact(largest):
    codes = torch.arange(256, dtype=torch.uint8).repeat(64).view(256, 64)
    exponents = (largest - torch.arange(1024) % (SPAN + 1)).to(torch.uint8).view(256, 4)
    actual, extra = down_and_up_again(codes, exponents)
    assert torch.equal(actual, dequantized(codes, exponents))
    assert torch.equal(actual.signbit(), dequantized(codes, exponents).signbit())
    assert extra == 0


@pytest.mark.parametrize(("n", "k", "span"), [(128, 128, 0), (256, 512, 6), (384, 256, SPAN)])
def test_steps_of_a_row_block_have_one_base(n, k, span):
    codes, exponents = weight(seeded(n, CPU), n, k, span)
    exponents[128:] -= 3 * SPAN  # the next rows
    steps = steps_of(Fp4Blocks.of(codes, exponents))
    assert steps.extra == 0
    largest = exponents.view(n // 128, -1).amax(1, keepdim=True).expand(-1, k // 128)
    assert torch.equal(steps.base, torch.exp2(largest.float() - 127 - LARGEST_EXPONENT))
    assert torch.equal(down_and_up_again(codes, exponents)[0], dequantized(codes, exponents))


@pytest.mark.parametrize("apart", [SPAN + 1, 80])
def test_blocks_that_are_far_apart_have_bases_of_their_own(apart):
    """And room for a further step, by which kernels see it."""
    codes, exponents = weight(seeded(0, CPU), 256, 384, 3)
    exponents[128:, 128 // 32 : 256 // 32] -= apart
    steps = steps_of(Fp4Blocks.of(codes, exponents))
    assert steps.extra == 1
    assert torch.equal(steps.base[:, :3], block_fp8("w", codes, exponents.view(torch.float8_e8m0fnu))[1])
    assert torch.equal(down_and_up_again(codes, exponents)[0], dequantized(codes, exponents))


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("span", [SPAN + 1, 40, 150])
def test_wider_blocks_take_further_steps(span, room):
    codes, exponents = weight(seeded(span, CPU), 256, 384, span)
    exponents[128:, 128 // 32 : 256 // 32] = 100  # one block needs no more
    actual, extra = down_and_up_again(codes, exponents, room)
    assert extra >= 2 * (span // (SPAN + 1))
    assert torch.equal(actual, dequantized(codes, exponents))


def test_one_wide_block_takes_one_step():
    codes, exponents = weight(seeded(0, CPU), 256, 512, 3)
    exponents[77, 9] = 120
    codes[77, 9 * 16] = 0x11
    steps = steps_of(Fp4Blocks.of(codes, exponents))
    assert steps.extra == 1
    assert steps.k_block.tolist() == [[9 // 4], [0]]
    assert torch.equal(down_and_up_again(codes, exponents)[0], dequantized(codes, exponents))


@pytest.mark.parametrize("zeros", [ZERO, MINUS_ZERO])
def test_exponents_of_zeros_do_not_count(zeros):
    codes, exponents = torch.full((128, 64), 0x19, dtype=torch.uint8), torch.full((128, 4), 127, dtype=torch.uint8)
    codes[:, :32] = zeros
    exponents[:, 0], exponents[:, 1] = 0, 254
    actual, extra = down_and_up_again(codes, exponents)
    assert extra == 0
    wanted = dequantized(codes, exponents)
    assert torch.equal(actual, wanted)
    assert torch.equal(actual.signbit(), wanted.signbit())


def test_groups_of_zeros_count_while_no_exponent_is_far_off():
    """Those of the edges have none, and stay valid."""
    codes, exponents = weight(seeded(0, CPU), 192, 320, SPAN - 1)
    codes[:, 16:32], exponents[:, 1] = ZERO, 161
    blocks = Fp4Blocks.of(codes, exponents)
    found = BelowLargest.of(blocks, SPAN)
    assert (found.largest[0] == torch.tensor([161, *blocks.exponent[0, :, 1:].amax((0, 2))])).all()
    assert int(found.below.max()) == SPAN
    steps, expert = steps_of(blocks, 161), empty(256, 384)
    write_down(*expert, steps)
    assert torch.equal(dequantize(*expert, gate_up=False).double()[:192, :320], dequantized(codes, exponents))


@pytest.mark.parametrize("span", [9, 33])
@pytest.mark.parametrize("first", [0, 1])
def test_gate_and_up_arrive_in_any_order(first, span):
    halves = [weight(seeded(half, CPU), 256, 256, span, 140 + 7 * half) for half in (0, 1)]
    packed = [steps_of(Fp4Blocks.of(*half)) for half in halves]
    expert = empty(512, 256, 2 * max(steps.extra for steps in packed))
    for half in (first, 1 - first):
        write_half(*expert, half, packed[half])
    wanted = torch.cat([dequantized(*half) for half in halves])
    assert torch.equal(dequantize(*expert, gate_up=True).double(), wanted)


@pytest.mark.parametrize("gate_up", [False, True])
def test_room_for_more_steps_changes_no_weight(gate_up):
    projection = weight(seeded(0, CPU), 256, 384, 30)
    steps = steps_of(Fp4Blocks.of(*projection))
    parts = 2 if gate_up else 1
    expert = empty(256 * parts, 384, parts * steps.extra)
    for half in range(parts):
        write_half(*expert, half, steps) if gate_up else write_down(*expert, steps)
    before, more = dequantize(*expert, gate_up), parts * (steps.extra + 3)
    (weights,), (scales,) = widened(expert[0][None], expert[1][None], gate_up, more)
    assert further_steps(weights, scales) == more
    assert torch.equal(dequantize(weights, scales, gate_up), before)
    write_half(weights, scales, 1, steps) if gate_up else write_down(weights, scales, steps)
    assert torch.equal(dequantize(weights, scales, gate_up), before)


def test_a_thread_finds_gate_and_up_of_a_channel_side_by_side():
    """Words 2s and 2s + 1 of a thread's 16 bytes are of rows g and g + 8: the gate and the up projection."""
    gate, up = (torch.full((128, 64), code, dtype=torch.uint8) for code in (0x11, 0x22))
    ones = torch.full((128, 4), 127, dtype=torch.uint8)
    expert = empty(256, 128)
    write_half(*expert, 0, steps_of(Fp4Blocks.of(gate, ones)))
    write_half(*expert, 1, steps_of(Fp4Blocks.of(up, ones)))
    first_words = expert[0].view(2, CHUNK_BYTES)[:, :8192].reshape(-1, 2, 4)
    assert (first_words[:, 0] == 0x11).all()
    assert (first_words[:, 1] == 0x22).all()


def bytes_of_words(codes: torch.Tensor) -> torch.Tensor:
    first, second = words(codes)
    return (first | second).view(torch.uint8).unflatten(-1, (4, 4))


def test_words_keep_every_code():
    codes = torch.randint(256, (128, 64), dtype=torch.uint8)
    assert torch.equal(codes_of(bytes_of_words(codes)), codes)
    one = torch.zeros(1, 64, dtype=torch.uint8)
    one[0, 0], one[0, 9] = 0xA3, 0x0C  # channels 0, 1 and 18
    assert bytes_of_words(one)[0, 0, 0].tolist() == [0x23, 0x80, 0x08, 0x04]  # signs are apart


def test_codes_swizzled_twice_are_as_before():
    codes = torch.randint(256, (3, 16, 64), generator=seeded(0, CPU), dtype=torch.uint8)
    assert not torch.equal(swizzled(codes), codes)
    assert torch.equal(swizzled(swizzled(codes)), codes)


def test_swizzled_codes_of_a_thread_are_in_different_banks():
    """Thread t of lane g of eight is number t xor g / 2. Of each, 16 bytes follow one another; a row is two banks."""
    threads = (torch.arange(64) // 2 % 4).expand(8, 64).to(torch.uint8)
    lanes = swizzled(threads).view(8, 8, 4, 2)[:, 0, :, 0].long()
    assert lanes.tolist() == [[t ^ g // 2 for t in range(4)] for g in range(8)]
    at = lanes.argsort(-1) * 16 + 64 * torch.arange(8)[:, None]  # of each lane and thread
    assert all(len(set((of_thread // 4 % 32).tolist())) == 8 for of_thread in at.T)


def test_a_layer_compiles_without_a_graph_break():
    gen = seeded(0, CPU)
    layer, options = random_experts(gen, 3, 256, 128, SPAN).packed(), layer_options(PACKED_MXFP4).text

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch_ops.fused_moe(options, x * 2, None, *layer, None, None, weights, ids, None, out)
        return out + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 70):
        call = random_tokens(gen, tokens, 256), *random_routing(gen, "distinct", tokens, 2, 3)
        assert same_bits(compiled(*call), run(*call))
