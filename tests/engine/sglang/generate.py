"""SGLang's engines one after the other, and the greedy answers of each, with log-probabilities of the vocabulary.

python -m tests.engine.sglang.generate FOLDER ENGINES_AS_JSON

ENGINES are those of `ENGINES` in `conftest.py`, by name; FOLDER has their checkpoints. Prints lines of JSON with
`engine`, the name, and `answer`, one for each checkpoint that it was to load, and before it why that was refused, if it
was; then `status`, that of its process. What SGLang prints goes to standard error.
"""

import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.checkpoints.answers import Answers, random_prompts
from tests.engine.generate import BEGINS, GENERATED, PROMPT_TOKENS, PROMPTS, gate_and_up_swapped

VOCAB = 512
ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,  # positions that are cached have no log-probabilities
    "dtype": "bfloat16",
    "context_length": 128,
    "max_total_tokens": 1024,
    "max_running_requests": PROMPTS,
    "random_seed": 0,
    "log_level": "info",
}


def ask(engine: Any) -> Answers:
    """Returns the answers of an SGLang engine, in the form of `answers.ask`."""
    greedy = {"temperature": 0, "max_new_tokens": GENERATED, "ignore_eos": True}
    outputs = engine.generate(
        input_ids=random_prompts(PROMPTS, PROMPT_TOKENS),
        sampling_params=greedy,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=VOCAB,
    )
    meta = [output["meta_info"] for output in outputs]
    return {
        "prompts": [[_logprobs(p) for p in m["input_top_logprobs"][1:]] for m in meta],
        "generated": [[_logprobs(p) for p in m["output_top_logprobs"]] for m in meta],
        "tokens": [output["output_ids"][-GENERATED:] for output in outputs],
    }


def _logprobs(position: Any) -> list[float]:
    """By token; SGLang lists pairs of a log-probability and a token, the most likely first."""
    return [logprob for _, logprob in sorted((token, logprob) for logprob, token, *_ in position)]


def answers(folder: Path, engine: dict[str, Any]) -> Iterator[Answers | dict[str, str]]:
    from sglang.srt.entrypoints.engine import Engine

    model = str(folder / engine["checkpoint"])
    with Engine(model_path=model, skip_tokenizer_init=True, **(ON_CPU | engine["arguments"])) as started:
        yield ask(started)
        for other in engine["updates"]:
            done, message, *_ = started.update_weights_from_disk(str(folder / other))
            if not done:
                yield {"refused": message}
            yield ask(started)


def run(lines: Any, folder: Path, name: str, engine: dict[str, Any]) -> None:
    """In a process of its own: SGLang kills the processes of an engine with all that they belong to."""
    os.setsid()
    os.environ |= engine["environment"]
    multiprocessing.set_start_method("fork")  # those that SGLang spawns spend most of their time on imports
    with (
        mock.patch.object(multiprocessing, "set_start_method"),
        gate_and_up_swapped() if engine["swapped"] else nullcontext(),
    ):
        for answer in answers(folder, engine):
            print(json.dumps({"engine": name, "answer": answer}), file=lines, flush=True)


def main() -> None:
    for module in ("entrypoints.engine", "models.registry"):  # what every process of an engine needs
        importlib.import_module(f"sglang.srt.{module}")

    folder, engines = Path(sys.argv[1]), json.loads(sys.argv[2])
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name, engine in engines.items():
        print(f"\n{BEGINS}{name}", file=sys.stderr, flush=True)
        child = os.fork()
        if not child:
            run(lines, folder, name, engine)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"engine": name, "status": os.waitstatus_to_exitcode(status)}), file=lines, flush=True)


if __name__ == "__main__":
    main()
