"""The dtypes of safetensors files, by their names in safetensors."""

from typing import NamedTuple


class DType(NamedTuple):
    bits: int
    torch: str = ""  # its name in torch, which lacks those of 6 bits


DTYPES = {
    "F4": DType(4, "float4_e2m1fn_x2"),  # two values in each element of torch, but one in safetensors
    "F6_E2M3": DType(6),
    "F6_E3M2": DType(6),
    "BOOL": DType(8, "bool"),
    "U8": DType(8, "uint8"),
    "I8": DType(8, "int8"),
    "F8_E4M3": DType(8, "float8_e4m3fn"),
    "F8_E5M2": DType(8, "float8_e5m2"),
    "F8_E8M0": DType(8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": DType(8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": DType(8, "float8_e5m2fnuz"),
    "U16": DType(16, "uint16"),
    "I16": DType(16, "int16"),
    "F16": DType(16, "float16"),
    "BF16": DType(16, "bfloat16"),
    "U32": DType(32, "uint32"),
    "I32": DType(32, "int32"),
    "F32": DType(32, "float32"),
    "U64": DType(64, "uint64"),
    "I64": DType(64, "int64"),
    "F64": DType(64, "float64"),
    "C64": DType(64, "complex64"),
}
