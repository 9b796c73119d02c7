"""DeepGEMM's process-wide settings. Only the alignment and `set_num_sms` (in `ops.devices`) have an effect."""

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.ops.option_checks import check_flag, check_int

_alignment, _tc_util, _pdl = GROUP, 0, False


def get_mk_alignment_for_contiguous_layout() -> int:
    """Returns the multiple of rows at which a caller begins each group of `m_grouped_fp8_gemm_nt_contiguous`.

    The default is 128. Our kernels need no alignment; only the psum layout depends on it.
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
    """Returns 128, the alignment of DeepGEMM's kernels for Hopper GPUs, for any number of rows per group."""
    return GROUP


def set_tc_util(new_tc_util: int) -> None:
    """Set the value that `get_tc_util` returns. It has no other effect, as in DeepGEMM on Hopper GPUs.

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
    """Returns the value of `set_tc_util`; the default is 100."""
    return _tc_util or 100


def set_pdl(new_enable_pdl: bool) -> None:
    """Set the value that `get_pdl` returns. It has no other effect: kernels use PDL wherever that is safe."""
    global _pdl
    check_flag("new_enable_pdl", new_enable_pdl)
    _pdl = bool(new_enable_pdl)


def get_pdl() -> bool:
    """Returns the value of `set_pdl`; the default is False."""
    return _pdl


def set_ignore_compile_dims(new_value: bool) -> None:
    """Has no effect: no kernel is compiled for a shape."""


def set_block_size_multiple_of(new_value: int | tuple[int, int]) -> None:
    """Has no effect: callers cannot restrict the tiles of a kernel."""
