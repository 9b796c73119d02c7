"""`fp8moe-warmup`: what it compiles, prints and leaves behind."""

import contextlib
import fcntl
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.jit.bundle import write_bundle
from fp8moe_plugin.launches.kernel_sets import all_kernels, model_kernels
from fp8moe_plugin.plan.keys import KernelKey
from tests.checkpoint.published import SERVED
from tests.jit.conftest import forget, set_variables
from tests.processes import is_running
from warmup import kernels
from warmup.__main__ import main
from warmup.report import Report, State

COLD_S, WARM_S = 60, 1.5  # of CPU time, which depends little on other load; importing torch alone takes 2 s
GRACE_S = 30  # of an interrupted command on a busy machine
ALL, OF_A_MODEL = 185, 35  # kernels
SPLITS = ("--tp 1", "--tp 2", "--tp 4", "--tp 8", "--ep 8")
REFUSED_SPLITS = {
    ("MiMo-V2-Flash", split): "self_attn.qkv_proj has 192 output channels" for split in ("--tp 4", "--tp 8", "--ep 8")
}
Folder = Callable[[str], Path]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "warmup", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=600)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.cubin")}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", SERVED)
def test_every_model_is_compiled_for_every_split(
    full_cache: Path,
    checkpoint: Folder,
    models: dict[str, Model],
    capsys: pytest.CaptureFixture[str],
    name: str,
    split: str,
) -> None:
    """All kernels are already in the cache, so this only compares lists of kernels; another test compiles them."""
    status = main(["--model", str(checkpoint(name)), *split.split()])
    printed = capsys.readouterr()
    if refusal := REFUSED_SPLITS.get((name, split)):
        assert (status, refusal in printed.err) == (1, True)
        return
    assert status == 0
    number = len(model_kernels(models[name]))
    assert f"{number} kernels: {number} present, 0 compiled, 0 failed" in printed.out


def test_a_split_that_is_not_supported_is_told_the_nearest(
    cache: Path, checkpoint: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(checkpoint("GLM-4.5")), "--tp", "6"]) == 1
    printed = capsys.readouterr().err
    assert "6 ranks cannot share 96 attention heads with 8 key/value heads" in printed
    assert printed.endswith("The nearest supported options are: --tp 2 --dp 3 --ep 6 or --tp 2.\n")


def cpu_seconds(cache: Path, model: Path) -> float:
    """Of `fp8moe-warmup` on all cores together, so that two free ones need half as long."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = command("--model", model, "--tp", 8)
    done = subprocess.run(
        arguments, env=os.environ | {"FP8MOE_CACHE_DIR": str(cache)}, capture_output=True, timeout=600
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, len(entries(cache))) == (0, OF_A_MODEL), done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def of_deepseek_v3(checkpoint: Folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A cache that was empty before `fp8moe-warmup` filled it, and the CPU seconds that this took."""
    cache = tmp_path_factory.mktemp("deepseek_v3") / "cache"
    return cache, cpu_seconds(cache, checkpoint("DeepSeek-V3"))


def test_deepseek_v3_compiles_fast_and_loads_faster(of_deepseek_v3: tuple[Path, float], checkpoint: Folder) -> None:
    cache, seconds = of_deepseek_v3
    assert seconds < COLD_S
    assert min(cpu_seconds(cache, checkpoint("DeepSeek-V3")) for _ in range(5)) < WARM_S


def test_without_a_model_every_kernel_there_is_gets_compiled(filled: Path) -> None:
    assert len(entries(filled)) == len(all_kernels()) == ALL


def test_what_is_compiled_is_kept_and_only_the_rest_compiled(full_cache: Path) -> None:
    (lost, damaged, *_) = sorted(full_cache.glob("tiles_of_*.cubin"))
    lost.unlink()
    damaged.write_bytes(b"damaged")
    report = kernels.compile_missing(kernels.plan_of(None))
    assert {r.entry for r in report if r.state == State.COMPILED} == {lost.name, damaged.name}
    assert all(r.state == State.PRESENT for r in kernels.compile_missing(kernels.plan_of(None)))


def test_a_kernel_that_does_not_compile_fails_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = KernelKey("combine")
    bad = KernelKey("grouped_gemm_few_rows", (("STAGES", "nonsense"),))  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "plan_of", lambda *args: {bad: "bad", good: "good"})
    assert main([]) == 1
    printed = capsys.readouterr()
    assert "2 kernels: 0 present, 1 compiled, 1 failed" in printed.out
    assert "grouped_gemm_few_rows STAGES=nonsense" in printed.err
    assert "does not compile" in printed.err
    assert len(entries(cache)) == 1


