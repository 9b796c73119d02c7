"""Compile the runtime and translated kernels with g++, in the background; what is compiled is kept.

A library is named for a hash of its source, its flags and the compiler, and stays in `.pytest_cache`. A build that is
interrupted leaves a temporary file, and two processes do not build the same library at once.
"""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

import fp8moe_plugin
from fp8moe_plugin.jit.compiler import macros
from fp8moe_plugin.plan.keys import KernelKey
from tests.emulator.translate import translate

CSRC = Path(fp8moe_plugin.__file__).parent / "csrc"
RUNTIME = Path(__file__).parent / "runtime"
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "emulator"
MOST_LIBRARIES = 300  # a run of all tests needs about a third of them
LONGEST_BUILD_S = 3600
SHARED_LIBRARY = ("-std=c++20", "-shared", "-fPIC", "-march=native", "-ffp-contract=off")
RUNTIME_FLAGS = (*SHARED_LIBRARY, "-O3", "-Wall", "-Wextra")
KERNEL_FLAGS = (*SHARED_LIBRARY, "-O1", "-w")

ENTRY = """
extern "C" void emu_entry(void** args) {{ emu_call({name}, args); }}
extern "C" int emu_sizes(int* sizes) {{ return emu_argument_sizes({name}, sizes); }}
"""


class Kernels:
    """The kernels of one folder of sources as shared libraries, compiled when first asked for or started."""

    def __init__(self, csrc: Path = CSRC) -> None:
        self._csrc = csrc
        self._libraries: dict[KernelKey, Future[Path]] = {}

    def start(self, *keys: KernelKey) -> None:
        for key in keys:
            if key not in self._libraries:
                self._libraries[key] = _pool().submit(self._compile, key)

    def load(self, key: KernelKey) -> ctypes.CDLL:
        self.start(key)
        return ctypes.CDLL(str(self._libraries[key].result()))

    def _compile(self, key: KernelKey) -> Path:
        defines = [f"-D{name}={value}" for name, value in macros(key)]
        include = f"-I{self._csrc}"
        # Without line markers, which name folders.
        cuda = _gcc("-E", "-P", "-xc++", "-std=c++20", include, *defines, self._csrc / f"{key.source}.cu")
        source = f'#include "ptx.h"\n{translate(cuda)}{ENTRY.format(name=key.source)}'

        def build(folder: Path, library: Path) -> None:
            (folder / "kernel.cpp").write_text(source)
            _gcc(*KERNEL_FLAGS, f"-I{RUNTIME}", "-o", library, folder / "kernel.cpp")

        return _kept(key.source, (source, _runtime_sources("*.h"), str(KERNEL_FLAGS)), build)


def runtime() -> ctypes.CDLL:
    """Returns the runtime, whose symbols kernels find when they are loaded later."""

    def build(folder: Path, library: Path) -> None:
        units = [(source, folder / f"{source.stem}.o") for source in sorted(RUNTIME.glob("*.cpp"))]
        list(_pool().map(lambda unit: _gcc(*RUNTIME_FLAGS, "-c", "-o", unit[1], unit[0]), units))
        _gcc(*RUNTIME_FLAGS, "-o", library, *(unit for _, unit in units))

    library = _kept("runtime", (_runtime_sources("*"), str(RUNTIME_FLAGS)), build)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def can_compile() -> bool:
    """Returns whether there is a g++ for the runtime, which switches fibers by instructions of x86-64."""
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        return False
    command = ["g++", "-std=c++20", "-fsyntax-only", "-xc++", "-"]
    code = "#include <utility>\ntemplate <class T> requires true void f(T);"
    return subprocess.run(command, input=code, text=True, capture_output=True).returncode == 0


def _kept(name: str, inputs: tuple[str, ...], build: Callable[[Path, Path], None]) -> Path:
    """Returns the library made from these inputs; `build` gets a folder for its files, and the path that it writes."""
    digest = sha256("\0".join((_compiler(), *inputs)).encode()).hexdigest()[:32]
    library = _cache() / f"{name}-{digest}.so"
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                build(Path(folder), Path(folder, library.name))
                Path(folder, library.name).rename(library)
        os.utime(library)
    return library


@functools.cache
def _cache() -> Path:
    """Returns the folder of libraries, after removing the least recently used ones and leftovers of killed builds."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):
        for folder in CACHE.iterdir():
            if folder.is_dir() and time.time() - folder.stat().st_mtime > LONGEST_BUILD_S:
                shutil.rmtree(folder)
        oldest_last = sorted(CACHE.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
        for library in oldest_last[MOST_LIBRARIES:]:
            library.unlink()
            library.with_suffix(".lock").unlink(missing_ok=True)
    return CACHE


@functools.cache
def _compiler() -> str:
    """Returns the compiler's version, and what `-march=native` stands for on this machine."""
    done = subprocess.run(["g++", "-###", "-march=native", "-E", "-xc++", os.devnull], capture_output=True, text=True)
    return done.stderr


@functools.cache
def _runtime_sources(pattern: str) -> str:
    return "\0".join(path.read_text() for path in sorted(RUNTIME.glob(pattern)))


def _gcc(*arguments: str | Path) -> str:
    done = subprocess.run(["g++", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"g++ refuses the emulator's code:\n{done.stderr[:4000]}")
    return done.stdout


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))
