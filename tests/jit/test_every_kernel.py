"""All kernels of the plan compile to sm_90a cubins on a machine without a GPU."""

from pathlib import Path

import pytest

from fp8moe_plugin.jit.cache import CHECKSUM_BYTES
from fp8moe_plugin.jit.compiler import entry_name, nvrtc_version
from fp8moe_plugin.launches.kernel_sets import all_kernels
from fp8moe_plugin.plan.keys import KernelKey
from tests.emulator.build import CSRC
from tests.shared import every_kernel
from warmup.report import KernelReport, Report, State


def name(key: KernelKey) -> str:
    return "-".join([key.source, *(f"{macro}={value}" for macro, value in key.defines)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_kernel(tmp_path_factory)


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, KernelReport]:
    """What compiling said of each kernel, by its name."""
    report = Report.model_validate_json((folder / "report.json").read_text())
    return {kernel.kernel: kernel for kernel in report.kernels}


@pytest.mark.parametrize("key", all_kernels(), ids=name)
def test_a_kernel_compiles_without_spills_local_memory_warnings_or_lost_speed(
    folder: Path, reports: dict[str, KernelReport], key: KernelKey
) -> None:
    entry = entry_name(key, nvrtc_version())
    assert (folder / "cache" / entry).read_bytes()[CHECKSUM_BYTES:].startswith(b"\x7fELF")
    report = reports[str(key)]
    assert (report.state, report.entry) == (State.COMPILED, entry)
    assert report.detail is None  # it would name them


def test_the_kernels_fit_a_block_of_a_hopper_gpu() -> None:
    assert all(key.smem_bytes <= 227 * 1024 and key.threads <= 1024 for key in all_kernels())


def test_source_lines_have_the_common_length_limit() -> None:
    for path in CSRC.rglob("*.cu*"):
        assert [line for line in path.read_text().splitlines() if len(line) > 120] == [], path.name
