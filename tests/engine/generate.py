"""Engines one after the other, and the greedy answers of each, with log-probabilities of the whole vocabulary.

python -m tests.engine.generate FOLDER ENGINES_AS_JSON

ENGINES are those of `PROCESSES` in `conftest.py`, by name; FOLDER has their checkpoints. Prints lines of JSON with
`engine`, the name, and `answer`, one for each checkpoint that it has loaded, or `refused`, why it does not start. What
vLLM prints goes to standard error.
"""

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.checkpoints.answers import ALL, ask, random_prompts

BEGINS = "=== engine: "  # and its name: the line in front of an engine's log
PROMPTS, PROMPT_TOKENS, GENERATED = 4, 24, 8
LIMITS = {
    "max_model_len": 128,
    "max_num_seqs": PROMPTS,
    "max_num_batched_tokens": 128,
    "max_logprobs": ALL,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 1 << 26,
}


def share_imports() -> None:
    """On a CPU: inspect the classes of models in this process, and fork workers from it.

    vLLM would start a process for each, which imports vLLM for seconds; for GPUs it forks workers, too.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.v1.executor import multiproc_executor

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda inspect: inspect()
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def answers(LLM: Any, folder: Path, engine: dict[str, Any]) -> Iterator[dict[str, Any]]:
    model = str(folder / engine["checkpoint"])
    llm = LLM(model=model, dtype="bfloat16", skip_tokenizer_init=True, **LIMITS, **engine["arguments"])
    yield ask(llm, random_prompts(PROMPTS, PROMPT_TOKENS), GENERATED)
    for other in engine["reload"]:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / other)})
        llm.reset_prefix_cache()
        yield ask(llm, random_prompts(PROMPTS, PROMPT_TOKENS), GENERATED)


@contextmanager
def gate_and_up_swapped() -> Iterator[None]:
    """A bug: every expert takes its gate for its up projection. The tests have to notice."""
    from fp8moe_plugin.ops import reference

    correct = reference.silu_mul_quant

    def swapped(gate_up: Any, *rest: Any) -> Any:
        return correct(gate_up.roll(gate_up.shape[-1] // 2, -1), *rest)

    with mock.patch.object(reference, "silu_mul_quant", swapped):
        yield


def main() -> None:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from fp8moe_plugin.errors import Fp8MoeError
    from fp8moe_plugin.layers import kernels
    from fp8moe_plugin.logs import log_once

    folder, engines = Path(sys.argv[1]), json.loads(sys.argv[2])
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    share_imports()
    for name, engine in engines.items():
        gc.freeze()  # what is imported: vLLM collects garbage often
        log_once.cache_clear()
        kernels._announced.clear()
        print(f"\n{BEGINS}{name}", file=sys.stderr, flush=True)
        with gate_and_up_swapped() if engine["swapped"] else nullcontext():
            try:
                for answer in answers(LLM, folder, engine):
                    print(json.dumps({"engine": name, "answer": answer}), file=lines, flush=True)
            except Fp8MoeError as error:
                print(json.dumps({"engine": name, "refused": str(error)}), file=lines, flush=True)
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
