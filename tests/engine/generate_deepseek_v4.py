"""Engines of a tiny DeepSeek-V4 on a CPU, one after the other, and the answers of each.

python -m tests.engine.generate_deepseek_v4 FOLDER CHECKPOINT,QUANTIZATION[,VARIABLE=VALUE] ..

Prints a line of JSON for each engine. vLLM's kernels for the metadata of attention need Triton; its interpreter stands
in for the CPU backend, which is not in the package index.
"""

import collections
import gc
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.answers import ALL, ask, random_prompts
from tests.engine.generate import share_imports

PROMPTS, PROMPT_TOKENS, GENERATED = 2, 140, 4  # one entry of the cache stands for up to 128 tokens
LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": PROMPTS, "max_logprobs": ALL, "enforce_eager": True}


def interpret_triton() -> None:
    import triton.backends

    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)


def name_every_layout() -> None:
    """vLLM 0.32 makes tile schedules of attention for some of the layouts that it then looks up; None is what it
    makes on CPUs without AMX.
    """
    from vllm.models.deepseek_v4.cpu import cpu_mla

    for found in vars(cpu_mla).values():
        if isinstance(found, type) and hasattr(found, "build_tile_scheduler"):
            found.build_tile_scheduler = lambda *_: collections.defaultdict(lambda: None)


def main() -> None:
    interpret_triton()
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from fp8moe_plugin.settings import settings

    folder, lines = Path(sys.argv[1]), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    share_imports()
    name_every_layout()
    for engine in sys.argv[2:]:
        checkpoint, quantization, *variables = engine.split(",")
        os.environ.update(variable.split("=") for variable in variables)
        settings.cache_clear()
        own = {"model": str(folder / checkpoint), "quantization": quantization or None}
        llm = LLM(**own, dtype="bfloat16", skip_tokenizer_init=True, **LIMITS)
        print(json.dumps(ask(llm, random_prompts(PROMPTS, PROMPT_TOKENS), GENERATED)), file=lines, flush=True)
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
