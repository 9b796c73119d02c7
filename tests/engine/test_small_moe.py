"""The checkpoint of the small DeepSeek-V3 in vLLM: what its tokens cost there is what they cost its PyTorch model."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.accuracy import perplexity
from benchmarks.checkpoints import small_moe
from benchmarks.checkpoints.small_moe import SmallMoE
from benchmarks.checkpoints.synthetic import draw, tensors
from benchmarks.checkpoints.text import windows
from benchmarks.checkpoints.train_small_moe import RECIPES, make_tokens, token_losses, write_checkpoint
from warmup.__main__ import main as warmup

SHAPE = replace(RECIPES["tiny"].shape, moe_layers=1)
WINDOW, WINDOWS = 64, 8
ROTATE = small_moe.rotate
# In nats, of which a token costs about 10 here: the mean over tokens of how far two models are apart.
LARGEST_DIFFERENCE = 0.1
TEXT = "".join(
    f"Step {i} of {i * i}: {'the router sends it on' if i % 3 else 'an expert has it'}.\n" for i in range(4000)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`bf16`, drawn so that each part of a layer moves the logits, and `fp8`, converted from it."""
    folder = tmp_path_factory.mktemp("small_moe")
    (folder / "bf16").mkdir()
    make_tokens(folder / "bf16", TEXT, SHAPE.vocab, seed=0)
    write_checkpoint(folder / "bf16", drawn())
    assert warmup(["convert", "--model", str(folder / "bf16"), "--out", str(folder / "fp8")]) == 0
    return folder


def drawn() -> SmallMoE:
    model = SmallMoE(SHAPE)
    for tensor in tensors(SHAPE):
        model.weight(tensor.name).copy_(draw(tensor, SHAPE, 0, torch.device("cpu")))
    return model


@pytest.fixture(scope="module")
def asked(folder, environment_of_engines):
    """The exit status, the report, and each engine's losses."""
    said = {}
    ask = perplexity.ask

    def listen(args, name):
        said[name] = ask(args, name)
        return said[name]

    arguments = ["--model", folder / "fp8", "--twin", folder / "bf16", "--out", folder / "report.json"]
    arguments += ["--engines", "bf16,fp8moe", "--window", WINDOW, "--windows", WINDOWS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perplexity, "ask", listen)
        for name, value in environment_of_engines.items():
            patch.setenv(name, value)
        status = perplexity.main(list(map(str, arguments)))
    report = json.loads((folder / "report.json").read_text())
    return status, report, {name: torch.tensor(answer["losses"]) for name, answer in said.items()}


def of_pytorch(folder) -> torch.Tensor:
    held_out = (folder / "bf16" / "held_out.txt").read_text()
    return token_losses(drawn(), windows(folder / "bf16" / "tokenizer.json", held_out, WINDOW)[:WINDOWS])


def apart(losses: torch.Tensor, others: torch.Tensor) -> float:
    return (losses - others).abs().mean().item()


def test_the_engine_says_what_the_trainers_model_says(asked, folder):
    _, _, losses = asked
    assert losses["bf16"].std() > 20 * LARGEST_DIFFERENCE
    assert apart(losses["bf16"], of_pytorch(folder)) < LARGEST_DIFFERENCE


def halves(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding in the layout of other models: channel i is a pair with i + dim / 2."""
    rotated = ROTATE(x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), theta)
    return rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def test_another_layout_of_the_rotary_embedding_does_not_pass(asked, folder, monkeypatch):
    _, _, losses = asked
    monkeypatch.setattr(small_moe, "rotate", halves)
    assert apart(losses["bf16"], of_pytorch(folder)) > 2 * LARGEST_DIFFERENCE


def test_ours_says_nearly_the_same_and_the_report_by_how_much(asked):
    status, report, losses = asked
    assert 0 < apart(losses["fp8moe"], losses["bf16"]) < 1
    assert report["tokens"] == WINDOWS * (WINDOW - 1)
    for name, engine in report["engines"].items():
        assert engine["perplexity"] == pytest.approx(losses[name].double().mean().exp().item(), rel=1e-4)
    off = report["engines"]["fp8moe"]["against_bf16"]
    ratio = report["engines"]["fp8moe"]["perplexity"] / report["engines"]["bf16"]["perplexity"]
    assert off["percent"] == pytest.approx(100 * (ratio - 1), abs=1e-3)
    assert off["low"] < off["percent"] < off["high"]
    assert (status == 1) == (abs(off["percent"]) > perplexity.LARGEST_DIFFERENCE) == bool(report["faults"])
