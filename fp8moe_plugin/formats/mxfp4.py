"""MXFP4 of the OCP Microscaling specification: e2m1 codes, and an exponent of 8 bits for each 32 input channels.

Kernels read it packed, see fp8moe_plugin/ops/mxfp4.py.
"""

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.weight_format import TensorFormat, WeightFormat

NAMES = ("fp4", "mxfp4")  # values of `expert_dtype`
MXFP4 = WeightFormat(
    name="MXFP4",
    weight=TensorFormat("U8", ("U8", "I8", "F4"), block=(1, 2)),  # the low four bits are the first channel
    scales=TensorFormat("F8_E8M0", ("F8_E8M0", "U8"), block=(1, 32)),
    scale_names=("scale", "weight_scale"),
)

CODE_BYTES = GROUP * GROUP // 2
CHUNK_BYTES = CODE_BYTES + GROUP * GROUP // 32  # of a block of 128x128: its codes, and a byte for each exponent

PACKED_MXFP4 = WeightFormat(
    name="packed MXFP4",
    weight=TensorFormat("U8", (), block=(GROUP, GROUP), elements=CHUNK_BYTES, further=1),
    scales=TensorFormat("F32", (), block=(GROUP, GROUP), further=2),
    scale_names=FP8_BLOCK.scale_names,
)
