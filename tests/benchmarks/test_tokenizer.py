"""Random ids survive as text, so that a client sends the tokens that it counts."""

import json

import pytest
from transformers import AutoTokenizer

from benchmarks.checkpoints.tokenizer import write_word_tokenizer

IDS = [5, 0, 999, 0, 0, 1, 1, 998]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_word_tokenizer(folder, 1000)
    return folder


def test_text_of_any_ids_is_encoded_to_them(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (len(tokenizer), tokenizer.all_special_ids) == (1000, [])
    assert tokenizer.encode(tokenizer.decode(IDS)) == IDS


def test_vllm_accepts_text_of_a_whole_context(folder):
    """It refuses text that is longer than the longest word times the context, without looking at its tokens."""
    text = AutoTokenizer.from_pretrained(folder).decode([999] * 100)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(text) <= 100 * max(map(len, vocabulary))
