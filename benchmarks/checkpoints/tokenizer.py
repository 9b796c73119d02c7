"""Tokenizers for our checkpoints: byte-level BPE for real text, and one of words for random ids."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<s>", "</s>"
TEXT = (
    "The router sends each token to a few of the experts.",
    "Every expert multiplies its tokens with its own weights, and the results are summed.",
    "Where is the capital of France? The capital of France is Paris.",
)


def write_tokenizer(folder: Path, vocab_size: int, text: Iterable[str] = TEXT) -> None:
    """Write a byte-level BPE tokenizer with exactly `vocab_size` ids; 0 is `<s>`, 1 is `</s>`.

    It encodes real text, and decodes any generated id to text. The other ids are the bytes and the most frequent merges
    of the text.

    Raises:
        ValueError: fewer ids than the 256 bytes and the two specials need.
    """
    if vocab_size < 258:
        raise ValueError(f"vocab_size is {vocab_size}, byte-level text needs 258 ids or more.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    # A short text yields fewer merges: fill up with ids that no text encodes to, but a random model may generate.
    vocab.update({f"Ġw{i}": i for i in range(len(vocab), vocab_size)})
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))
    write_config(folder, {"bos_token": BOS, "eos_token": EOS})


def write_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with a word for each id, so that any ids are decoded to text that is encoded to them.

    Clients that send random prompts as text then send as many tokens as they count, of the whole vocabulary.
    """
    # vLLM refuses text longer than the context times the longest word, so one word makes up for the spaces.
    words = {f"w{i}": i for i in range(1, vocab_size)} | {f"w{0:012}": 0}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"w{0:012}"))
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder, {})


def write_config(folder: Path, special_tokens: dict[str, str]) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | special_tokens
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
