"""DeepGEMM's layouts of scales. Our GEMMs do not need them, because they accept scales of any strides."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.ops.checks import check_tensor
from fp8moe_plugin.ops.option_checks import check_flag, check_int, check_ints, check_one_of

TMA_BYTES = 16
EXPONENTS_PER_WORD = 4
MANTISSA_BITS = 23

Recipe = tuple[int, int, int] | tuple[int, int]


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """Returns `x` elements of `element_size` bytes, rounded up to a multiple of 16 bytes."""
    check_int("x", x, 0)
    check_one_of("element_size", element_size, (1, 2, 4, 8, 16))
    elements = TMA_BYTES // element_size
    return ceil_div(x, elements) * elements


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """Returns scales in the layout for TMA: the same values, MN contiguous, K blocks a multiple of 16 bytes apart.

    Args:
        sf: float32 `[MN, K/128]` or `[G, MN, K/128]` of any strides; returned unchanged if it has the layout.
    Raises:
        InvalidInputError: wrong dtype or shape.
    """
    _check_scales(sf, (torch.float32,))
    *_, mn, k_blocks = sf.shape
    pitch = get_tma_aligned_size(mn, sf.element_size())
    strides = (pitch * k_blocks, 1, pitch)[3 - sf.dim() :]
    if sf.stride() == strides:
        return sf
    return torch.empty_strided(sf.shape, strides, dtype=sf.dtype, device=sf.device).copy_(sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor, psum_layout: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the exponents of scales that are powers of two, four K blocks in an int32, the first one in the low byte.

    Args:
        sf: float32 `[MN, K/128]` or `[G, MN, K/128]` of any strides.
        psum_layout: ignored; rows between groups are converted, too.
    Returns:
        int32 `[.., MN, ceil(K/512)]`, MN contiguous, words a multiple of 16 bytes apart.
    Raises:
        InvalidInputError: wrong dtype or shape.
    """
    _check_scales(sf, (torch.float32,))
    packed = _packed_exponents(sf)
    *groups, mn, words = packed.shape
    pitch = get_tma_aligned_size(mn, packed.element_size())
    out = packed.new_empty((*groups, words, pitch)).mT[..., :mn, :]
    return out.copy_(packed)


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor,
    grouped_layout: torch.Tensor,
    ks_cpu: list[int],
    gran_k: int,
    k_alignment: int,
    use_psum_layout: bool = False,
) -> torch.Tensor:
    """Returns `get_mn_major_tma_aligned_packed_ue8m0_tensor` of consecutive groups that differ in K, transposed.

    Args:
        sf: float32 `[sum(K) / gran_k, MN]`.
        grouped_layout: ignored; `ks_cpu` holds the same numbers.
        ks_cpu: K of each group, a multiple of `gran_k`.
        gran_k: channels that share a scale.
        k_alignment: ignored.
        use_psum_layout: False: the other layout has no kernel for Hopper GPUs in DeepGEMM either.
    Returns:
        int32 `[sum(ceil(K / (4 * gran_k))), MN]`.
    Raises:
        InvalidInputError: wrong dtype, shape or option.
    """
    check_flag("use_psum_layout", use_psum_layout)
    if use_psum_layout:
        raise InvalidInputError("use_psum_layout is set, which only Blackwell GPUs have here. Pass K of each group.")
    check_tensor("sf", sf, dtype=torch.float32, shape=(None, None), contiguous=False)
    if not isinstance(ks_cpu, list | tuple):
        raise InvalidInputError(f"ks_cpu is a {type(ks_cpu).__name__}, not a list. Pass K of each group as ints.")
    check_int("gran_k", gran_k, 1)
    for group, k in enumerate(ks_cpu):
        check_int(f"ks_cpu[{group}]", k, 0)
    if bad := [k for k in ks_cpu if k % gran_k]:
        raise InvalidInputError(f"ks_cpu holds {bad[0]}, needs multiples of {gran_k}. Pad K of each group.")
    blocks = [k // gran_k for k in ks_cpu]
    if sum(blocks) != sf.shape[0]:
        raise InvalidInputError(
            f"sf has {sf.shape[0]} rows, ks_cpu {sum(blocks)} blocks of K. Pass those of all groups."
        )
    parts = [_packed_exponents(part.T).T for part in sf.split(blocks) if len(part)]
    return torch.cat(parts) if parts else sf.new_empty((0, sf.shape[1]), dtype=torch.int32)


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: Recipe,
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns scales in the layout of DeepGEMM's kernels for Hopper GPUs.

    Args:
        sf: float32 `[ceil(mn / rows), ceil(k / 128)]`, with a leading dimension `num_groups` if that is given.
        mn, k: sizes of the operand.
        recipe: rows and channels that share a scale, (1, 128) or (128, 128); or rows of A, rows of B and channels.
        is_sfa: with a recipe of three numbers, whether these are the scales of A; else None.
        disable_ue8m0_cast, psum_layout: ignored, as by DeepGEMM on Hopper GPUs.
    Returns:
        For 1 row `get_mn_major_tma_aligned_tensor`; for 128 rows `sf` itself, which must be dense in either order.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or recipe.
    """
    rows, channels = _granularity(recipe, is_sfa)
    check_int("mn", mn, 0)
    check_int("k", k, 0)
    if num_groups is not None:
        check_int("num_groups", num_groups, 0)
    groups = () if num_groups is None else (num_groups,)
    check_tensor(
        "sf", sf, dtype=torch.float32, shape=(*groups, ceil_div(mn, rows), ceil_div(k, channels)), contiguous=False
    )
    if rows == 1:
        return get_mn_major_tma_aligned_tensor(sf)
    if not (sf.is_contiguous() or sf.mT.is_contiguous()):
        raise InvalidInputError(f"sf has strides {sf.stride()}, needs dense ones in either order. Call .contiguous().")
    return sf


def _granularity(recipe: Recipe, is_sfa: bool | None) -> tuple[int, int]:
    recipe = check_ints("recipe", recipe, (2, 3), "Pass (1, 128, 128).")
    if is_sfa is not None:
        check_flag("is_sfa", is_sfa)
    if (len(recipe) == 3) != (is_sfa is not None):
        raise InvalidInputError(
            f"recipe is {recipe}, is_sfa {is_sfa}: three numbers need True or False, two need None. Pass them so."
        )
    found = tuple(recipe) if len(recipe) == 2 else (recipe[0 if is_sfa else 1], recipe[2])
    if found not in ((1, GROUP), (GROUP, GROUP)):
        raise InvalidInputError(
            f"recipe is {recipe}, which gives {found}, needs (1, 128) or (128, 128): Hopper GPUs have no other."
        )
    return found[0], found[1]


def _check_scales(sf: torch.Tensor, dtype: tuple[torch.dtype, ...]) -> None:
    check_tensor("sf", sf, dtype=dtype, contiguous=False)
    if sf.dim() not in (2, 3):
        raise InvalidInputError(f"sf has shape {list(sf.shape)}, needs [MN, K/128] or [G, MN, K/128]. Check its shape.")


def _packed_exponents(sf: torch.Tensor) -> torch.Tensor:
    """Returns the exponents of scales as contiguous int32 `[.., rows, ceil(K blocks / 4)]`."""
    *rows, k_blocks = sf.shape
    exponents = torch.zeros(
        (*rows, ceil_div(k_blocks, EXPONENTS_PER_WORD) * EXPONENTS_PER_WORD), dtype=torch.uint8, device=sf.device
    )
    exponents[..., :k_blocks] = sf.view(torch.int32) >> MANTISSA_BITS
    return exponents.view(torch.int32)
