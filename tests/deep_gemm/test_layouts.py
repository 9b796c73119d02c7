"""DeepGEMM's layouts of scales."""

import pytest
import torch

from fp8moe_plugin import deep_gemm
from tests import helpers as h

CPU = torch.device("cpu")
SHAPES = [(5, 3), (8, 1), (4097, 2), (2, 6, 5), (1, 4, 1)]


def scales(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=h.seeded(0, CPU)) + 0.1


def pitch(mn: int) -> int:
    return (mn + 3) // 4 * 4


def mn_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    *groups, mn, k_blocks = shape
    return (*(pitch(mn) * k_blocks for _ in groups), 1, pitch(mn))


@pytest.mark.parametrize(
    ("size", "element", "aligned"), [(1, 4, 4), (4, 4, 4), (4097, 4, 4100), (0, 4, 0), (17, 1, 32), (9, 2, 16)]
)
def test_sizes_are_rounded_up_to_16_bytes(size: int, element: int, aligned: int) -> None:
    assert deep_gemm.get_tma_aligned_size(size, element) == aligned


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("change", [lambda t: t, h.column_major, lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]]])
def test_the_layout_for_tma_has_the_same_values(shape, change):
    sf = change(scales(shape))
    out = deep_gemm.get_mn_major_tma_aligned_tensor(sf)
    assert torch.equal(out, sf)
    assert out.stride() == mn_major_strides(shape)
    assert deep_gemm.get_mn_major_tma_aligned_tensor(out) is out


@pytest.mark.parametrize("shape", SHAPES)
def test_exponents_are_packed_four_to_a_word(shape):
    exponents = torch.randint(1, 255, shape, generator=h.seeded(0, CPU))
    sf = torch.exp2((exponents - 127).float())
    out = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(h.column_major(sf))
    words = -(-shape[-1] // 4)
    assert out.dtype == torch.int32
    assert out.shape == (*shape[:-1], words)
    assert out.stride() == mn_major_strides(out.shape)
    for i in range(words * 4):
        expected = exponents[..., i] if i < shape[-1] else torch.zeros(())
        assert ((out[..., i // 4] >> i % 4 * 8 & 0xFF) == expected).all()


def test_groups_of_k_begin_a_word_each():
    ks, mn = [256, 0, 640, 512], 6
    exponents = torch.randint(1, 255, (sum(ks) // 128, mn), generator=h.seeded(0, CPU))
    sf, layout = torch.exp2((exponents - 127).float()), torch.tensor(ks, dtype=torch.int32)
    out = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, layout, ks, 128, 128)
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor
    parts = [packed(part.T).T for part in sf.split([2, 5, 4])]
    assert out.shape == (1 + 2 + 1, mn)
    assert torch.equal(out, torch.cat(parts))


def test_scales_of_rows_are_transformed_and_those_of_blocks_checked():
    rows, blocks = scales((300, 3)), scales((3, 3))
    of_rows = deep_gemm.transform_sf_into_required_layout(rows, 300, 384, (1, 128, 128), is_sfa=True)
    assert torch.equal(of_rows, rows)
    assert of_rows.stride() == (1, 300)
    transform = deep_gemm.transform_sf_into_required_layout
    assert transform(blocks, 300, 384, (1, 128, 128), is_sfa=False) is blocks
    assert transform(blocks.T, 300, 384, (128, 128)).data_ptr() == blocks.data_ptr()
    per_row = transform(rows, 300, 370, (1, 1, 128), is_sfa=False)
    assert per_row.stride() == (1, 300)
    grouped = transform(scales((4, 7, 2)), 7, 256, (1, 128), num_groups=4)
    assert grouped.stride() == (16, 1, 8)
