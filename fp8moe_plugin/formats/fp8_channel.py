"""Per-channel FP8: e4m3 weights with one scale for each output row, as in FP8-dynamic of compressed-tensors."""

from fp8moe_plugin.formats.weight_format import WHOLE_ROW, TensorFormat, WeightFormat

FP8_CHANNEL = WeightFormat(
    name="per-channel FP8",
    weight=TensorFormat("F8_E4M3", ("F8_E4M3",), block=(1, 1)),
    scales=TensorFormat("F32", ("F32", "BF16", "F16"), block=(1, WHOLE_ROW)),  # [.., N, 1]
    scale_names=("weight_scale",),
)
