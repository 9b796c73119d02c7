"""What compiled a cached kernel is read from it, and kernels of another NVRTC are named, not ignored in silence."""

import logging
import os
from pathlib import Path

import pytest

from fp8moe_plugin.errors import CompileError, KernelNotPrecompiled
from fp8moe_plugin.jit import cache, lookup, toolchain
from fp8moe_plugin.jit.compiler import nvrtc_version
from fp8moe_plugin.jit.lookup import find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import set_variables
from tests.jit.test_cuda_12 import header

KEY = KernelKey("tiny", (("VALUE", 3),))
NOTE = b"Cuda compilation tools, release 12.9, V12.9.86\0"
CUBIN_OF_13 = header(0x41, 0x6005A04) + NOTE.replace(b"12.9", b"13.1")


def entry_of_another(name: str = "tiny-0.cubin", cubin: bytes = CUBIN_OF_13) -> None:
    cache.publish(name, cubin)


def test_a_kernel_compiled_here_names_this_nvrtc(kernels: Path) -> None:
    assert toolchain.compiler_of_cubin(find_or_compile(KEY).cubin) == nvrtc_version()
    assert toolchain.cache_compilers(kernels) == {nvrtc_version(): 1}
    assert toolchain.other_compilers() == {}


def test_kernels_that_triton_compiled_are_not_those_of_another_nvrtc(kernels: Path) -> None:
    entry_of_another("triton_combine-0.cubin")
    assert toolchain.other_compilers() == {}


@pytest.mark.parametrize(
    ("cubin", "made_by"),
    [
        (CUBIN_OF_13, "nvrtc 13.1.86"),
        (header(0x33, 0x5A0D5A), "nvrtc 12"),  # NVRTC 12.8 and 12.9 write no note
        (header(0x41, 0x6005A04), "unknown"),
        (b"damaged", "unknown"),
    ],
)
def test_the_compiler_is_read_from_the_cubin(cubin: bytes, made_by: str) -> None:
    assert toolchain.compiler_of_cubin(cubin) == made_by


@pytest.mark.parametrize(
    ("version", "release", "others"),
    [
        ("nvrtc 13.1.86", (13, 1), {"nvrtc 12": 1}),
        ("nvrtc 13.1", (13, 1), {"nvrtc 12": 1}),  # NVRTC is not from its package
        ("nvrtc 13.1.8", (13, 1), {"nvrtc 12": 1, "nvrtc 13.1.86": 1}),
        ("nvrtc 12.8.93", (12, 8), {"nvrtc 13.1.86": 1}),
    ],
)
def test_kernels_of_other_compilers_are_counted(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, version: str, release: tuple[int, int], others: dict[str, int]
) -> None:
    entry_of_another()
    entry_of_another("tiny-1.cubin", header(0x33, 0x5A0D5A))
    (kernels / "link-0.cubin").symlink_to("nowhere")
    os.mkfifo(kernels / "pipe-0.cubin")
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: version)
    monkeypatch.setattr(toolchain, "nvrtc_release", lambda: release)
    assert toolchain.other_compilers() == others


def test_serving_says_that_it_compiles_what_another_nvrtc_had_compiled(
    kernels: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="fp8moe")
    monkeypatch.setattr(lookup, "compile_times", [])  # as in a process that has compiled nothing yet
    entry_of_another()
    set_variables(monkeypatch, FP8MOE_JIT="forbid")
    said = rf"the cache has kernels that other compilers made \(1 by nvrtc 13.1.86\); this one is {nvrtc_version()}"
    with pytest.raises(KernelNotPrecompiled, match=said):
        find_or_compile(KEY)
    set_variables(monkeypatch, FP8MOE_JIT="allow")
    find_or_compile(KEY)
    find_or_compile(KernelKey("tiny", (("VALUE", 4),)))
    assert [message for message in caplog.messages if "compiled again" in message] == [
        f"fp8moe: the cache has kernels that other compilers made (1 by nvrtc 13.1.86); this one is {nvrtc_version()}, "
        "so kernels are compiled again"
    ]


def test_without_a_compiler_no_other_is_named(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_of_another()

    def missing() -> str:
        raise CompileError("no NVRTC")

    monkeypatch.setattr(toolchain, "nvrtc_version", missing)
    assert toolchain.other_compilers() == {}
