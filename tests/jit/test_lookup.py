"""A kernel comes from the bundle, the cache or the compiler, in this order; each fallback gives its reason."""

import logging
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from fp8moe_plugin.errors import CompileError, KernelNotPrecompiled
from fp8moe_plugin.jit import bundle, compiler, lookup
from fp8moe_plugin.jit.lookup import Origin, find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import SOURCE, set_variables

KEY = KernelKey("tiny", (("VALUE", 3),))
OTHER = KernelKey("tiny", (("VALUE", 4),))
SHIPPED = compiler._csrc_text  # which the fixture `kernels` replaces


@pytest.fixture(autouse=True)
def listen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fp8moe")


def entry(folder: Path) -> Path:
    (path,) = folder.glob("*.cubin")
    return path


def make_bundle(path: Path, *keys: KernelKey) -> None:
    bundle.write_bundle(path, {key: compiler.compile_kernel(key).cubin for key in keys})


def test_the_second_load_is_a_hit_of_the_same_bytes(kernels: Path) -> None:
    first, second = find_or_compile(KEY), find_or_compile(KEY)
    assert (first.origin, second.origin) == (Origin.COMPILER, Origin.CACHE)
    assert first.cubin == second.cubin


def test_the_bundle_comes_first_and_needs_neither_cache_nor_compiler(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bundle(tmp_path / "b.tar", KEY)
    set_variables(monkeypatch, FP8MOE_BUNDLE=tmp_path / "b.tar", FP8MOE_CACHE_DIR="~nosuchuser/x", FP8MOE_JIT="forbid")
    monkeypatch.setattr(lookup, "compiler_version", lambda target: pytest.fail("asked for NVRTC"))
    assert find_or_compile(KEY).origin == Origin.BUNDLE


def test_kernel_missing_from_bundle_is_read_from_cache(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find_or_compile(KEY)
    find_or_compile(OTHER)
    make_bundle(tmp_path / "b.tar")
    set_variables(monkeypatch, FP8MOE_BUNDLE=tmp_path / "b.tar")
    assert [find_or_compile(key).origin for key in (KEY, OTHER)] == [Origin.CACHE, Origin.CACHE]
    assert caplog.text.count("the bundle does not provide all kernels: ") == 1


def test_a_bundle_that_cannot_be_read_costs_one_line(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_variables(monkeypatch, FP8MOE_BUNDLE=tmp_path / "none.tar")
    assert [find_or_compile(key).origin for key in (KEY, OTHER)] == [Origin.COMPILER, Origin.COMPILER]
    assert caplog.text.count("none.tar cannot be read: No such file or directory") == 3  # and why each was compiled


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_entry_is_compiled_again_and_healed(
    kernels: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cubin = find_or_compile(KEY).cubin
    whole = entry(kernels).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    entry(kernels).write_bytes({"flip": bytes(flipped), "truncate": whole[:-1], "empty": b""}[damage])
    assert find_or_compile(KEY) == (cubin, Origin.COMPILER)
    assert "is damaged: its checksum differs" in caplog.text
    assert find_or_compile(KEY) == (cubin, Origin.CACHE)


def test_a_folder_that_cannot_be_used_costs_one_line_not_the_kernels(
    kernels: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=tmp_path / "file" / "cache")
    assert [find_or_compile(key).origin for key in (KEY, OTHER)] == [Origin.COMPILER, Origin.COMPILER]
    assert caplog.text.count("but not cached: ") == 1
    assert f"{tmp_path}/file/cache cannot be written: Not a directory" in caplog.text


@pytest.mark.parametrize(("jit", "level", "advice"), [("allow", "INFO", 0), ("warn", "WARNING", 1)])
def test_what_is_compiled_at_serving_is_told(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, jit: str, level: str, advice: int
) -> None:
    set_variables(monkeypatch, FP8MOE_JIT=jit)
    find_or_compile(KEY, "fp8moe-warmup --model M --tp 8")
    find_or_compile(OTHER, "fp8moe-warmup --model M --tp 8")
    told = [record.levelname for record in caplog.records if "compiled tiny VALUE=3 (" in record.message]
    assert told == [level]
    assert f"{kernels} does not contain it" in caplog.text
    assert caplog.text.count("to compile them in advance, run `fp8moe-warmup --model M --tp 8`") == advice


def test_forbid_names_the_kernel_the_reason_and_the_command(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, FP8MOE_JIT="forbid")
    with pytest.raises(KernelNotPrecompiled) as caught:
        find_or_compile(KEY, "fp8moe-warmup --model M --tp 8")
    assert str(caught.value) == (
        f"The kernel tiny VALUE=3 is not precompiled ({kernels} does not contain it), and FP8MOE_JIT=forbid is set. "
        "Run `fp8moe-warmup --model M --tp 8` as this user and with the same FP8MOE_* variables, "
        "or set FP8MOE_JIT=allow to compile kernels at startup."
    )


def test_forbid_asks_for_a_new_bundle_where_one_is_in_use(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, FP8MOE_JIT="forbid", FP8MOE_BUNDLE=tmp_path / "a b.tar")
    command = f"`fp8moe-warmup bundle --model M --tp 8 --bundle '{tmp_path}/a b.tar'`"
    with pytest.raises(KernelNotPrecompiled, match=command):
        find_or_compile(KEY, "fp8moe-warmup --model M --tp 8")


def test_the_name_changes_with_all_that_the_compiler_reads(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {compiler.entry_name(KEY, "nvrtc 13.0"), compiler.entry_name(OTHER, "nvrtc 13.0")}
    names.add(compiler.entry_name(KEY, "nvrtc 13.1"))
    monkeypatch.setitem(compiler.OPTIONS, "std", "c++20")
    names.add(compiler.entry_name(KEY, "nvrtc 13.0"))
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: SOURCE + " ")
    names.add(compiler.entry_name(KEY, "nvrtc 13.0"))
    monkeypatch.setitem(compiler.MACROS, "TAIL_ROWS", 17)
    names.add(compiler.entry_name(KEY, "nvrtc 13.0"))
    assert len(names) == 6


def test_an_error_in_a_source_names_the_file_and_the_line(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"tiny.cu": '#include "part.cuh"\n' + SOURCE, "part.cuh": "#pragma once\n\nint broken = ;"}
    monkeypatch.setattr(compiler, "_csrc_text", texts.__getitem__)
    with pytest.raises(CompileError, match=r"(?s)part\.cuh\(3\).*Upgrade the package nvidia-cuda-nvrtc.*report this"):
        find_or_compile(KEY)


def test_a_broken_nvrtc_is_told(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = nvrtc.nvrtcResult.NVRTC_ERROR_INTERNAL_ERROR
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (failure, None, None))
    compiler.nvrtc_version.cache_clear()
    with pytest.raises(CompileError, match=r"its version .*INTERNAL_ERROR.*Reinstall the package nvidia-cuda-nvrtc"):
        find_or_compile(KEY)


def test_a_kernel_that_needs_local_memory_costs_a_warning(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = 'extern "C" __global__ void tiny(int* p) { int a[512]; for (int& x : a) x = *p++; *p = a[threadIdx.x]; }'
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: source)
    assert find_or_compile(KEY).cubin
    assert "2048 bytes stack frame" in caplog.text


PIPELINE = """#include "device/wgmma.cuh"
DEVICE void start(float (&product)[8]) {
    wgmma_fence();
    wgmma_issue(product, dynamic_shared_address(), dynamic_shared_address() + 8192);
    wgmma_commit();
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}
DEVICE void add(float (&product)[8], float (&sum)[8]) {
    wgmma_results_ready(product);
    for (int i = 0; i < 8; ++i) sum[i] += product[i];
}
extern "C" __global__ void tiny(float* out, int n) {
    float one[8], other[8], sum[8] = {};
    start(one);
    for (int i = 0; i < n; ++i) {
        start(other);
        add(one, sum);
        start(one);
        add(other, sum);
    }
    wgmma_wait();
    add(one, sum);
    for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = sum[i];
}
"""


def test_a_kernel_whose_wgmma_wait_for_one_another_costs_a_warning(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: PIPELINE if name == "tiny.cu" else SHIPPED(name))
    assert find_or_compile(KEY).cubin
    assert "wgmma.mma_async instructions are serialized" in caplog.text


@pytest.mark.parametrize("format", [1, 2, 3])
def test_a_header_may_be_included_within_a_condition(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, format: int
) -> None:
    choice = '#if FORMAT == 1\n#include "one.cuh"  // its own\n#elif FORMAT == 2\n#include "two.cuh"\n#endif\n'
    texts = {
        "base.cuh": "#pragma once\nstruct Base { int value = 1; };",
        "one.cuh": '#pragma once\n#include "base.cuh"\nstruct One : Base {};\n#define CHOSEN One',
        "two.cuh": '#pragma once\n#include "base.cuh"\nstruct Two : Base {};\n#define CHOSEN Two',
        "tiny.cu": f'{choice}#include "base.cuh"\n#ifndef CHOSEN\n#define CHOSEN Base\n#endif\n'
        'extern "C" __global__ void tiny(int* out) { *out = CHOSEN().value; }',
    }
    monkeypatch.setattr(compiler, "_csrc_text", texts.__getitem__)
    assert compiler.compile_kernel(KernelKey("tiny", (("FORMAT", format),))).cubin
