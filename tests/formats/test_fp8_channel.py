import pytest

from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL


def test_each_row_has_one_scale():
    assert FP8_CHANNEL.scales.shape(96, 4096) == FP8_CHANNEL.scales.file_shape("BF16", 96, 4096) == [96, 1]
    assert FP8_CHANNEL.nbytes(96, 4096) == 96 * 4096 + 96 * 4


def test_scales_of_rows_do_not_imply_channels():
    with pytest.raises(ValueError, match=r"no number of channels follows from \[8, 96, 1\]"):
        FP8_CHANNEL.scales.channels([8, 96, 1])
