"""Compilation of kernels to cubins in memory: CUDA C++ with NVRTC, which needs only its wheel, and Triton kernels.

Neither needs a GPU, a CUDA toolkit or a C++ compiler.
"""

import ctypes
import functools
import hashlib
import io
import re
from importlib import metadata, resources
from typing import NamedTuple

from fp8moe_plugin.errors import CompileError
from fp8moe_plugin.jit.triton_compiler import compile_triton, sources, triton_version
from fp8moe_plugin.plan.keys import SM90, KernelKey
from fp8moe_plugin.plan.sm90.constants import MACROS
from fp8moe_plugin.plan.triton.catalog import TritonKey
from fp8moe_plugin.quoting import shown_text

OPTIONS = {"arch": SM90, "std": "c++17"}  # all options that affect the machine code
PTXAS_OPTIONS = ["-v"]
OLDEST_NVRTC = (12, 8)
NVRTC_12 = "nvidia-cuda-nvrtc-cu12"
_INCLUDE = re.compile(r'^#include "(.+)"(\s*//.*)?$')


class Compiled(NamedTuple):
    cubin: bytes
    faults: list[str]  # lines of ptxas' report that show a problem, see `_faults`
    report: str = ""  # ptxas' report


def compile_kernel(key: KernelKey) -> Compiled:
    """Compile a kernel.

    Raises:
        CompileError: the compiler cannot be loaded, or refuses the source.
    """
    if isinstance(key, TritonKey):
        cubin, report = compile_triton(key)
        return Compiled(cubin, _faults(report), report)
    from cuda.core import Program, ProgramOptions

    compiler = nvrtc_version()
    # A result from NVRTC's own cache, which 12.8 does not have, would come without ptxas' report.
    uncached = {"no_cache": True} if nvrtc_release() >= (12, 9) else {}
    options = ProgramOptions(name=f"{key.source}.cu", ptxas_options=PTXAS_OPTIONS, **uncached, **OPTIONS)
    log = io.StringIO()
    try:
        program = Program(translation_unit(key), "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda-core raises its own types, which carry NVRTC's log
        raise CompileError(
            f"{key.source} does not compile with {compiler}: {error}\n{log.getvalue()}\n"
            f"Upgrade the package {nvrtc_package()}; if that does not help, report this with the text above."
        ) from error
    return Compiled(cubin, _faults(log.getvalue()), log.getvalue())


def command_line(key: KernelKey) -> str:
    """Returns the nvcc command with the same options; the macros are in the source."""
    options = (f"-{name}={value}" for name, value in OPTIONS.items())  # nvcc does not know --arch
    return " ".join(("nvcc", *options, f"--ptxas-options={PTXAS_OPTIONS[0]}", "--cubin", f"{key.source}.cu"))


def entry_name(key: KernelKey, compiler: str) -> str:
    """Returns the file name of a cubin, with a hash of the compiler's version and of everything that it reads.

    The name does not depend on paths, times or the machine.

    Args:
        compiler: the result of `compiler_version`, here or on another machine.
    """
    text = sources(key) if isinstance(key, TritonKey) else (translation_unit(key), *OPTIONS.values())
    parts = (*text, compiler)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"{key.source}-{digest}.cubin"


def compiler_version(target: str) -> str:
    """Returns the version of a target's compiler. Raises `CompileError` if there is none."""
    return nvrtc_version() if target == SM90 else triton_version()


def nvrtc_package() -> str:
    """Returns the package of the NVRTC that cuda-bindings loads, which has the same major version."""
    return NVRTC_12 if metadata.version("cuda-bindings").startswith("12.") else "nvidia-cuda-nvrtc"


def nvrtc_release() -> tuple[int, int]:
    """Returns the CUDA release, major and minor, of NVRTC.

    Raises:
        CompileError: NVRTC cannot be loaded, does not report its version, or is older than `OLDEST_NVRTC`.
    """
    from cuda.bindings import nvrtc

    try:
        _load_nvrtc_of_cuda_12()
        status, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:  # cuda-bindings loads libnvrtc with the first call
        reason = shown_text(str(error).partition("\n")[0])  # further lines list the content of its folders
        raise CompileError(
            f"NVRTC cannot be loaded ({reason}). Install the package {nvrtc_package()} for this Python. "
            "Only serving with the kernels of a wheel or a bundle, FP8MOE_BUNDLE, works without it."
        ) from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(
            f"NVRTC does not report its version ({status.name}). Reinstall the package {nvrtc_package()}."
        )
    if (major, minor) < OLDEST_NVRTC:
        oldest = ".".join(map(str, OLDEST_NVRTC))
        raise CompileError(
            f"NVRTC {major}.{minor} is too old: the kernels need {oldest}. Upgrade the package {nvrtc_package()}."
        )
    return major, minor


def _load_nvrtc_of_cuda_12() -> None:
    """Load NVRTC from the package of CUDA 12 if cuda-bindings are of CUDA 12.

    They take any NVRTC that they find, and the extra `cu12` installs the one of CUDA 12 next to that of CUDA 13.
    """
    package = nvrtc_package()
    if package != NVRTC_12:
        return
    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        return
    for library in ("libnvrtc-builtins.so.", "libnvrtc.so."):  # NVRTC opens the first one by its name alone
        for file in files:
            if file.name.startswith(library):
                ctypes.CDLL(str(file.locate()))


@functools.cache
def nvrtc_version() -> str:
    """Returns the compiler's version.

    NVRTC reports only two numbers. If it comes from its own package, the version includes the patch level.

    Raises:
        CompileError: see `nvrtc_release`.
    """
    release = ".".join(map(str, nvrtc_release()))
    try:
        package = metadata.version(nvrtc_package())
    except metadata.PackageNotFoundError:
        package = ""
    return f"nvrtc {package if package.startswith(f'{release}.') else release}"


def macros(key: KernelKey) -> tuple[tuple[str, int], ...]:
    """Returns the macros of a kernel: its own, the parameters of its launch, and the shared constants."""
    return *key.defines, ("THREADS", key.threads), ("SMEM_BYTES", key.smem_bytes), *MACROS.items()


def translation_unit(key: KernelKey) -> str:
    """Returns the text that is compiled: the macros, then the source with its includes expanded."""
    lines = "".join(f"#define {name} {value}\n" for name, value in macros(key))
    return lines + _expand(f"{key.source}.cu", set(), set())


def _expand(name: str, seen: set[str], guarded: set[str], conditional: bool = False) -> str:
    """Returns the text of a csrc file with each include expanded once. #line gives files and lines to the compiler.

    Args:
        seen: the files that are expanded already, to which this one is added.
        guarded: files that are expanded within an #if, and therefore possibly once more: they get a guard.
        conditional: this one is within an #if.
    """
    seen.add(name)
    if conditional:
        guarded.add(name)
    lines, depth = [f'#line 1 "{name}"'], 0
    for number, line in enumerate(_csrc_text(name).splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            depth += line.startswith("#if") - line.startswith("#endif")
            lines.append("" if line == "#pragma once" else line)
        elif include[1] not in seen:
            text = _expand(include[1], {*seen} if depth else seen, guarded, conditional or depth > 0)
            lines += [text, f'#line {number + 1} "{name}"']
        else:
            lines.append("")
    if name in guarded:
        guard = f"INCLUDED_{re.sub('[^A-Za-z0-9]', '_', name)}"
        lines = [f"#ifndef {guard}", f"#define {guard}", *lines, "#endif"]
    return "\n".join(lines)


@functools.cache
def _csrc_text(name: str) -> str:
    return (resources.files("fp8moe_plugin") / "csrc" / name).read_text()


def _faults(report: str) -> list[str]:
    """Returns the lines of ptxas' report that show local memory, a warning, or a loss of performance.

    Local memory holds arrays or spilled registers. Performance is lost if ptxas cannot track the registers of wgmma
    instructions and serializes them.
    """
    lines = [line.strip() for line in report.splitlines()]
    usage = [line for line in lines if "bytes stack frame" in line]
    used = [line for line in usage if any(int(n) for n in re.findall(r"(\d+) bytes", line))]
    warnings = [line for line in lines if re.search(r"\bwarning\b|\bPerformance Loss\b", line, re.IGNORECASE)]
    return [*used, *warnings] if usage else ["ptxas reported nothing", *warnings]
