"""Checks of compiled kernels before the driver loads them, and the shared memory of Triton kernels.

The file of a Triton kernel is its cubin, then FOOTER and the bytes of dynamic shared memory.
"""

from fp8moe_plugin.plan.keys import SM90

ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian
HEADER_BYTES = 64
EM_CUDA = 190
CUDA_12_ABI = 0x33  # EI_OSABI of cubins made by CUDA 12; 0x41 since CUDA 13
FOOTER = b"fp8moe shared memory"
SIZE_BYTES = 4


def cubin_fault(cubin: bytes, target: str = SM90) -> str | None:
    """Returns why these bytes are not a cubin for a target, or None. The header does not record the `a` of sm_90a."""
    if len(cubin) < HEADER_BYTES or not cubin.startswith(ELF):
        return "not a 64-bit ELF file"
    if int.from_bytes(cubin[18:20], "little") != EM_CUDA:
        return "not machine code for CUDA"
    arch = cubin[48 if cubin[7] == CUDA_12_ABI else 49]  # a byte of e_flags
    wanted = target.removesuffix("a")
    return None if f"sm_{arch}" == wanted else f"machine code for sm_{arch}, not for {wanted}"


def with_shared_memory(cubin: bytes, nbytes: int) -> bytes:
    """Returns the content of a Triton kernel's file."""
    return cubin + FOOTER + nbytes.to_bytes(SIZE_BYTES, "little")


def split_shared_memory(file: bytes) -> tuple[bytes, int]:
    """Returns the cubin of a Triton kernel, and its bytes of shared memory. Raises ValueError for other files."""
    end = len(file) - SIZE_BYTES
    if file[end - len(FOOTER) : end] != FOOTER:
        raise ValueError("a Triton kernel without its shared memory")
    return file[: end - len(FOOTER)], int.from_bytes(file[end:], "little")
