"""Perplexities and their differences from the answers of engines; tests/engine/test_small_moe.py runs engines."""

import json

import pytest
import torch

from benchmarks.accuracy import perplexity
from benchmarks.accuracy.perplexity import Difference, difference, main, summarize
from benchmarks.checkpoints.tokenizer import write_tokenizer

WINDOWS, WINDOW = 50, 9
TRITON, DEEP_GEMM = perplexity.BUILT_IN


def losses(above: float = 0.0, noise: float = 0.0) -> torch.Tensor:
    """Losses that are `above` those of BF16, plus noise; BF16's own differ widely from token to token."""
    generator = torch.Generator().manual_seed(0)
    bf16 = 3 + torch.randn(WINDOWS, WINDOW - 1, generator=generator)
    off = torch.randn(bf16.shape, generator=generator)
    return bf16 + above + noise * (off - off.mean())


def answer(above: float = 0.0, noise: float = 0.0) -> dict[str, object]:
    return {"losses": losses(above, noise).tolist(), "ready_s": 1.0, "reading_s": 2.0}


@pytest.fixture
def summary():
    """Creates a report from the answers of engines, by name."""

    def summary(**found):
        report = perplexity.PerplexityReport(
            vllm="0", fp8moe_plugin="0", checkpoint={}, text_sha256="", windows=WINDOWS, window_tokens=WINDOW,
            tokens=WINDOWS * (WINDOW - 1), unigram_perplexity=300, max_num_batched_tokens=8,
        )  # fmt: skip
        names = {"bf16": "bf16", "ours": perplexity.OURS, "triton": TRITON, "deep_gemm": DEEP_GEMM}
        summarize(report, {names[name]: found for name, found in found.items()})
        return report

    return summary


def test_a_difference_is_that_of_perplexities_and_its_interval_is_paired():
    """Windows differ by far more than the two engines do on any of them."""
    ours, bf16 = (x.double().mean(1) for x in (losses(0.002, 0.01), losses()))
    found = difference(ours, bf16)
    assert found.percent == pytest.approx(100 * (ours.mean() - bf16.mean()).expm1().item(), abs=1e-3)
    factor = 1 + found.percent / 100
    spread = 100 * factor * (ours - bf16).std().item() / WINDOWS**0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.1)
    assert found.high - found.low < 0.1 * 100 * bf16.std().item() / WINDOWS**0.5
    assert found.low < found.percent < found.high


def test_no_difference_is_none():
    means = losses().double().mean(1)
    assert difference(means, means) == Difference(percent=0, low=0, high=0)


@pytest.mark.parametrize(("above", "wrong"), [(0.004, 0), (-0.004, 0), (0.006, 1), (-0.006, 1)])
def test_ours_must_be_within_half_a_percent_of_bf16(summary, above, wrong):
    report = summary(bf16=answer(), ours=answer(above))
    assert len(report.faults) == wrong
    assert all("more than 0.5%" in fault for fault in report.faults)


@pytest.mark.parametrize(("above", "wrong"), [(0.002, 1), (0.0, 0), (-0.002, 0)])
def test_ours_must_not_be_worse_than_either_of_vllms_own(summary, above, wrong):
    for name in ("triton", "deep_gemm"):
        report = summary(**{"bf16": answer(), "ours": answer(above, noise=0.01), name: answer(noise=0.005)})
        assert len(report.faults) == wrong
        assert all("is worse than" in fault for fault in report.faults)


def test_worse_by_less_than_chance_is_said_but_no_fault(summary):
    report = summary(bf16=answer(), ours=answer(0.001, noise=0.2), triton=answer())
    off = report.ours_against_built_in[TRITON]
    assert off.low < 0 < off.percent
    assert report.faults == []


def test_an_engine_that_fails_is_a_fault_and_the_others_are_compared(summary):
    report = summary(bf16=answer(), ours=answer(), triton={"error": "no memory"}, deep_gemm=answer(0.01))
    assert report.faults == [f"{TRITON} failed: no memory"]
    assert list(report.ours_against_built_in) == [DEEP_GEMM]
    assert report.engines[DEEP_GEMM].against_bf16.percent == pytest.approx(1.005, abs=1e-3)
    assert summary(bf16={"error": "no memory"}, ours=answer()).engines[perplexity.OURS].against_bf16 is None


def test_ours_alone_is_a_fault(summary):
    assert summary(ours=answer()).faults == [
        f"fp8moe is not compared with anything, neither bf16 nor {TRITON}, {DEEP_GEMM}"
    ]
    assert summary(ours=answer(), triton=answer()).faults == []


@pytest.fixture
def model(tmp_path):
    write_tokenizer(tmp_path, 258)
    (tmp_path / "config.json").write_text('{"vocab_size": 258}')
    (tmp_path / "held_out.txt").write_text("ab" * 500)
    return tmp_path


@pytest.mark.parametrize(("above", "status"), [(0.001, 0), (0.1, 1)])
def test_the_exit_status_and_the_report(model, monkeypatch, capsys, above, status):
    said = {"bf16": answer(), "fp8moe": answer(above), "triton default": answer(0.2)}
    monkeypatch.setattr(perplexity, "ask", lambda _, name: said[name])
    out = model / "report.json"
    options = ["--model", model, "--twin", model, "--window", WINDOW, "--windows", WINDOWS, "--out", out]
    assert main([*map(str, options), "--engines", ",".join(said)]) == status
    report = json.loads(out.read_text())
    assert report["tokens"] == WINDOWS * (WINDOW - 1)
    assert report["unigram_perplexity"] == pytest.approx(2, abs=0.01)
    printed = capsys.readouterr().out
    assert ("fault: fp8moe is +10" in printed) == bool(report["faults"]) == bool(status)
    off = Difference(**report["ours_against_built_in"][TRITON])
    assert off.percent == pytest.approx(100 * torch.tensor(above - 0.2).expm1().item(), abs=1e-3)
    assert f"fp8moe against {TRITON}: {off}" in printed
