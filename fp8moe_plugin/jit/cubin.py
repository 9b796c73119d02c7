"""A check of compiled kernels before they are given to the driver: they must be ELF files with code for Hopper GPUs."""

ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian
HEADER_BYTES = 64
EM_CUDA = 190
SM = 90
CUDA_12_ABI = 0x33  # EI_OSABI of cubins made by CUDA 12; 0x41 since CUDA 13


def cubin_fault(cubin: bytes) -> str | None:
    """Why these bytes are not a cubin for `sm_90`, or None. The header does not record the `a` of sm_90a."""
    if len(cubin) < HEADER_BYTES or not cubin.startswith(ELF):
        return "not a 64-bit ELF file"
    if int.from_bytes(cubin[18:20], "little") != EM_CUDA:
        return "not machine code for CUDA"
    arch = cubin[48 if cubin[7] == CUDA_12_ABI else 49]  # a byte of e_flags
    return None if arch == SM else f"machine code for sm_{arch}, not for sm_{SM}"
