"""Compiling Triton kernels to cubins for any GPU, in memory. Needs only Triton's wheel, which brings its own ptxas."""

import contextlib
import functools
import importlib
import io
import os
import pkgutil
import re
import tempfile
import threading
from collections.abc import Iterator
from importlib import metadata, resources
from typing import Any

from fp8moe_plugin.errors import CompileError
from fp8moe_plugin.jit.cubin import with_shared_memory
from fp8moe_plugin.plan.parameters import PARAMETERS, Kind
from fp8moe_plugin.plan.triton.catalog import TARGETS, TritonKey
from fp8moe_plugin.plan.triton.signatures import TRITON_SIGNATURES

PACKAGE = "fp8moe_plugin.triton_kernels"
# They may fuse multiplications with additions, as csrc does in the same places.
FUSED = tuple(
    f"triton_{name}"
    for name in ("gate_up", "gemm", "packed_gate_up", "packed_gemm", "gate_up_small_batch", "down_small_batch")
)
VARIABLES = ("TRITON_", "DISABLE_", "PTXAS_", "NVPTX_", "LLVM_", "MLIR_", "USE_IR_LOC")  # how their names begin
UNUSED = {"num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0}  # the launcher supports no others
PTX_TYPES = {Kind.POINTER: "u64", Kind.INT: "u32", Kind.FLOAT: "f32"}


_one_at_a_time = threading.Lock()


@functools.cache
def triton_version() -> str:
    """Triton's version, without importing it.

    Raises:
        CompileError: it is not installed.
    """
    try:
        return f"triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError as error:
        raise CompileError(
            "Triton is not installed, and the kernels of GPUs other than Hopper's are compiled by it. "
            f"{_how_to_install()} Only serving from a bundle, FP8MOE_BUNDLE, works without it."
        ) from error


def _how_to_install() -> str:
    """Returns the version that the installed PyTorch requires, or None if it is not known."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        required = [name.partition(";")[0].strip() for name in metadata.requires("torch") or []]
        if wanted := next((name for name in required if re.match(r"triton\b", name)), None):
            return f"Run `pip install '{wanted}'`, which PyTorch {metadata.version('torch')} requires."
    return "Run `pip install triton`, best the version that the server's PyTorch requires."


def compile_triton(key: TritonKey) -> tuple[bytes, str]:
    """Returns the cubin of a kernel, with its shared memory, and ptxas' report.

    Raises:
        CompileError: Triton is not installed, refuses the kernel, or compiles it so that the launcher cannot launch it.
    """
    version = triton_version()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise CompileError("TRITON_INTERPRET is set, so Triton does not compile but interpret. Unset it.")
    try:
        with _uncached() as log:
            compiled = _compile(key)
    except Exception as error:  # Triton raises its own types, and any type from inside
        raise CompileError(
            f"{key} does not compile with {version}: {type(error).__name__}: {error}\n{error.__cause__ or ''}\n"
            "Use the Triton that PyTorch requires; if that does not help, report this with the text above."
        ) from error
    fault = _fault(key, compiled)
    if fault:
        raise CompileError(f"{key} compiled with {version} {fault}. Use the Triton that PyTorch requires.")
    return with_shared_memory(compiled.asm["cubin"], compiled.metadata.shared), log.getvalue()


def sources(key: TritonKey) -> tuple[str, ...]:
    """Returns everything that the cubin depends on except Triton's version: sources, constants, types and options."""
    return *_texts(), repr((str(key), key.threads, key.stages, TRITON_SIGNATURES[key.source], key.source in FUSED))


@functools.cache
def _kernels() -> dict[str, Any]:
    package = importlib.import_module(PACKAGE)
    modules = [importlib.import_module(f"{PACKAGE}.{module.name}") for module in pkgutil.iter_modules(package.__path__)]
    return {name: value for module in modules for name, value in vars(module).items() if name in TRITON_SIGNATURES}


@functools.cache
def _texts() -> tuple[str, ...]:
    files = resources.files("fp8moe_plugin") / "triton_kernels"
    return tuple(file.read_text() for file in sorted(files.iterdir(), key=lambda f: f.name) if file.name[-3:] == ".py")


def _compile(key: TritonKey) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _kernels()[key.source]
    parameters, defaults = TRITON_SIGNATURES[key.source], {p.name: p.default for p in function.params if p.has_default}
    constants = defaults | dict(key.defines)
    position = {name: i for i, name in enumerate(function.arg_names)}
    types = {p.name: p.type for p in parameters} | dict.fromkeys(constants, "constexpr")
    divisors = {(position[p.name],): [["tt.divisibility", p.divisor]] for p in parameters if p.divisor > 1}
    source = ASTSource(
        function,
        {name: types[name] for name in function.arg_names},
        {(position[name],): value for name, value in constants.items()},
        divisors,
    )
    options = {"num_warps": key.threads // 32, "num_stages": key.stages, "enable_fp_fusion": key.source in FUSED}
    capability = int(key.target.removeprefix("sm_"))
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@contextlib.contextmanager
def _uncached() -> Iterator[io.StringIO]:
    """Keep Triton from writing permanent files, and file names into cubins. Yields a stream with ptxas' report.

    Triton's settings are its defaults here, because they change cubins (PTXAS_OPTIONS, TRITON_PTXAS_PATH), but not our
    names of them. They belong to the process, so only one thread at a time compiles.
    """
    from triton import knobs
    from triton.backends.nvidia import compiler as nvidia

    log = io.StringIO()
    with _one_at_a_time, contextlib.ExitStack() as stack:
        stack.callback(os.environ.update, {name: os.environ.pop(name) for name in _variables()})
        for group in (knobs.cache, knobs.compilation, knobs.language, knobs.nvidia, knobs.runtime):
            stack.enter_context(group.scope())
            group.reset()
        knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory())
        knobs.compilation.always_compile = True
        knobs.compilation.disable_line_info = True
        knobs.nvidia.dump_ptxas_log = True
        vars(nvidia)["print"] = functools.partial(print, file=log)  # its report; other threads keep their stdout
        stack.callback(vars(nvidia).pop, "print")
        yield log


def _variables() -> list[str]:
    """Returns the environment variables that are set and that Triton, LLVM or ptxas read."""
    return [name for name in os.environ if name.startswith(VARIABLES)]


def _fault(key: TritonKey, compiled: Any) -> str | None:
    """Returns why the launcher cannot launch a kernel, or None."""
    made, limit = compiled.metadata, TARGETS[key.target][1]
    entry = re.search(rf"\.entry {key.source}\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    found = re.findall(r"\.param \.(\w+)", entry[1]) if entry else []
    if found != [PTX_TYPES[parameter.kind] for parameter in PARAMETERS[key.source]]:
        return f"takes other parameters than a launch passes: {found}"
    wanted = {**UNUSED, "num_warps": key.threads // 32}
    differing = {name: getattr(made, name) for name, value in wanted.items() if getattr(made, name) != value}
    if differing:
        return f"needs what a launch does not provide: {differing}"
    return f"needs {made.shared} bytes of shared memory, more than {limit}" if made.shared > limit else None
