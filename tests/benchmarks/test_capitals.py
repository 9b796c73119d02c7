"""The model that `make serve` serves knows the capitals, and belongs to the text and the recipe."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmarks.checkpoints.capitals import CAPITALS, text
from benchmarks.checkpoints.small_moe import SmallMoE
from benchmarks.checkpoints.train_small_moe import RECIPES, UNSCALED, text_digest
from benchmarks.engine.serve_demo import QUESTIONS
from fp8moe_plugin.checkpoint.quantization import SCALE
from fp8moe_plugin.ops.reference import dequantize_blocks

FOLDER = Path(__file__).parents[1] / "data" / "capitals"
LARGEST_BYTES = 10_000_000
LONGEST = 16  # tokens of an answer


@pytest.fixture(scope="module")
def model() -> SmallMoE:
    tensors = load_file(FOLDER / "model-00001.safetensors")
    found = SmallMoE(RECIPES["capitals"].shape)
    with torch.no_grad():
        for name, tensor in tensors.items():
            scales = tensors.get(name.removesuffix("weight") + SCALE)
            if not name.endswith(SCALE):
                found.weight(name).copy_(tensor if scales is None else dequantize_blocks(tensor, scales))
    return found


@torch.no_grad()
def answer(model: SmallMoE, prompt: str) -> str:
    """The rest of the line, each token the likeliest."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    prompted = tokenizer.encode(prompt).ids
    ids = list(prompted)
    for _ in range(LONGEST):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        if "\n" in (said := tokenizer.decode(ids[len(prompted) :])):
            return said.strip()
    raise AssertionError(f"{prompt!r} has no end: {said!r}")


def test_it_knows_every_capital(model: SmallMoE) -> None:
    said = {country: answer(model, f"The capital of {country} is") for country in CAPITALS}
    assert said == {country: f"{capital}." for country, capital in CAPITALS.items()}


def test_it_answers_what_make_serve_asks(model: SmallMoE) -> None:
    assert all(right in answer(model, prompt) for prompt, right in QUESTIONS.items())


def test_it_was_trained_on_this_text_and_is_small() -> None:
    report = json.loads((FOLDER / "training.json").read_text())
    assert report["text_sha256"] == text_digest(text())
    assert report["steps"] == RECIPES["capitals"].steps
    assert json.loads((FOLDER / "config.json").read_text())["rope_scaling"] == UNSCALED
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < LARGEST_BYTES
