"""Compile the runtime and translated kernels with g++, in the background."""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import fp8moe_plugin
from fp8moe_plugin.jit.compiler import macros
from fp8moe_plugin.plan import KernelKey
from tests.emulator.translate import translate

CSRC = Path(fp8moe_plugin.__file__).parent / "csrc"
RUNTIME = Path(__file__).parent / "runtime"
SHARED_LIBRARY = ("-std=c++20", "-shared", "-fPIC", "-march=native", "-ffp-contract=off")
RUNTIME_FLAGS = (*SHARED_LIBRARY, "-O3", "-Wall", "-Wextra")
KERNEL_FLAGS = (*SHARED_LIBRARY, "-O1", "-w")

ENTRY = """
extern "C" void emu_entry(void** args) {{ emu_call({name}, args); }}
extern "C" int emu_sizes(int* sizes) {{ return emu_argument_sizes({name}, sizes); }}
"""


class Kernels:
    """The kernels of one folder of sources as shared libraries, compiled when first asked for or started."""

    def __init__(self, folder: Path, csrc: Path = CSRC) -> None:
        self._folder, self._csrc = folder, csrc
        self._libraries: dict[KernelKey, Future[Path]] = {}

    def start(self, *keys: KernelKey) -> None:
        for key in keys:
            if key not in self._libraries:
                self._libraries[key] = _pool().submit(self._compile, key, len(self._libraries))

    def load(self, key: KernelKey) -> ctypes.CDLL:
        self.start(key)
        return ctypes.CDLL(str(self._libraries[key].result()))

    def _compile(self, key: KernelKey, number: int) -> Path:
        source, library = (self._folder / f"{key.source}-{number}{suffix}" for suffix in (".cpp", ".so"))
        defines = [f"-D{name}={value}" for name, value in macros(key)]
        preprocessed = _gcc("-E", "-xc++", "-std=c++20", f"-I{self._csrc}", *defines, self._csrc / f"{key.source}.cu")
        source.write_text(f'#include "ptx.h"\n{translate(preprocessed)}{ENTRY.format(name=key.source)}')
        _gcc(*KERNEL_FLAGS, f"-I{RUNTIME}", "-o", library, source)
        return library


def runtime(folder: Path) -> ctypes.CDLL:
    """The runtime, whose symbols kernels find when they are loaded later."""
    units = [(source, folder / f"{source.stem}.o") for source in sorted(RUNTIME.glob("*.cpp"))]
    list(_pool().map(lambda unit: _gcc(*RUNTIME_FLAGS, "-c", "-o", unit[1], unit[0]), units))
    library = folder / "runtime.so"
    _gcc(*RUNTIME_FLAGS, "-o", library, *(unit for _, unit in units))
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def can_compile() -> bool:
    """Whether there is a g++ for the runtime, which switches fibers by instructions of x86-64."""
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        return False
    command = ["g++", "-std=c++20", "-fsyntax-only", "-xc++", "-"]
    code = "#include <utility>\ntemplate <class T> requires true void f(T);"
    return subprocess.run(command, input=code, text=True, capture_output=True).returncode == 0


def _gcc(*arguments: str | Path) -> str:
    done = subprocess.run(["g++", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"g++ refuses the emulator's code:\n{done.stderr[:4000]}")
    return done.stdout


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))
