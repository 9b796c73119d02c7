"""A small DeepSeek-V3 in plain PyTorch: what it computes, that it learns, and the checkpoint it becomes."""

import dataclasses
import lzma
import random

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from benchmarks.checkpoints.small_moe import MLP, Router, SmallMoE
from benchmarks.checkpoints.synthetic import Shape, tensors
from benchmarks.checkpoints.text import PIECE, read_text, split, windows
from benchmarks.checkpoints.tokenizer import write_tokenizer
from benchmarks.checkpoints.train_small_moe import (
    RECIPES,
    WINDOW,
    Recipe,
    run,
    token_losses,
    write_checkpoint,
)
from fp8moe_plugin.errors import UnsupportedError

SHAPE = Shape(
    family="deepseek_v3", hidden=128, vocab=384, heads=2, moe_layers=1, experts=8, topk=2, moe_intermediate=128,
    dense_layers=1, dense_intermediate=128, groups=4, topk_groups=2, q_lora=128, kv_lora=128, nope_dim=32, rope_dim=16,
    v_dim=32,
)  # fmt: skip


def sentences(count: int) -> str:
    """Text whose words follow from the previous ones."""
    words = ["router", "expert", "token", "weight", "kernel", "block", "scale", "tile", "gate", "norm", "head", "layer"]
    draw = random.Random(0)
    starts = [draw.randrange(len(words)) for _ in range(count)]
    return "".join(" ".join((words * 2)[start : start + 9]) + ".\n" for start in starts)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "model"
    return folder, run(folder, Recipe(SHAPE, steps=1, batch=1, learning_rate=3e-3), sentences(6000))


def test_the_checkpoint_is_what_was_trained(trained):
    """Evaluating the BF16 weights of the files gives the loss that the trainer reported."""
    folder, report = trained
    stored = load_file(folder / "model-00001.safetensors")
    assert {(name, tuple(t.shape), t.dtype) for name, t in stored.items()} == {
        (t.name, t.shape, t.dtype) for t in tensors(SHAPE)
    }
    model = SmallMoE(SHAPE)
    for name, tensor in stored.items():
        model.weight(name).copy_(tensor)
    held_out = windows(folder / "tokenizer.json", (folder / "held_out.txt").read_text(), WINDOW)
    assert token_losses(model, held_out).mean().item() == pytest.approx(report.held_out_loss, abs=0.01)


def router(bias: list[float]) -> Router:
    """A router whose input tokens are the logits of its eight experts."""
    found = Router(dataclasses.replace(SHAPE, hidden=8), scaling_factor=2.5)
    found.weight.data = torch.eye(8)
    found.e_score_correction_bias.copy_(torch.tensor(bias))
    return found


def test_experts_come_from_the_best_groups_and_the_bias_does_not_weight_them():
    """With groups of two experts, the second and the fourth have the best sums, though expert 0 scores highest."""
    scores = torch.tensor([0.9, 0.1, 0.6, 0.7, 0.2, 0.3, 0.8, 0.4])
    weights = router([0.0] * 8)(scores.logit()[None])[0]
    expected = torch.zeros(8)
    expected[[3, 6]] = torch.tensor([0.7, 0.8]) / 1.5 * 2.5
    torch.testing.assert_close(weights, expected)
    biased = router([0.0, 0.0, 0.3, 0, 0, 0, 0, 0])(scores.logit()[None])[0]
    expected = torch.zeros(8)
    expected[[2, 6]] = torch.tensor([0.6, 0.8]) / 1.4 * 2.5
    torch.testing.assert_close(biased, expected)


def test_the_wide_mlp_is_the_weighted_sum_of_its_experts():
    torch.manual_seed(0)
    model = SmallMoE(SHAPE)
    moe = model.model["layers"][1].mlp
    x = torch.randn(5, SHAPE.hidden)
    weights = moe.gate(x)
    expected = torch.zeros_like(x)
    for e in range(SHAPE.experts):
        names = (f"model.layers.1.mlp.experts.{e}.{p}_proj.weight" for p in ("gate", "up", "down"))
        gate, up, down = map(model.weight, names)
        expected += weights[:, e : e + 1] * F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    assert ((weights > 0).sum(1) == SHAPE.topk).all()
    torch.testing.assert_close(moe.experts(x, weights), expected)


def test_experts_that_a_token_does_not_have_get_no_gradient():
    mlp = MLP(8, 4 * 6)
    mlp(torch.randn(3, 8), torch.tensor([[0.0, 1, 2, 0]] * 3)).sum().backward()
    by_expert = mlp.up_proj.weight.grad.unflatten(0, (4, 6)).abs().amax((1, 2))
    assert (by_expert > 0).tolist() == [False, True, True, False]


def test_a_token_does_not_see_those_after_it():
    model = SmallMoE(SHAPE)
    ids = torch.randint(SHAPE.vocab, (1, 9))
    changed = ids.clone()
    changed[0, 6] = (ids[0, 6] + 1) % SHAPE.vocab
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_all_text_is_trained_on_or_held_out():
    text = "".join(f"{i} " for i in range(400_000))
    train, held_out = split(text, seed=3)
    assert len(held_out) == round(len(train + held_out) / 20)
    assert sorted(train + held_out) == sorted(text[i : i + PIECE] for i in range(0, len(text), PIECE))
    assert split(text, seed=3) == (train, held_out)
    assert split(text, seed=4) != (train, held_out)


def test_text_is_found_in_folders_and_archives(tmp_path):
    (tmp_path / "sub" / "site-packages").mkdir(parents=True)
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "sub" / "b.txt").write_text("two")
    (tmp_path / "sub" / "c.bin").write_text("no")
    (tmp_path / "sub" / "site-packages" / "d.py").write_text("no")
    archive = tmp_path / "e.xz"
    archive.write_bytes(lzma.compress("drei äöü".encode()))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert read_text([tmp_path, archive]) == "one\n\ntwo\n\ndrei äöü"
    with pytest.raises(UnsupportedError, match="no text in 0 files"):
        read_text([empty])
    archive.write_bytes(archive.read_bytes()[:-3])
    with pytest.raises(UnsupportedError, match="is damaged"):
        read_text([archive])


def test_windows_do_not_overlap_and_a_short_text_is_refused(tmp_path):
    write_tokenizer(tmp_path, 258)  # bytes
    found = windows(tmp_path / "tokenizer.json", "abcdefg", 3)
    assert found.shape == (2, 3)
    assert len(set(found.flatten().tolist())) == 6
    with pytest.raises(UnsupportedError, match="has 7 tokens, a window has 8"):
        windows(tmp_path / "tokenizer.json", "abcdefg", 8)


def test_a_shape_that_is_none_of_a_checkpoint_is_not_written(tmp_path):
    model = SmallMoE(SHAPE)
    model.shape = dataclasses.replace(SHAPE, heads=4)
    with pytest.raises(ValueError, match="q_b_proj"):
        write_checkpoint(tmp_path, model)


def test_recipes_have_shapes_that_are_served_by_the_kernels():
    for recipe in RECIPES.values():
        s = recipe.shape
        assert all(size % 128 == 0 for size in (s.hidden, s.moe_intermediate, s.dense_intermediate, s.q_lora))
        assert (s.kv_lora, s.nope_dim, s.rope_dim, s.v_dim) == (512, 128, 64, 128)
