"""`explain --gpu`: which splits fit, what they hold, and which is best. Sizes are counted by hand where possible."""

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.checkpoints.synthetic import PRESETS, config
from fp8moe_plugin import terminal
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.checkpoint.splits import split_refusal
from warmup import choose, memory
from warmup.__main__ import main
from warmup.commands import commands
from warmup.options import parse
from warmup.report import ChoiceReport, Report
from warmup.target import GPUS, Target

TP_16 = {"--tp 16", "--tp 16 --ep 16"}
NOT_SUPPORTED = {  # of the splits of 1 to 16 GPUs
    "DeepSeek-V4-Flash": TP_16,
    "DeepSeek-V4-Flash-FP8": TP_16,
    "Llama-4-Scout-17B-16E-Instruct": TP_16,
    "MiMo-V2-Flash": {f"--tp {tp}{more}" for tp in (4, 8, 16) for more in ("", f" --ep {tp}")}
    | {"--tp 8 --pp 2", "--tp 8 --dp 2 --ep 16"},
    "Mixtral-8x7B-Instruct-v0.1": {"--tp 16 --ep 16", "--tp 8 --dp 2 --ep 16", "--tp 1 --dp 16 --ep 16"},
    "Qwen3.8-Flash-Next-FP8": TP_16,
}
ROOT = Path(__file__).parents[2]


def chosen(model: Model, gpu: str = "h200", sglang: bool = False, **target: object) -> ChoiceReport:
    given = {"gpus": None, "utilization": 0.92, "fp8_cache": False, "max_model_len": 8192, "max_tokens": 8192}
    return choose.choose(model, Target(gpu=gpu, sglang=sglang, **(given | target)), "org/model")


@pytest.mark.parametrize(
    ("name", "shares", "best"),
    [
        ("Qwen3.8-Flash-Next-FP8", {1: 0.6, 4: 0.2, 8: 0}, "--tp 8 --ep 8"),
        ("Step-3.5-Flash-FP8", {1: 0.6, 2: 0.2, 4: 0, 8: 0}, "--tp 8 --ep 4"),
        ("MiniMax-M2.7", {1: 0.333, 2: 0, 8: 0}, "--tp 8 --ep 2"),
    ],
)
def test_shares_that_are_no_whole_blocks_cost_bytes_of_a_step(
    models: dict[str, Model], name: str, shares: dict[int, float], best: str
) -> None:
    """Of 8 GPUs; by the number of groups that the experts are divided among, their padding."""
    found, e = chosen(models[name], gpus=8), memory.without_mtp(models[name]).experts
    splits = {split.options: split for split in found.splits}
    ways = {f"--tp 8 --ep {ep}" if ep > 1 else "--tp 8": padding for ep, padding in shares.items()}
    assert {options: split.padding for options, split in splits.items()} == ways | {"--tp 1 --dp 8 --ep 8": 0}
    assert found.batches == [best]
    assert found.latency == "--tp 8"
    padded, chances = splits["--tp 8"], 1 - (1 - e.topk / e.experts) ** 64
    expert = e.layers * 3 * e.hidden * e.intermediate / 8 * (1 + padded.padding) * (1 + 4 / 128**2)
    more = (padded.step_bytes or 0) - (padded.read_bytes or 0)
    assert more == pytest.approx(expert * (chances * e.experts - e.topk), rel=0.01)
    text = choose.text(found)
    assert f"Best for 64 sequences: {best}" in text
    assert ("(SGLang)" in text) == (best != "--tp 8 --ep 8")
    assert "not measured" in text


def test_splits_without_padding_need_no_advice_about_it(models: dict[str, Model]) -> None:
    assert chosen(models["DeepSeek-V3"]).batches == []
    assert "64 sequences" not in choose.text(chosen(models["DeepSeek-V3"]))


def test_every_model_is_explained_for_every_split(models: dict[str, Model]) -> None:
    for name, model in models.items():
        found = chosen(model)
        assert {split.options for split in found.splits if split.refusal} == NOT_SUPPORTED.get(name, set()), name
        assert choose.text(found)


