"""`doctor` and the other commands, given names and manifests with terminal escapes, and unusual caches."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from fp8moe_plugin.errors import KernelNotPrecompiled
from fp8moe_plugin.jit import bundle, compiler, wheel
from fp8moe_plugin.jit import cache as kernel_cache
from fp8moe_plugin.jit.compiler import compile_kernel, nvrtc_version
from fp8moe_plugin.jit.lookup import find_or_compile, remedy
from fp8moe_plugin.launches.kernel_sets import all_kernels
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import set_variables
from tests.jit.test_bundle import rewrite
from tests.jit.test_toolchain import CUBIN_OF_13
from warmup import diagnosis, kernels
from warmup import doctor as examination
from warmup.__main__ import main
from warmup.diagnosis import Diagnosis, Driver, Engine, Gpu
from warmup.report import Report

COMBINE, OTHER = KernelKey("combine"), KernelKey("add_sums")
ESCAPE = "\x1b]0;owned\x07\x1b[31m\u202e\n"


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "plan_of", lambda *args: {COMBINE: "why"})


@pytest.fixture
def evil(tmp_path: Path, cache: Path) -> Path:
    """A folder whose name contains escapes."""
    folder = tmp_path / f"evil{ESCAPE}'"
    folder.mkdir(mode=0o700)
    return folder


def assert_harmless(text: str) -> None:
    assert all(character.isprintable() for line in text.split("\n") for character in line), ascii(text)
    assert not any(line.startswith("'") for line in text.split("\n")), "the line feed of a name"


def doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["doctor"])
    printed = capsys.readouterr()
    assert printed.err == ""
    assert_harmless(printed.out)
    return status, printed.out


def test_a_manifest_reaches_no_terminal_raw(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.tar"
    bundle.write_bundle(path, {COMBINE: compile_kernel(COMBINE).cubin})
    set_variables(monkeypatch, FP8MOE_BUNDLE=path)
    assert doctor(capsys)[0] == 0
    evil = {"compiler": "nvrtc\x7f 13'"}  # JSON's escapes have a backslash, which manifests never have

    def change(name: str, content: bytes) -> bytes:
        return json.dumps(json.loads(content) | evil, ensure_ascii=False).encode() if "manifest" in name else content

    rewrite(path, change)
    status, printed = doctor(capsys)
    assert status == 0
    assert f'bundle: {path}, 1 kernels compiled by "nvrtc\\x7f 13\'"' in printed
    assert "b.tar was made from other kernel sources" in printed
    rewrite(path, lambda name, content: content if "manifest" in name else content[:-1] + b"\xff")
    status, printed = doctor(capsys)
    assert status == 1
    assert "WRONG  bundle: " in printed
    assert "b.tar is damaged: the checksum of " in printed


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_names_of_folders_reach_no_terminal_raw(
    evil: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    if there:
        find_or_compile(COMBINE)
        bundle.write_bundle(evil / "b.tar", {COMBINE: compile_kernel(COMBINE).cubin})
    for variable in ("FP8MOE_CACHE_DIR", "FP8MOE_BUNDLE"):
        monkeypatch.setenv(variable, "")
    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "HOME"):
        set_variables(monkeypatch, **{name: evil})
        assert "evil\\x1b]0;owned" in doctor(capsys)[1]
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=evil / "cache", FP8MOE_BUNDLE=evil / "b.tar")
    assert doctor(capsys)[0] == (0 if there else 1)
    assert main(["list"]) == 0
    assert_harmless(capsys.readouterr().out)
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=f"~{ESCAPE}/x")
    doctor(capsys)


@pytest.mark.parametrize("mode", [0o770, 0o000], ids=oct)
def test_unusable_cache_name_is_quoted(
    evil: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: int
) -> None:
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=evil)
    find_or_compile(COMBINE)
    (entry,) = evil.glob("*.cubin")
    entry.write_bytes(b"damaged")
    doctor(capsys)
    evil.chmod(mode)
    doctor(capsys)


def test_an_error_of_a_serving_process_is_harmless(evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=evil, FP8MOE_BUNDLE=evil / "b.tar", FP8MOE_JIT="forbid")
    with pytest.raises(KernelNotPrecompiled) as caught:
        find_or_compile(COMBINE)
    assert_harmless(str(caught.value))


@pytest.mark.parametrize("name", ["b.tar", "a b'.tar", f"{ESCAPE}\\'é.tar", os.fsdecode(b"\xff\x1b.tar")])
def test_a_shell_reads_the_path_of_a_bundle_back_from_the_command(cache: Path, tmp_path: Path, name: str) -> None:
    command, _ = remedy("fp8moe-warmup", tmp_path / name)
    assert_harmless(command)
    script = command.replace("fp8moe-warmup bundle --bundle", 'printf "%s"')
    assert subprocess.run(["bash", "-c", script], capture_output=True).stdout == os.fsencode(tmp_path / name)


def test_a_cache_that_leads_nowhere_is_wrong_and_an_odd_entry_is_not(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.symlink_to("nowhere")
    status, printed = doctor(capsys)
    assert status == 1
    assert f"WRONG  cache: {cache}: it is a dangling symbolic link. Set FP8MOE_CACHE_DIR" in printed
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=cache / "cache")
    status, printed = doctor(capsys)
    assert status == 1
    assert (
        f"WRONG  cache: {cache}/cache does not exist, and cannot be created in {cache}. Set FP8MOE_CACHE_DIR" in printed
    )
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=tmp_path / "odd")
    (tmp_path / "odd").mkdir(mode=0o700)
    (tmp_path / "odd" / "link-0.cubin").symlink_to("nowhere")
    (tmp_path / "odd" / "folder-0.cubin").mkdir()
    status, printed = doctor(capsys)
    assert status == 0
    assert f"ok     cache: {tmp_path}/odd, mode 0700, 2 kernels" in printed
    assert "read-only" not in printed
    assert "; missing kernels are compiled at startup if needed\n       Run `fp8moe-warmup`.\n" in printed
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    printed = doctor(capsys)[1]
    assert f"ok     cache: {tmp_path}/odd, mode 0700, 2 kernels, 0.00 MB, read-only\n" in printed
    assert "; missing kernels are compiled at every start, because the cache cannot keep them\n" in printed
    assert "       Run `FP8MOE_CACHE_DIR=$(mktemp -d) fp8moe-warmup bundle --bundle " in printed


def test_doctor_says_what_launches_kernels(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fp8moe_plugin.jit._sequence", reason="built without a C compiler")
    assert "ok     launcher: C extension\n" in doctor(capsys)[1]
    monkeypatch.setitem(sys.modules, "fp8moe_plugin.jit._sequence", None)
    assert "launcher: cuda-bindings: without the C extension" in doctor(capsys)[1]


def facts(tmp_path: Path, *arguments: str) -> Diagnosis:
    main(["doctor", *arguments, "--json", str(tmp_path / "ticket.json")])
    found = Report.model_validate_json((tmp_path / "ticket.json").read_text()).diagnosis
    assert found
    return found


def test_the_report_has_the_facts_as_fields(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_or_compile(COMBINE)
    bundle.write_bundle(tmp_path / "b.tar", {COMBINE: compile_kernel(COMBINE).cubin})
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    set_variables(monkeypatch, FP8MOE_BUNDLE=tmp_path / "b.tar", FP8MOE_JIT="warn", FP8MOE_BACKED="reference")
    found = facts(tmp_path)
    assert found.settings
    assert (found.settings.jit, found.settings.bundle) == ("warn", tmp_path / "b.tar")
    assert found.unknown_variables == ["FP8MOE_BACKED"]
    assert found.cache
    assert (found.cache.path, found.cache.exists, found.cache.kernels) == (str(cache), True, 1)
    assert found.cache.compilers == {nvrtc_version(): 1}
    assert found.bundle
    assert found.bundle.compiler == found.compiler == nvrtc_version()
    assert found.machine
    assert (found.machine.memory_bytes or 0) >= (found.machine.available_bytes or 0) > 0
    assert {engine.excluded_by for engine in found.engines if engine.name == "vLLM"} == {"other"}
    assert {engine.entry_point for engine in found.engines if engine.name == "vLLM"} == {"fp8moe_plugin:register"}
    assert "hf_secret" not in (tmp_path / "ticket.json").read_text()
    printed = capsys.readouterr().out
    assert "unknown variables: FP8MOE_BACKED: they are ignored. Correct or unset them" in printed
    assert "VLLM_PLUGINS=other leaves the plugin out. Add fp8moe to it" in printed


def test_a_cache_of_another_nvrtc_is_told(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_cache.publish("combine-0.cubin", CUBIN_OF_13)
    found = facts(tmp_path)
    assert found.cache
    assert found.cache.compilers == {"nvrtc 13.1.86": 1}
    said = f"those of other compilers are not used (1 by nvrtc 13.1.86), as this one is {nvrtc_version()}"
    assert said in capsys.readouterr().out
    assert main([]) == 0
    assert "the cache also has kernels that other compilers made (1 by nvrtc 13.1.86)" in capsys.readouterr().err


def test_the_driver_says_which_gpus_are_served_and_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    capabilities, done = [(9, 0), (8, 9), (8, 6)], driver.CUresult.CUDA_SUCCESS
    minor = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    answers = {
        "cuInit": lambda _: (done,),
        "cuDriverGetVersion": lambda: (done, 12080),
        "cuDeviceGetCount": lambda: (done, len(capabilities)),
        "cuDeviceGet": lambda ordinal: (done, ordinal),
        "cuDeviceGetName": lambda _, device: (done, b"GPU %d\0\0" % device),
        "cuDeviceGetAttribute": lambda attribute, device: (done, capabilities[device][attribute == minor]),
        "cuDeviceTotalMem": lambda device: (done, 1000 + device),
        "cuDeviceCanAccessPeer": lambda one, other: (done, int(2 not in (one, other))),
        "cuDeviceGetP2PAttribute": lambda _, one, other: (done, int(one == 0)),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(driver, name, answer)
    found = diagnosis.driver_and_gpus()
    assert not isinstance(found, str)
    assert found[0].cuda == "12.8"
    assert [(gpu.ordinal, gpu.name, gpu.compute_capability, gpu.memory_bytes) for gpu in found[1]] == [
        (0, "GPU 0", "9.0", 1000),
        (1, "GPU 1", "8.9", 1001),
        (2, "GPU 2", "8.6", 1002),
    ]
    assert [(gpu.served, gpu.backend, gpu.refusal is None) for gpu in found[1]] == [
        (True, "sm90", True),
        (True, "triton", True),
        (False, "triton", False),
    ]
    assert [(gpu.peers, gpu.nvlinks) for gpu in found[1]] == [([1], [1]), ([0], []), ([], [])]
    monkeypatch.setattr(driver, "cuInit", lambda _: (driver.CUresult.CUDA_ERROR_UNKNOWN,))
    assert diagnosis.driver_and_gpus() == "CUDA_ERROR_UNKNOWN"


@pytest.mark.parametrize(("cuda", "ok"), [("13.0", True), ("12.8", False)])
def test_gpus_and_a_driver_that_is_too_old_for_the_kernels(
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cuda: str,
    ok: bool,
) -> None:
    served, refused = ({"served": not need, "backend": "triton", "refusal": need} for need in (None, "more"))
    gpus = [
        Gpu(ordinal=0, name="NVIDIA H200", compute_capability="9.0", memory_bytes=150_754_820_096, **served),
        Gpu(ordinal=1, name="NVIDIA A2", compute_capability="8.6", memory_bytes=24_000_000_000, **refused),
    ]
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: (Driver(version="580.95.05", cuda=cuda), gpus))
    found = facts(tmp_path)
    assert (found.gpus, found.driver) == (gpus, Driver(version="580.95.05", cuda=cuda))
    printed = capsys.readouterr().out
    what = f"NVIDIA H200, 150.8 GB, compute capability 9.0, driver 580.95.05 for CUDA {cuda}"
    assert f"ok     GPU 0: {what}; backend triton\n" in printed
    assert "WRONG  GPU 1: NVIDIA A2, 24.0 GB, compute capability 8.6" in printed
    assert ("WRONG  driver: supports CUDA 12.8, and refuses kernels compiled by nvrtc" in printed) is not ok


@pytest.mark.parametrize(
    ("bindings", "wanted", "refused"),
    [
        ("12.9.10", [COMBINE], []),
        ("12.9.10", [COMBINE, OTHER], [nvrtc_version()]),
        ("13.5.0", [COMBINE], ["nvrtc 13.0.88"]),
    ],
)
def test_the_driver_is_compared_with_the_compilers_of_the_kernels(
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    bindings: str,
    wanted: list[KernelKey],
    refused: list[str],
) -> None:
    """The driver is for CUDA 12, and NVRTC of CUDA 13 is installed, which compiles kernels that the wheel lacks."""
    served = {"compute_capability": "9.0", "served": True, "backend": "sm90", "refusal": None}
    gpu = Gpu(ordinal=0, name="H200", memory_bytes=150_000_000_000, **served)
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: (Driver(version=None, cuda="12.8"), [gpu]))
    monkeypatch.setattr(wheel, "FOLDER", tmp_path)
    for cuda, compiled in (("12", "nvrtc 12.8.93"), ("13", "nvrtc 13.0.88")):
        bundle.write_bundle(tmp_path / f"kernels-cuda{cuda}.tar", {COMBINE: compile_kernel(COMBINE).cubin}, compiled)
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: bindings if name == "cuda-bindings" else installed(name))
    monkeypatch.setattr(kernels, "plan_of", lambda *_: dict.fromkeys(wanted, ""))
    printed = doctor(capsys)[1]
    assert f"kernels-cuda{bindings[:2]}.tar, 1 kernels compiled by nvrtc {bindings[:2]}." in printed
    found = re.findall(r"WRONG  driver: supports CUDA 12.8, and refuses kernels compiled by (.*)\. Update it,", printed)
    assert found == refused


def test_a_damaged_wheel_is_wrong_unless_the_cache_has_all_kernels(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "FOLDER", tmp_path)
    for cuda in wheel.CUDAS:
        (tmp_path / f"kernels-cuda{cuda}.tar").write_bytes(b"truncated")
    status, printed = doctor(capsys)
    assert (status, "install the wheel again\n" in printed) == (1, True)
    assert re.search(r"^WRONG  wheel: ", printed, re.MULTILINE)
    find_or_compile(COMBINE)
    status, printed = doctor(capsys)
    assert (status, "       wheel: not needed, because all kernels are available; " in printed) == (0, True)


def test_forbid_without_a_model_promises_no_compilation(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, FP8MOE_JIT="forbid")
    status, printed = doctor(capsys)
    assert (status, "compiled at startup" in printed) == (0, False)
    assert "; FP8MOE_JIT=forbid refuses models that need missing ones" in " ".join(printed.split())


def test_weights_that_are_larger_than_a_gpu(
    cache: Path, checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = {"compute_capability": "9.0", "served": True, "backend": "sm90", "refusal": None}
    gpus = [
        Gpu(ordinal=i, name=f"NVIDIA {name}", memory_bytes=size, **served)
        for i, (name, size) in enumerate([("H200", 150_000_000_000), ("H20-3e", 102_000_000_000)])
    ]
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: (Driver(version=None, cuda="13.0"), gpus))
    model = str(checkpoint("DeepSeek-V3"))
    assert main(["doctor", "--model", model, "--tp", "4"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG  memory: --tp 4 gives a GPU 169.7 GB of weights, but GPU 1 has only 102.0 GB\n" in printed
    assert f"Run `fp8moe-warmup explain --model {model} --gpu h20`: it shows the splits that fit." in printed
    main(["doctor", "--model", model, "--tp", "8"])
    assert "memory:" not in capsys.readouterr().out


def test_other_variants_that_are_wanted_are_not_strange(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [key for key in all_kernels() if key.source == "gate_up"][:2]
    monkeypatch.setattr(kernels, "plan_of", lambda *args: {first: "why", second: "why"})
    kernel_cache.publish(compiler.entry_name(second, nvrtc_version()), CUBIN_OF_13)
    assert "exist from another compiler" not in doctor(capsys)[1]
    kernel_cache.publish("gate_up-0.cubin", CUBIN_OF_13)
    assert "(1 of gate_up exist from another compiler, other sources or options)" in doctor(capsys)[1]


def test_no_command_is_recommended_for_a_model_that_cannot_be_read(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", str(tmp_path / "none")]) == 1
    printed = capsys.readouterr().out
    assert "missing kernels are compiled at startup if needed\n" in printed
    assert "Run `fp8moe-warmup" not in printed


def test_an_nvrtc_of_another_cuda_than_the_bindings_is_told(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both packages of NVRTC installed, cuda-bindings 12.9.10 loads that of CUDA 13."""
    assert f"ok     compiler: {nvrtc_version()}\n" in doctor(capsys)[1]
    monkeypatch.setattr(examination, "installed", lambda package: "12.9.10")
    status, printed = doctor(capsys)
    assert status == 0
    told = f"compiler: {nvrtc_version()}, while cuda-bindings 12.9.10 is for CUDA 12: drivers for CUDA 12 refuse its"
    assert told in printed
    monkeypatch.setattr(examination, "nvrtc_release", lambda: (12, 9))
    for version in ("12.9.10", "13.0.1"):  # drivers for CUDA 13 accept kernels of CUDA 12
        monkeypatch.setattr(examination, "installed", lambda package, version=version: version)
        assert f"ok     compiler: {nvrtc_version()}\n" in doctor(capsys)[1]