class Deadly(KernelKey):
    """A kernel whose compiler is killed: reading it ends the process of the pool."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (9,)


def test_a_killed_compiler_is_told(cache: Path) -> None:
    (report,) = kernels.compile_missing({Deadly("combine"): "why"})
    assert report.state == State.FAILED
    assert report.detail == "a compiling process was killed; run the command again, finished kernels are kept"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("to", ["group", "parent"])
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGINT] * 4, [signal.SIGTERM], [signal.SIGKILL]], ids=str)
def test_whatever_ends_it_keeps_what_is_done_and_leaves_nobody_behind(
    cache: Path, signals: list[signal.Signals], to: str
) -> None:
    process = subprocess.Popen(
        command(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    assert process.stderr
    first, workers = process.stderr.readline(), children(process.pid)
    for number in signals:
        if process.poll() is None:
            (os.killpg if to == "group" else os.kill)(process.pid, number)
            time.sleep(0.05)
    _, rest = process.communicate(timeout=GRACE_S)
    assert first.startswith(f"[1/{ALL}] compiled ")
    assert "Traceback" not in rest
    assert len(workers) >= 2
    deadline = time.monotonic() + GRACE_S
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
    if signals[0] != signal.SIGKILL:
        assert rest.endswith("error: Interrupted. Finished work is kept; run the command again to continue.\n")
        assert process.returncode == 1
    assert 1 <= len(entries(cache)) < ALL


def test_a_terminal_gets_a_bar_and_not_lines(full_cache: Path, checkpoint: Folder) -> None:
    for lost in ("combine", "route"):
        next(full_cache.glob(f"{lost}-*.cubin")).unlink()
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))  # rows, columns
    process = subprocess.Popen(command("--model", checkpoint("DeepSeek-V3")), stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:  # EIO when the other end closes
        while part := terminal.read(4096):
            shown += part
    assert process.wait(60) == 0
    assert b"compiling: 100%" in shown
    assert b"2/2 [00:" in shown
    assert b"[1/" not in shown


def test_list_and_dry_run_compile_nothing(cache: Path, capsys: pytest.CaptureFixture[str], checkpoint: Folder) -> None:
    printed = []
    for arguments in (["list"], ["--dry-run"]):
        assert main([*arguments, "--model", str(checkpoint("Qwen3-30B-A3B-FP8"))]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert re.search(
        r"^missing +grouped_gemm_few_rows +GEMM 2 of experts in block-FP8 in steps of up to 640 tokens",
        printed[0],
        re.M,
    )
    assert f"{OF_A_MODEL} kernels, 0 present" in printed[0]
    assert not cache.exists()


def test_verify_names_what_is_missing_or_damaged_and_the_remedy(
    full_cache: Path, capsys: pytest.CaptureFixture[str], checkpoint: Folder
) -> None:
    arguments = ["verify", "--model", str(checkpoint("DeepSeek-V3")), "--tp", "8"]
    assert main(arguments) == 0
    assert f"{OF_A_MODEL} kernels, {OF_A_MODEL} present and intact, in {full_cache}" in capsys.readouterr().out
    (combine,), (route,) = full_cache.glob("combine-*.cubin"), full_cache.glob("route-*.cubin")
    combine.unlink()
    route.write_bytes(route.read_bytes()[:-1])
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert f"missing combine: {full_cache} does not contain it" in printed
    assert f"damaged route: {route} is damaged: its checksum differs" in printed
    assert f"Run `fp8moe-warmup --model {checkpoint('DeepSeek-V3')} --tp 8`." in printed


def test_bundle_is_reproducible_and_verifies(
    full_cache: Path,
    of_deepseek_v3: tuple[Path, float],
    tmp_path: Path,
    checkpoint: Folder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["bundle", "--model", str(checkpoint("DeepSeek-V3"))]
    for name, cache in (("a.tar", full_cache), ("b.tar", of_deepseek_v3[0])):
        set_variables(monkeypatch, FP8MOE_CACHE_DIR=cache)
        assert main([*arguments, "--bundle", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    set_variables(monkeypatch, FP8MOE_CACHE_DIR="/nonexistent", FP8MOE_BUNDLE=tmp_path / "a.tar", FP8MOE_JIT="forbid")
    capsys.readouterr()
    assert main(["verify", *arguments[1:]]) == 0
    assert f"{OF_A_MODEL} kernels, {OF_A_MODEL} present and intact, in {tmp_path}/a.tar" in capsys.readouterr().out


def test_a_cache_that_cannot_be_used_is_an_error_before_anything_is_compiled(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir(mode=0o770)
    cache.chmod(0o770)
    assert main([]) == 1
    bundle = f"{cache}/fp8moe-kernels.tar"
    assert capsys.readouterr().err == (
        f"error: {cache} is not used: its mode 0770 lets other users write to it. "
        "Set FP8MOE_CACHE_DIR to a folder of your own with mode 0700, or serve from a bundle (FP8MOE_BUNDLE) where a "
        "volume sets other modes (fsGroup). "
        f"Or run `FP8MOE_CACHE_DIR=$(mktemp -d) fp8moe-warmup bundle --bundle {bundle}`, and serve with "
        f"FP8MOE_BUNDLE={bundle}.\n"
    )


@pytest.mark.parametrize(("mode", "writable"), [(0o2770, True), (0o777, True), (0o2770, False)])
def test_verify_recommends_what_works_without_the_cache(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: int,
    writable: bool,
) -> None:
    """As on Kubernetes: a volume with fsGroup, whose modes are set at each mount, and an emptyDir."""
    monkeypatch.setattr(kernels, "plan_of", lambda *args: {KernelKey("combine"): "why"})
    cache.mkdir()
    cache.chmod(mode)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: (writable or path != cache) and access(path, mode))
    monkeypatch.chdir(tmp_path)
    assert main(["verify"]) == 1
    path = cache / "fp8moe-kernels.tar" if writable else Path("fp8moe-kernels.tar")
    command = f"FP8MOE_CACHE_DIR=$(mktemp -d) fp8moe-warmup bundle --bundle {path}"
    assert f"Run `{command}`, and serve with FP8MOE_BUNDLE={path}.\n" in capsys.readouterr().out
    (tmp_path / "new").mkdir(mode=0o700)
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=tmp_path / "new")
    assert main(["bundle", "--bundle", str(path)]) == 0
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=cache, FP8MOE_BUNDLE=path)
    assert main(["verify"]) == 0


def test_verify_with_a_bundle_looks_at_nothing_else(
    full_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "kernels.tar"
    write_bundle(bundle, {})
    set_variables(monkeypatch, FP8MOE_BUNDLE=bundle)
    for arguments in (["verify"], ["verify", "--bundle", str(bundle)]):
        assert main(arguments) == 1
        printed = capsys.readouterr().out
        assert f"missing combine: {bundle} does not contain it" in printed
        assert f"Run `fp8moe-warmup bundle --bundle {bundle}`." in printed
    assert main(["verify", "--bundle", str(tmp_path / "none.tar")]) == 1
    assert "none.tar cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_bundle_for_other_gpus_is_not_only_to_be_replaced(
    full_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "kernels.tar"
    assert main(["bundle", "--bundle", str(bundle)]) == 0
    capsys.readouterr()
    assert main(["verify", "--bundle", str(bundle), "--gpu", "sm89"]) == 1
    remedy = f"Run `fp8moe-warmup bundle --gpu sm89 --bundle {bundle}` to replace it, or verify it without --gpu."
    assert remedy in capsys.readouterr().out


def test_a_full_cache_need_not_be_writable(full_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.cache, "require_usable", lambda: pytest.fail("wants to write"))
    assert main([]) == 0


@pytest.mark.parametrize("shell", ["{} list | head -1", "{} list > /dev/full"])
def test_an_output_that_closes_or_fails_costs_no_traceback(cache: Path, shell: str) -> None:
    line = shell.format(f"{sys.executable} -m warmup")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_name_that_is_no_text_is_reported(cache: Path, tmp_path: Path) -> None:
    assert main(["--model", "/tmp/\udcff", "--json", str(tmp_path / "report.json")]) == 1
    assert "udcff" in json.loads((tmp_path / "report.json").read_text())["error"]


@pytest.mark.parametrize("arguments", [[], ["list"], ["verify"], ["explain"], ["doctor"], ["bundle"]])
def test_every_command_writes_a_report_of_one_schema(
    full_cache: Path, tmp_path: Path, checkpoint: Folder, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main([*arguments, "--model", str(checkpoint("DeepSeek-V3")), "--json", "report.json"])
    report = Report.model_validate_json((tmp_path / "report.json").read_text())
    assert report.schema_version == 1
    assert report.command == (arguments or ["compile"])[0]
    assert report.model
    assert report.model.experts == 256
    assert report.error is None


def test_a_failure_is_in_the_report_too(cache: Path, tmp_path: Path) -> None:
    assert main(["--model", "/nonexistent", "--json", str(tmp_path / "report.json")]) == 1
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["error"].startswith("'/nonexistent' is neither a folder nor the id of a model on the hub")


def test_a_file_in_place_of_a_folder_is_refused_as_such(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert main(["list", "--model", str(config)]) == 1
    assert "is a file. Give the folder that contains the checkpoint's config.json." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "0"], "argument --tp/-tp/--tensor-parallel-size: '0' is not a number from 1 to"),
        (["--tp", "x"], "'x' is not a number from 1 to"),
        (["--tp", "2", "--ep", "8"], "--ep 8 contradicts --tp 2 --dp 1: vLLM distributes the experts over all 2 ranks"),
        (["--tp-size", "8", "--ep-size", "3"], "--tp-size 8 is not a multiple of --ep-size 3"),
        (["--ep-size", "4"], "--tp-size 1, the default, is not a multiple of --ep-size 4"),
        (["explain", "--model", "m", "--tokens", "5", "--cudagraph-capture-sizes", "8"], "not both"),
        (["explain", "--model", "m", "--tokens", *["5"] * 1025], "--tokens accepts at most 1024 sizes, not 1025"),
        (["--tp-size", "8", "--dp-size", "3", "--enable-dp-attention"], "--tp-size 8 is not a multiple of --dp-size 3"),
        (["--tp-size", "8192"], "--tp-size 8192 needs more than 4096 GPUs"),
        (
            ["--tp", "8", "--ep-size", "8"],
            "either the options of vllm serve or those of sglang.launch_server, not both",
        ),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["explain"], "explain needs a --model"),
        (["--model", ""], "compile needs a --model"),
        (["--json", "/nonexistent/report.json"], "'/nonexistent/report.json' cannot be written"),
        (["--json", "/tmp"], "'/tmp' cannot be written"),
        (["bundle", "--bundle", ""], "'.' cannot be written"),
        (["bundle", "--bundle", ".."], "'..' cannot be written"),
        (["--tp", "4096", "--dp", "2"], "--tp 4096 --dp 2 needs more than 4096 GPUs"),
        (["compare", "--model", "m", "--plot", "x.pdf"], "argument --plot: 'x.pdf' is neither a .png nor an .svg file"),
        (["verify", "--plot", "x.svg"], "unrecognized arguments: --plot x.svg"),
        (["doctor", "--tokens", "5"], "unrecognized arguments: --tokens 5"),
        (["doctor", "--dry-run"], "unrecognized arguments: --dry-run"),
        (["list", "--bundle", "x.tar"], "unrecognized arguments: --bundle x.tar"),
        (
            ["explain", "--model", "m", "--tp", "8", "--chunked-prefill-size", "512"],
            "--tp and --chunked-prefill-size: use either",
        ),
        (["explain", "--model", "m", "--max-model-len", "512"], "--max-model-len needs a --gpu"),
        (["--revision", "main"], "--revision needs a --model"),
        (["bundle", "--download-dir", "d"], "--download-dir needs a --model"),
        (["--quantization", "fp8"], "argument --quantization/-q: invalid choice: 'fp8' (choose from"),
        (["explain", "--model", "m", "--gpu", "h100", "--gpus", "17"], "17 is more than 16"),
        (
            ["explain", "--model", "m", "--gpu", "h100", "--gpu-memory-utilization", "92"],
            "'92' is not a number above 0 and up to 1",
        ),
        (["explain", "--model", "m", "--gpu", "b200"], "invalid choice: 'b200'"),
        (["explain", "--model", "m", "--gpu", "h200", "--gpus", "12"], "12 GPUs are neither one node of up to 8 nor"),
        (
            ["explain", "--model", "m", "--gpu", "h200", "--gpus", "16", "--tp", "8"],
            "--gpus 16 contradicts --tp 8, which",
        ),
        (["explain", "--modle", "m"], "--modle m. See fp8moe-warmup explain --help"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_checkpoint_that_is_not_fp8_costs_a_warning(
    full_cache: Path, checkpoint: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(checkpoint("Mixtral-8x7B-Instruct-v0.1"))]) == 0
    assert "warning: the checkpoint is not FP8: --quantization fp8moe quantizes it" in capsys.readouterr().err


def test_explain_shows_what_one_gpu_holds(
    checkpoint: Folder, capsys: pytest.CaptureFixture[str], tmp_path: Path, cache: Path
) -> None:
    json_file = tmp_path / "report.json"
    assert main(["explain", "--model", str(checkpoint("DeepSeek-V3")), "--tp", "8", "--json", str(json_file)]) == 0
    found = Report.model_validate_json(json_file.read_text()).explain
    assert found
    shapes = {shape.name: (shape.layers, shape.shape) for shape in found.shapes}
    assert shapes["experts.w13"] == (59, [256, 512, 7168])  # 58 layers, and one for multi-token prediction
    assert shapes["experts.w2"] == (59, [256, 7168, 256])
    assert shapes["self_attn.o_proj"] == (62, [7168, 2048])
    experts = 59 * 256 * 3 * 256 * 7168
    assert sum(s.bytes for s in found.shapes if s.name.startswith("experts")) == experts + experts // 4096
    steps = {step.tokens: step for step in found.steps}
    kernels = [steps[tokens].kernel for tokens in (1, 16, 32, 8192)]
    assert kernels == ["down_small_batch", "down_small_batch", "grouped_gemm_few_rows", "grouped_gemm"]
    assert steps[1].padding == pytest.approx(1 - 1 / 8, abs=0.01)  # one row in a tile of 8
    assert steps[16].padding > 0.9  # one or two rows in a tile of 16
    assert steps[8192].rows_per_expert == 256
    assert found.padding_bytes == 0
    printed = capsys.readouterr().out
    assert "of it padding" not in printed
    for tokens, tile_rows, gemms in (
        (16, 16, "gate_up_small_batch, down_small_batch"),
        (32, 64, "gate_up_few_rows, grouped_gemm_few_rows"),
        (8192, 128, "gate_up, grouped_gemm"),
    ):
        assert re.search(rf"^ +{tokens} .* {tile_rows}  {gemms}$", printed, re.MULTILINE)


def test_explain_shows_the_steps_that_are_asked_for(checkpoint: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", str(checkpoint("DeepSeek-V3")), "--tokens", "12", "700"]) == 0
    shown = re.findall(r"^ +(\d+) +\d+\.\d\d +", capsys.readouterr().out, re.MULTILINE)
    assert shown == ["12", "700", "8192"]  # the last one is the longest step


def test_the_parts_of_dp_attention_share_sglangs_longest_step(
    checkpoint: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    split = ["--tp-size", "8", "--dp-size", "8", "--enable-dp-attention", "--ep-size", "8"]
    assert main(["explain", "--model", str(checkpoint("DeepSeek-V3")), *split, "--chunked-prefill-size", "8192"]) == 0
    assert "of scratch in a step of 1024 tokens" in capsys.readouterr().out


# Channels of each expert on a rank, an equal share, and the relative difference.
PADDED = {
    ("Qwen3-30B-A3B-FP8", 4): (256, 192, 0.333),
    ("Qwen3-30B-A3B-FP8", 8): (128, 96, 0.333),
    ("Qwen3-Coder-480B-A35B-Instruct-FP8", 8): (384, 320, 0.2),
    ("ERNIE-4.5-300B-A47B-PT", 8): (512, 448, 0.143),
    ("MiniMax-M2.7", 8): (256, 192, 0.333),
    ("Qwen3.8-Flash-Next-FP8", 8): (128, 80, 0.6),
    ("Step-3.5-Flash-FP8", 8): (256, 160, 0.6),
    ("GLM-4.5-Air", 4): (384, 352, 0.091),
    ("GLM-4.5-Air", 8): (256, 176, 0.455),
}


@pytest.mark.parametrize(("name", "tp"), PADDED)
def test_explain_shows_what_whole_scale_blocks_cost(
    checkpoint: Folder,
    models: dict[str, Model],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    cache: Path,
    name: str,
    tp: int,
) -> None:
    json_file, (channels, share, overhead) = tmp_path / "report.json", PADDED[name, tp]
    assert main(["explain", "--model", str(checkpoint(name)), "--tp", str(tp), "--json", str(json_file)]) == 0
    found = Report.model_validate_json(json_file.read_text()).explain
    assert found
    e, shapes = models[name].experts, {shape.name: shape for shape in found.shapes}
    assert shapes["experts.w2"].shape == [e.experts, e.hidden, channels]
    w2 = e.layers * e.experts * e.hidden * (channels - share) * (1 + 4 / 128**2)
    assert shapes["experts.w2"].padding_bytes == pytest.approx(w2)
    assert shapes["experts.w13"].padding_bytes == pytest.approx(2 * w2)
    assert found.padding_bytes == sum(shape.padding_bytes for shape in found.shapes)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("experts.")]
    assert all(line.endswith(f" of it padding to whole scale blocks (+{overhead:.1%})") for line in lines)
    assert len(lines) == 2


def test_explain_knows_the_options_of_sglang(
    checkpoint: Folder, capsys: pytest.CaptureFixture[str], tmp_path: Path, cache: Path
) -> None:
    """`--ep-size` may be a part of the ranks, which then share experts; DP attention divides those of attention."""
    json_file = tmp_path / "report.json"
    model = ["explain", "--model", str(checkpoint("Qwen3-235B-A22B-FP8")), "--json", str(json_file)]
    split = ["--tp-size", "8", "--ep-size", "4", "--dp-size", "2", "--enable-dp-attention"]
    assert main([*model, *split, "--chunked-prefill-size", "512", "--cuda-graph-bs-decode", "4"]) == 0
    found = Report.model_validate_json(json_file.read_text()).explain
    assert found
    shapes = {shape.name: shape.shape for shape in found.shapes}
    assert shapes["experts.w2"] == [32, 4096, 768]  # 128 experts and 1536 channels
    assert shapes["self_attn.o_proj"] == [4096, 2048]  # 8192 channels over 4 ranks
    assert [step.tokens for step in found.steps] == [4, 256]  # of 512, shared by two parts
    assert found.parallel == "--tp-size 8 --dp-size 2 --enable-dp-attention --ep-size 4"
    assert all(layout.options.startswith("--tp-size 8") for layout in found.layouts)
    assert "One GPU of --tp-size 8 --dp-size 2" in capsys.readouterr().out


def test_doctor_finds_nothing_wrong_where_a_bundle_does(
    full_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(tmp_path / "kernels.tar")
    assert main(["bundle", "--bundle", bundle]) == 0
    set_variables(monkeypatch, FP8MOE_BUNDLE=bundle, FP8MOE_JIT="forbid", FP8MOE_CACHE_DIR="~nosuchuser/x")
    assert main(["doctor"]) == 0
    assert "cache: not needed, because all kernels are available; the home folder is unknown" in capsys.readouterr().out
    assert main(["list"]) == 0


def test_doctor_tells_what_is_wrong(
    cache: Path, checkpoint: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = ["--model", str(checkpoint("DeepSeek-V3"))]
    assert main(["doctor", *model]) == 0
    assert f"cache: {cache}, does not exist yet" in capsys.readouterr().out
    assert not cache.exists()
    set_variables(monkeypatch, FP8MOE_JIT="forbid", FP8MOE_BUNDLE=tmp_path / "none.tar")
    cache.mkdir(mode=0o755)
    cache.chmod(0o775)
    assert main(["doctor", "--tp", "3", *model]) == 1
    printed = capsys.readouterr().out
    assert f"WRONG  cache: {cache}, mode 0775, 0 kernels, 0.00 MB; not used: its mode 0775 lets other users" in printed
    assert f"WRONG  bundle: the bundle {tmp_path}/none.tar cannot be read: No such file or directory" in printed
    assert "WRONG  model: --tp 3 is not supported" in printed
    assert f"WRONG  kernels: 0 of {OF_A_MODEL} are available; first missing: " in printed
    assert "FP8MOE_JIT=forbid refuses to start" in printed
    for folder, found in {"/dev/null": "it is not a folder", "/dev/null/x": "Not a directory"}.items():
        set_variables(monkeypatch, FP8MOE_CACHE_DIR=folder)
        assert main(["doctor"]) == 1
        assert re.search(rf"WRONG  cache: {folder}.*{found}", capsys.readouterr().out)
    set_variables(monkeypatch, FP8MOE_CACHE_DIR="/" + "x" * 300)
    assert main(["doctor"]) == 1
    set_variables(monkeypatch, FP8MOE_JIT="maybe")
    assert main(["doctor"]) == 1
    assert "WRONG  settings: FP8MOE_JIT is 'maybe'" in capsys.readouterr().out
    forget()
