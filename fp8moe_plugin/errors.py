"""The package's exceptions. Each message says what is wrong, why, and what to do about it."""


class Fp8MoeError(Exception):
    """Base class of every error that this package raises deliberately."""


class InvalidInputError(Fp8MoeError, ValueError):
    """A public op was called with an invalid argument."""


class UnsupportedError(Fp8MoeError, ValueError):
    """A model, a setting or the machine requires something that this package does not support."""


class CheckpointError(Fp8MoeError, ValueError):
    """A checkpoint cannot be read, is incomplete or damaged, or does not match its config.json."""


class CompileError(Fp8MoeError, RuntimeError):
    """A kernel could not be compiled."""


class CacheError(Fp8MoeError, RuntimeError):
    """The kernel cache or a kernel bundle cannot be used."""


class KernelNotPrecompiled(Fp8MoeError, RuntimeError):
    """A kernel needs to be compiled, but `FP8MOE_JIT=forbid` is set."""


class WrongResultError(Fp8MoeError, RuntimeError):
    """With FP8MOE_DEBUG=1: a layer left a row of its result unwritten, or read uninitialized memory."""


class LaunchError(Fp8MoeError, RuntimeError):
    """The CUDA driver rejected a module, a tensor map or a launch, or a kernel was not loaded before graph capture."""
