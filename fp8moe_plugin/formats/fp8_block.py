"""Block FP8: e4m3 weights with one scale for each 128x128 block, as DeepSeek-V3 introduced it."""

from dataclasses import replace

from fp8moe_plugin.formats.weight_format import TensorFormat, WeightFormat

GROUP = 128  # channels that share one activation scale; also the side of a weight's scale block

FP8_BLOCK = WeightFormat(
    name="block-FP8",
    weight=TensorFormat("F8_E4M3", ("F8_E4M3",), block=(1, 1)),
    scales=TensorFormat("F32", ("F32", "BF16", "F16", "F8_E8M0", "U8"), block=(GROUP, GROUP)),  # U8: bits of F8_E8M0
    scale_names=("weight_scale_inv", "weight_scale"),  # the second is that of compressed-tensors
)

# Of DeepSeek-V4.1's layers other than experts. There are no kernels for it: engines compute these layers.
FP8_BLOCK_32 = replace(FP8_BLOCK, name="FP8 in 32x32 blocks", scales=replace(FP8_BLOCK.scales, block=(32, 32)))
