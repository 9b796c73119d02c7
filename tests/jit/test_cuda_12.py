"""NVRTC and drivers of CUDA 12. `make nvrtc` compiles every kernel with such an NVRTC."""

import ctypes
from importlib import metadata
from pathlib import Path

import pytest
from cuda.bindings import driver, nvrtc

from fp8moe_plugin.errors import CompileError, LaunchError
from fp8moe_plugin.jit import compiler
from fp8moe_plugin.jit.cubin import HEADER_BYTES, cubin_fault
from fp8moe_plugin.jit.driver import _check_driver
from fp8moe_plugin.jit.toolchain import cuda_of_cubin


def header(abi: int, flags: int) -> bytes:
    """Returns the ELF header of a cubin."""
    ident = b"\x7fELF\x02\x01\x01" + bytes([abi]) + bytes(8)
    start = ident + (2).to_bytes(2, "little") + (190).to_bytes(2, "little") + bytes(28)
    return (start + flags.to_bytes(4, "little")).ljust(HEADER_BYTES, b"\0")


@pytest.mark.parametrize(
    ("abi", "flags", "fault"),
    [
        (0x33, 0x5A0D5A, None),  # as NVRTC 12.8 and 12.9 write it
        (0x41, 0x6005A04, None),  # as NVRTC 13.0 does
        (0x33, 0x590D59, "machine code for sm_89, not for sm_90"),
        (0x41, 0x6007804, "machine code for sm_120, not for sm_90"),
    ],
)
def test_the_architecture_is_read_from_cubins_of_both_cuda_versions(abi: int, flags: int, fault: str | None) -> None:
    assert cubin_fault(header(abi, flags)) == fault


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver for CUDA 12.8."""
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (driver.CUresult.CUDA_SUCCESS, 12080))


@pytest.mark.usefixtures("old_driver")
def test_kernels_for_newer_cuda_than_driver_are_refused() -> None:
    check = _check_driver.__wrapped__  # which remembers nothing
    for compiled in ("nvrtc 12.8.93", "nvrtc 12.9.86", "triton 3.9.0"):  # of the same major version, any driver will do
        check(compiled, 12)
    with pytest.raises(LaunchError) as caught:
        check("nvrtc 13.0.88", 13)
    assert str(caught.value).startswith(
        "The NVIDIA driver supports CUDA 12.8, but the kernels were compiled by 'nvrtc 13.0.88' and need a driver for "
        "CUDA 13. Either update the driver, or serve from an environment with fp8moe-plugin[cu12]"
    )
    with pytest.raises(LaunchError, match="or compile them with an older Triton, whose assembler is that of CUDA 12"):
        check("triton 3.9.0", 13)


def test_the_cuda_version_is_read_from_cubins() -> None:
    note = b"Cuda compilation tools, release 13.4, V13.4.59"  # as Triton 3.9's ptxas writes it, too
    assert cuda_of_cubin(header(0x41, 0x6005A04) + note) == 13
    assert cuda_of_cubin(header(0x33, 0x5A0D5A)) == 12
    assert cuda_of_cubin(header(0x41, 0x6005A04)) is None


@pytest.mark.parametrize("release", [(12, 6), (11, 8)])
def test_an_nvrtc_that_is_too_old_is_named(release: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, *release))
    with pytest.raises(CompileError, match=rf"^NVRTC {release[0]}\.{release[1]} is too old: .* 12\.8\. Upgrade the"):
        compiler.nvrtc_release()


@pytest.mark.parametrize(
    ("bindings", "package"), [("12.9.10", "nvidia-cuda-nvrtc-cu12"), ("13.5.0", "nvidia-cuda-nvrtc")]
)
def test_the_package_is_that_of_the_bindings(bindings: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.metadata, "version", lambda name: bindings)
    assert compiler.nvrtc_package() == package


@pytest.mark.parametrize("bindings", ["12.9.4", "13.0.1"])
def test_cuda_12_bindings_load_nvrtc_12_beside_13(
    bindings: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """cuda-bindings would take either, whichever they find first."""
    names = ["libnvrtc.so.12", "__init__.py", "libnvrtc-builtins.so.12.9"]
    loaded: list[str] = []
    monkeypatch.setattr(metadata, "version", {"cuda-bindings": bindings}.__getitem__)
    monkeypatch.setattr(metadata, "files", {compiler.NVRTC_12: list(map(metadata.PackagePath, names))}.__getitem__)
    monkeypatch.setattr(metadata.PackagePath, "locate", lambda path: tmp_path / path, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    compiler._load_nvrtc_of_cuda_12()
    wanted = [str(tmp_path / "libnvrtc-builtins.so.12.9"), str(tmp_path / "libnvrtc.so.12")]
    assert loaded == (wanted if bindings.startswith("12.") else [])
