"""What can go wrong, each error saying what, why and what to do instead."""


class Fp8MoeError(Exception):
    """Base of every error raised on purpose by this package."""


class InvalidInputError(Fp8MoeError, ValueError):
    """A public op was called with an argument it cannot take."""


class UnsupportedError(Fp8MoeError, ValueError):
    """A model, a setting or a machine asks for something this package does not do."""


class CheckpointError(Fp8MoeError, ValueError):
    """A checkpoint lacks a tensor, or holds one of the wrong kind."""


class CompileError(Fp8MoeError, RuntimeError):
    """A kernel source did not compile."""


class CacheError(Fp8MoeError, RuntimeError):
    """The folder of compiled kernels, or a bundle of them, cannot be used."""


class KernelNotPrecompiled(Fp8MoeError, RuntimeError):
    """A kernel would have to be compiled, and `FP8MOE_JIT=forbid` says not to."""


class WrongResultError(Fp8MoeError, RuntimeError):
    """With FP8MOE_DEBUG=1: a layer has left a row of its result unwritten, or read what nothing has written."""


class LaunchError(Fp8MoeError, RuntimeError):
    """The CUDA driver refused a module, a tensor map or a launch."""
