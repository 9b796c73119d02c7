"""A rank of two of an engine under data and expert parallelism, with windows between them, on a CPU.

python -m tests.engine.generate_ranks CHECKPOINT DRAFT

Prints a line of JSON with the answers to this rank's share of the prompts, which is not half of them, and the windows.
"""

import json
import os
import sys

from benchmarks.checkpoints.answers import ask, random_prompts
from fp8moe_plugin.compare.cells import EAGER
from tests.engine.generate import GENERATED, LIMITS, PROMPT_TOKENS, PROMPTS, share_imports

OF_FIRST = PROMPTS - 1  # prompts: the second rank has fewer tokens, and in the end none
OPTIONS = EAGER | {
    "quantization": "fp8moe",
    "enable_expert_parallel": True,
    "worker_extension_cls": "tests.engine.gloo_windows.Windows",
}


def main() -> None:
    checkpoint, draft = sys.argv[1:]
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    share_imports()
    from vllm import LLM

    mtp = {"method": "mtp", "num_speculative_tokens": 1, "model": draft, "quantization": "fp8moe"}
    llm = LLM(model=checkpoint, dtype="bfloat16", skip_tokenizer_init=True, speculative_config=mtp, **LIMITS, **OPTIONS)
    first = os.environ["VLLM_DP_RANK"] == "0"
    prompts = random_prompts(PROMPTS, PROMPT_TOKENS)
    answers = ask(llm, prompts[:OF_FIRST] if first else prompts[OF_FIRST:], GENERATED)
    print(json.dumps({"answers": answers, "windows": llm.collective_rpc("windows")}), file=lines, flush=True)
    sys.stdin.read()  # until both have answered: the last steps of the other rank need this one


if __name__ == "__main__":
    main()
