"""FP8MOE_JIT_DEBUG=1: writes the input and output of a kernel's compilation to files beside its cubin in the cache.

<source>-<digest>.cu      the compiled text: the macros, then the source with its includes; .py for Triton kernels
<source>-<digest>.elf     the cubin for `cuobjdump` and `nvdisasm`; the cache's file begins with a checksum
<source>-<digest>.sass    its machine code, if there is an nvdisasm
<source>-<digest>.txt     the command line and ptxas' report
"""

import functools
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fp8moe_plugin.jit import cache
from fp8moe_plugin.jit.compiler import Compiled, command_line, translation_unit
from fp8moe_plugin.jit.cubin import split_shared_memory
from fp8moe_plugin.jit.triton_compiler import sources
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.triton.catalog import TritonKey
from fp8moe_plugin.quoting import shown_text

NO_DISASSEMBLER = (
    "FP8MOE_JIT_DEBUG=1 keeps no SASS: there is no nvdisasm on PATH, in CUDA_HOME or in the package triton. "
    "Install the package nvidia-cuda-nvdisasm or a CUDA toolkit"
)


def dump(key: KernelKey, name: str, compiled: Compiled) -> None:
    """Print how a kernel was compiled, and write the files.

    Args:
        name: the name of its entry in the cache.
    Raises:
        CacheError: the folder cannot be written to.
    """
    stem = name.removesuffix(".cubin")
    triton = isinstance(key, TritonKey)
    command = f"triton.compile of {key}, {key.threads} threads" if triton else command_line(key)
    report = f"{command}\n{compiled.report.strip()}\n"
    print(f"fp8moe: {key}: {shown_text(cache.cache_dir() / stem)}.*\n{report}", end="", file=sys.stderr, flush=True)
    cubin = split_shared_memory(compiled.cubin)[0] if triton else compiled.cubin
    source = ("py", "\n".join(sources(key))) if isinstance(key, TritonKey) else ("cu", translation_unit(key))
    files = {source[0]: source[1].encode(), "elf": cubin, "txt": report.encode()}
    for suffix, content in files.items():
        cache.write(f"{stem}.{suffix}", content)
    if disassembler := find_disassembler():
        cache.write(f"{stem}.sass", disassembled(disassembler, cubin))
    else:
        log_once(logging.WARNING, NO_DISASSEMBLER)


def disassembled(disassembler: Path, cubin: bytes) -> bytes:
    """Returns the machine code as text, or nvdisasm's error message if it does not support the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([disassembler, "-c", file.name], capture_output=True, check=False)
    return done.stdout or done.stderr


@functools.cache
def find_disassembler() -> Path | None:
    """Returns nvdisasm of the CUDA toolkit, or the one in the package triton."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if installed := shutil.which("nvdisasm") or shutil.which("nvdisasm", path=f"{toolkit}/bin"):
        return Path(installed)
    triton = importlib.util.find_spec("triton")
    folders = (triton.submodule_search_locations if triton else None) or ()
    places = (Path(folder, "backends/nvidia/bin/nvdisasm") for folder in folders)
    return next((place for place in places if place.is_file()), None)