@pytest.mark.parametrize(
    ("name", "way", "fp8", "expected"),
    [
        ("DeepSeek-V3", Parallel(1), False, 61 * 576 * 2),
        ("DeepSeek-V3", Parallel(8), False, 61 * 576 * 2),  # one vector, whole on every rank
        ("DeepSeek-V3", Parallel(8, pp=2), True, 31 * 576),
        # vLLM on an H200: 2 layers, 4 GiB of cache, "GPU KV cache size: 1,672,448 tokens"
        ("DeepSeek-V3.2-Exp", Parallel(1), False, 61 * ((4 << 30) // 1_672_448) // 2),
        ("DeepSeek-V3.2-Exp", Parallel(1), True, 61 * (656 + 132)),
        ("Qwen3-235B-A22B-FP8", Parallel(2), False, 94 * 2 * 2 * 128 * 2),
        ("Qwen3-235B-A22B-FP8", Parallel(8), True, 94 * 2 * 1 * 128),  # 4 heads for 8 ranks
    ],
)
def test_the_bytes_of_a_token_in_the_cache(
    models: dict[str, Model], name: str, way: Parallel, fp8: bool, expected: int
) -> None:
    assert memory.cache_bytes(models[name], way, fp8) == expected


def test_the_cache_that_vllm_reported_is_expected_within_one_percent(tmp_path: Path) -> None:
    measured = json.loads((ROOT / "benchmarks/results/cache_size-2026-11-25.json").read_text())
    shapes = {
        "qwen3-4layer": replace(PRESETS["qwen3_moe", "qwen3-24layer"], moe_layers=4),
        "dsv3-2layer": replace(PRESETS["deepseek_v3", "dsv3-3layer"], moe_layers=1, experts=64),
    }
    assert len(measured["points"]) == 4
    for point in measured["points"]:
        (tmp_path / "config.json").write_text(json.dumps(config(shapes[point["model"]], fp8=True)))
        setting = measured["settings"][point["setting"]]
        (split,) = chosen(
            read_model(tmp_path),
            gpus=1,
            utilization=setting["gpu_memory_utilization"],
            fp8_cache="kv_cache_dtype" in setting,
            max_model_len=setting["max_model_len"],
            max_tokens=setting["max_num_batched_tokens"],
        ).splits
        assert split.cache_tokens == point["explain"]
        assert split.cache_tokens == pytest.approx(point["vllm"], rel=0.01)


def test_weights_that_are_not_fp8_count_twice(models: dict[str, Model]) -> None:
    shapes = {shape.name: shape for shape in memory.weight_shapes(models["DeepSeek-V3"], Parallel(8))}
    assert shapes["mlp.gate (BF16)"].bytes == 59 * 256 * 7168 * 2
    assert shapes["MLA's W_UK, W_UV (BF16)"].bytes == 62 * 128 // 8 * 256 * 512 * 2


def test_deepseek_v3_needs_eight_h200s_and_sixteen_h100s(models: dict[str, Model]) -> None:
    found = chosen(models["DeepSeek-V3"])
    assert min(split.gpus for split in found.splits if split.fits) == 8
    assert found.latency == "--tp 8"
    assert found.throughput == "--tp 1 --dp 16 --ep 16"
    assert {split.gpus for split in chosen(models["DeepSeek-V3"], "h100").splits if split.fits} == {16}
    assert found.mtp_bytes == pytest.approx(11.5e9, rel=0.01)


def test_where_nothing_fits_there_is_no_best_one(models: dict[str, Model]) -> None:
    found = chosen(models["DeepSeek-V3"], "h100", gpus=8)
    assert not any(split.fits for split in found.splits)
    assert (found.latency, found.throughput) == (None, None)
    assert "None of these splits fits: the weights leave no room" in choose.text(found)


def test_advice_is_what_can_help(models: dict[str, Model]) -> None:
    whole = " ".join(choose.text(chosen(models["DeepSeek-V3"], "h100", gpus=8)).split())
    assert "leave no room for a KV cache. Take 16 GPUs." in whole
    assert "--max-model-len" not in whole
    long = chosen(models["Qwen3-30B-A3B-FP8"], "h100", gpus=1, max_model_len=2**20)
    tokens = long.splits[0].cache_tokens
    would = f"It does not fit: sequences of up to {tokens:,} tokens would fit with --tp 1 --max-model-len {tokens}."
    would += " Take this length, 2 GPUs or --kv-cache-dtype fp8."
    assert would in choose.text(long)
    assert chosen(models["Qwen3-30B-A3B-FP8"], "h100", gpus=1, max_model_len=tokens).latency == "--tp 1"
    long.fp8_cache = True
    assert "Take this length or 2 GPUs." in choose.text(long)
    many = chosen(models["DeepSeek-V3"], "h100", utilization=0.3)
    assert many.needed is None
    assert "Take more than 16 GPUs, the most that are considered." in choose.text(many)


def test_throughput_is_judged_by_tokens(models: dict[str, Model]) -> None:
    """Sequences of the longest length are too few to tell splits apart: often one."""
    found = chosen(models["Kimi-K2-Instruct"], gpus=16, max_model_len=131072)
    best = max(found.splits, key=lambda split: split.cache_tokens)
    assert found.throughput == best.options
    assert f"Its KV cache holds {best.cache_tokens // 16:,} tokens for each GPU, the most" in choose.text(found)
    few = chosen(models["Kimi-K2-Instruct"], gpus=16, max_model_len=best.longest)
    assert few.throughput == best.options


def test_a_model_that_no_split_serves(models: dict[str, Model]) -> None:
    found = chosen(models["Hunyuan-A13B-Instruct"], gpus=7, sglang=True)  # 64 experts
    assert all(split.refusal for split in found.splits)
    assert choose.text(found).endswith("\nThe model cannot be split over so many GPUs.")


def test_a_split_over_nodes_says_that_their_network_is_not_counted(models: dict[str, Model]) -> None:
    caveat = "The network between nodes is not counted"
    assert caveat in " ".join(choose.text(chosen(models["DeepSeek-V3"], "h100", gpus=16)).split())
    assert caveat not in " ".join(choose.text(chosen(models["DeepSeek-V3"])).split())


def test_the_split_that_is_given_is_the_one_that_is_judged(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["explain", "--model", str(checkpoint("DeepSeek-V3")), "--max-model-len", "8192"]
    assert main([*arguments, "--gpu", "H200", "--tp", "8", "--dp", "2"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[:5] for line in printed.splitlines() if re.match(r" +\d+  --tp", line)] == [
        ["16", "--tp", "8", "--dp", "2"]
    ]
    assert "It fits:\n  vllm serve" in printed
    assert "--data-parallel-size 2" in printed
    assert main([*arguments, "--gpu", "h100", "--tp", "8"]) == 1
    assert "It does not fit: the weights leave no room" in capsys.readouterr().out


def test_a_split_fits_if_the_cache_holds_a_sequence(models: dict[str, Model]) -> None:
    one = chosen(models["Qwen3-30B-A3B-FP8"], "h100", gpus=1).splits[0]
    assert one.fits
    assert one.sequences == one.cache_tokens // 8192
    longest = {"gpus": 1, "max_model_len": one.cache_tokens + 1}
    assert not chosen(models["Qwen3-30B-A3B-FP8"], "h100", **longest).splits[0].fits


def test_the_budget_is_spent(models: dict[str, Model]) -> None:
    model, way = memory.without_mtp(models["DeepSeek-V3"]), Parallel(8)
    split = next(split for split in chosen(model).splits if split.options == "--tp 8")
    step = memory.step_bytes(model, way, 8192, split.scratch_bytes or 0)
    spent = (split.weight_bytes or 0) + step + split.cache_tokens * memory.cache_bytes(model, way, False)
    assert 0 <= GPUS["h200"].memory_bytes * 0.92 - spent < memory.cache_bytes(model, way, False)


def test_stages_are_read_one_after_another(models: dict[str, Model]) -> None:
    splits = {split.options: split for split in chosen(models["DeepSeek-V3"]).splits}
    one, two = splits["--tp 8"], splits["--tp 8 --pp 2"]
    assert (two.weight_bytes or 0) < 0.55 * (one.weight_bytes or 0)
    assert two.read_bytes == pytest.approx(one.read_bytes, rel=0.1)


def test_experts_that_ranks_do_not_divide(models: dict[str, Model]) -> None:
    """vLLM gives some ranks one more, SGLang refuses."""
    mixtral = models["Hunyuan-A13B-Instruct"]  # 64 experts
    assert split_refusal(mixtral, Parallel(1, 3, 3)) is None
    assert split_refusal(mixtral, Parallel(1, 3, 3, sglang=True)) == (
        "3 ranks cannot share 64 experts equally, which SGLang requires"
    )
    (split,) = (split for split in chosen(mixtral, gpus=3).splits if split.options == "--tp 1 --dp 3 --ep 3")
    assert split.vllm
    assert choose._commands(split)[1] == "  (SGLang has no such split)"
    found = chosen(mixtral, gpus=3)
    assert [split.uneven for split in found.splits if not split.refusal] == [True]
    assert "vLLM gives some of them one more" in choose.text(found)


def test_ranks_that_share_experts_in_groups(models: dict[str, Model]) -> None:
    """SGLang's --ep-size may be any divisor; vLLM has no such split."""
    split = Parallel(8, ep=4, sglang=True)
    (found,) = chosen(models["DeepSeek-V3"], sglang=True, split=split).splits
    assert found.fits
    assert choose._commands(found)[0] == "  (vLLM has no such split)"
    assert "--ep-size 4" in found.sglang


def test_mlps_under_dp_attention(models: dict[str, Model]) -> None:
    """SGLang splits them over all ranks, and attention over those of a part; vLLM's replicas hold them as a whole."""

    def rows(way: Parallel) -> dict[str, int]:
        return {shape.name: shape.shape[0] for shape in memory.weight_shapes(models["DeepSeek-V3"], way)}

    dense, shared, q = "mlp.gate_up_proj", "mlp.shared_experts.gate_up_proj", "self_attn.q_b_proj"
    found = rows(Parallel(2, 4, 8, sglang=True))
    assert (found[dense], found[shared], found[q]) == (2 * 18432 // 8, 2 * 2048 // 8, 24576 // 2)
    assert found["embeddings (BF16)"] == 129280 + 129280 // 8
    found = rows(Parallel(2, 4, 8, sglang=True, dense_tp1=True))
    assert (found[dense], found[shared]) == (2 * 18432, 2 * 2048 // 8)
    found = rows(Parallel(2, 4, 8))
    assert (found[dense], found[shared], found[q]) == (2 * 18432 // 2, 2 * 2048, 24576 // 2)
    assert rows(Parallel(1, 8, 8))[dense] == 2 * 18432


def test_the_commands_are_complete() -> None:
    target = Target("h200", None, 0.9, True, 32768, 8192)
    vllm, sglang = commands(Parallel(8, 2, 16), target, "a model", remote_code=True)
    assert vllm == (
        "vllm serve 'a model' --quantization fp8moe --tensor-parallel-size 8 --data-parallel-size 2 "
        "--enable-expert-parallel --gpu-memory-utilization 0.9 --data-parallel-size-local 1 "
        "--data-parallel-start-rank RANK --data-parallel-address ADDRESS --kv-cache-dtype fp8 --max-model-len 32768 "
        "--trust-remote-code"
    )
    assert sglang == (
        "python -m sglang.launch_server --model-path 'a model' --quantization fp8moe --tp-size 16 --dp-size 2 "
        "--enable-dp-attention --ep-size 16 --nnodes 2 --node-rank RANK --dist-init-addr ADDRESS:20000 "
        "--kv-cache-dtype fp8_e4m3 --context-length 32768 --trust-remote-code"
    )


@pytest.mark.parametrize(
    ("way", "vllm_tokens", "sglang_tokens"),
    [(Parallel(8), 2048, 2048), (Parallel(2, 4, 8), 2048, 8192), (Parallel(2, 4, 8, sglang=True), 512, 2048)],
)
def test_the_commands_have_the_step_for_which_the_split_fits(
    way: Parallel, vllm_tokens: int, sglang_tokens: int
) -> None:
    """The memory of a longer step, as by default, may leave no KV cache."""
    target = Target("h200", None, 0.9, False, None, 2048, sglang=way.sglang)
    vllm, sglang = commands(way, target, "model")
    assert vllm.endswith(f" --max-num-batched-tokens {vllm_tokens}")
    assert sglang.endswith(f" --chunked-prefill-size {sglang_tokens}")


@pytest.mark.parametrize("auto_map", [None, {"AutoConfig": "configuration_kimi.KimiConfig"}])
def test_code_of_a_checkpoint_is_in_the_commands(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, auto_map: dict | None
) -> None:
    config = json.loads((checkpoint("Kimi-K2-Instruct") / "config.json").read_text()) | {"auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["explain", "--model", str(tmp_path), "--gpu", "h200", "--tp", "16", "--max-model-len", "8192"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    commands = [line for line in printed.splitlines() if re.match("  (vllm|python) ", line)]
    assert len(commands) == 2
    assert all(command.endswith(" --trust-remote-code") == bool(auto_map) for command in commands)
    assert ("runs code of the checkpoint (auto_map in config.json): read it first." in printed) == bool(auto_map)


@pytest.mark.parametrize(
    "options", ["", "--moe-dense-tp-size 1", "--tp-size 8 --dp-size 8 --enable-dp-attention --moe-dense-tp-size 1"]
)
def test_tables_fit_80_columns_of_a_terminal(
    checkpoint: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
) -> None:
    monkeypatch.setattr(terminal.shutil, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    for name in ("DeepSeek-V3", "Qwen3-235B-A22B-FP8"):
        arguments = ["explain", "--model", str(checkpoint(name)), "--gpu", "h100", *options.split()]
        fits = main([*arguments, "--json", str(tmp_path / "report.json")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if len(line) > 80 and not re.match("  (vllm|python) ", line)] == []
        report = Report.model_validate_json((tmp_path / "report.json").read_text())
        assert report.explain
        assert report.explain.choice
        assert fits == any(split.fits for split in report.explain.choice.splits)
        assert len(report.explain.choice.splits) == len([line for line in lines if re.match(r" +\d+  --tp", line)])


def test_the_options_of_a_split_are_those_of_the_warm_up() -> None:
    for sglang in (False, True):
        for way in choose.ways(None, sglang, dense_tp1=False):
            assert parse(str(way).split()).parallel == way
