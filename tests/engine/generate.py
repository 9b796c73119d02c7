"""One engine's greedy answers, with log-probabilities of the whole vocabulary, as a line of JSON.

python -m tests.engine.generate MODEL ARGUMENTS_AS_JSON

ARGUMENTS may have `reload`, the folders of further checkpoints of the same model: each is loaded over the one before,
and answers in a line of its own.
"""

import json
import sys

from benchmarks.engine.small_engines import ALL, ask, random_prompts

PROMPTS, PROMPT_TOKENS, GENERATED = 4, 24, 8
LIMITS = {
    "max_model_len": 128,
    "max_num_seqs": PROMPTS,
    "max_num_batched_tokens": 128,
    "max_logprobs": ALL,
    "gpu_memory_utilization": 0.3,
}


def main() -> None:
    from vllm import LLM

    arguments = json.loads(sys.argv[2])
    others = arguments.pop("reload", [])
    llm = LLM(model=sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, **LIMITS, **arguments)
    answer(llm)
    for other in others:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        llm.reset_prefix_cache()
        answer(llm)


def answer(llm) -> None:
    print("\n" + json.dumps(ask(llm, random_prompts(PROMPTS, PROMPT_TOKENS), GENERATED)), flush=True)


if __name__ == "__main__":
    main()
