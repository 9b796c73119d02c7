"""What a compiled kernel must look like before it goes to the driver: an ELF file of code for Hopper GPUs."""

ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian
HEADER_BYTES = 64
EM_CUDA = 190
SM = 90


def cubin_fault(cubin: bytes) -> str | None:
    """Why these bytes are no cubin for `sm_90`, or None. The `a` of sm_90a leaves no mark in the header."""
    if len(cubin) < HEADER_BYTES or not cubin.startswith(ELF):
        return "no 64-bit ELF file"
    if int.from_bytes(cubin[18:20], "little") != EM_CUDA:
        return "no machine code for CUDA"
    arch = cubin[49]  # the second byte of e_flags
    return None if arch == SM else f"machine code for sm_{arch}, not for sm_{SM}"