@pytest.mark.parametrize(
    ("engines", "gpus", "arguments", "verdict"),
    [
        (1, 1, [], "ok     verdict: ready to serve; no checkpoint was checked, as there is no --model"),
        (1, 1, ["--model"], "ok     verdict: ready to serve, after compiling 1 kernels at startup"),
        (1, 0, ["--model"], "       verdict: ready to compile kernels, but not to serve with them here: no GPU"),
        (
            0,
            0,
            ["--model"],
            "       verdict: ready to compile kernels, but not to serve with them here: no engine, no GPU",
        ),
        (2, 1, ["--model"], "WRONG  verdict: not ready: correct what is WRONG: vLLM"),
    ],
)
def test_the_last_line_is_a_verdict(
    cache: Path,
    checkpoint: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    engines: int,
    gpus: int,
    arguments: list[str],
    verdict: str,
) -> None:
    gpu = Gpu(
        ordinal=0,
        name="H200",
        compute_capability="9.0",
        memory_bytes=150 << 30,
        served=True,
        backend="sm90",
        refusal=None,
    )
    engine = Engine(
        name="vLLM", package="vllm", version="0.32.0", tested="", served=True, entry_point="x", excluded_by=None
    )
    found = [engine, engine.model_copy(update={"entry_point": None})][:engines]
    monkeypatch.setattr(diagnosis, "driver_and_gpus", lambda: (Driver(version=None, cuda="13.0"), [gpu] * gpus))
    monkeypatch.setattr(examination.engines, "installed_engines", lambda: iter(found))
    model = [str(checkpoint("Qwen3-30B-A3B-FP8"))] * len(arguments)
    assert main(["doctor", *arguments, *model]) == verdict.startswith("WRONG")
    assert capsys.readouterr().out.splitlines()[-1] == verdict


def test_a_missing_nvrtc_is_told_in_one_line(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13"\n  listdir("lib"):\n    libnvrtc.alt.so.13')

    monkeypatch.setattr(compiler, "_load_nvrtc_of_cuda_12", missing)
    nvrtc_version.cache_clear()
    status, printed = doctor(capsys)
    assert status == 1
    assert 'compiler: NVRTC cannot be loaded (Failure finding "libnvrtc.so.13"). Install the package' in printed
