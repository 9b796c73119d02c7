"""DeepGEMM's settings of a process. Only `set_num_sms`, which is an op's, and the alignment affect anything here."""

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.ops.option_checks import check_flag, check_int

_alignment, _tc_util, _pdl = GROUP, 0, False


def get_mk_alignment_for_contiguous_layout() -> int:
    """The multiple of rows at which a caller begins each group of `m_grouped_fp8_gemm_nt_contiguous`.

    128, unless set. Our kernels need none, except that the psum layout is read with it.
    """
    return _alignment


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Change what `get_mk_alignment_for_contiguous_layout` returns.

    Raises:
        InvalidInputError: it is no int of 1 or more.
    """
    global _alignment
    check_int("the alignment", new_value)
    if new_value < 1:
        raise InvalidInputError(f"the alignment is {new_value}, needs 1 or more. Pass rows, such as 128.")
    _alignment = new_value


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """128, whatever the rows per group: that of DeepGEMM's kernels for Hopper GPUs."""
    return GROUP


def set_tc_util(new_tc_util: int) -> None:
    """Has no effect, as in DeepGEMM on Hopper GPUs: `get_tc_util` returns it.

    Args:
        new_tc_util: percent of the tensor cores' rate, 0 to 100; 0 for 100.
    Raises:
        InvalidInputError: it is not in this range.
    """
    global _tc_util
    check_int("new_tc_util", new_tc_util)
    if not 0 <= new_tc_util <= 100:
        raise InvalidInputError(f"new_tc_util is {new_tc_util}, needs 0 to 100. Pass percents.")
    _tc_util = new_tc_util


def get_tc_util() -> int:
    """What `set_tc_util` was told; 100 before."""
    return _tc_util or 100


def set_pdl(new_enable_pdl: bool) -> None:
    """No effect: kernels start early (programmatic dependent launch) wherever that is safe. `get_pdl` returns it."""
    global _pdl
    check_flag("new_enable_pdl", new_enable_pdl)
    _pdl = bool(new_enable_pdl)


def get_pdl() -> bool:
    """What `set_pdl` was told; False before."""
    return _pdl


def set_ignore_compile_dims(new_value: bool) -> None:
    """Has no effect: no kernel is compiled for a shape."""


def set_block_size_multiple_of(new_value: int | tuple[int, int]) -> None:
    """Has no effect: which tiles a kernel takes is not for the caller to restrict."""
