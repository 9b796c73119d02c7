"""MXFP4 of the OCP Microscaling specification: e2m1 codes, and an exponent of 8 bits for each 32 input channels."""

from fp8moe_plugin.formats.weight_format import TensorFormat, WeightFormat

MXFP4 = WeightFormat(
    name="MXFP4",
    weight=TensorFormat("U8", ("U8", "I8", "F4"), block=(1, 2)),  # the low four bits are the first channel
    scales=TensorFormat("F8_E8M0", ("F8_E8M0", "U8"), block=(1, 32)),
    scale_names=("scale", "weight_scale"),
)
