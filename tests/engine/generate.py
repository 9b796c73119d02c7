"""One engine's greedy answers, with log-probabilities of the whole vocabulary, as a line of JSON.

python -m tests.engine.generate MODEL ARGUMENTS_AS_JSON

ARGUMENTS may have `reload`, the folders of further checkpoints of the same model: each is loaded over the one before,
and answers in a line of its own.
"""

import json
import sys

import torch

PROMPTS, PROMPT_TOKENS, GENERATED = 4, 24, 8
ALL = -1  # log-probabilities
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
    from vllm import SamplingParams, TokensPrompt

    ids = torch.randint(10, 512, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    greedy = SamplingParams(
        temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False, logprobs=ALL, prompt_logprobs=ALL
    )
    outputs = llm.generate([TokensPrompt(prompt_token_ids=i) for i in ids], greedy, use_tqdm=False)
    answers = {
        "prompts": [[logprobs(p) for p in o.prompt_logprobs[1:]] for o in outputs],
        "generated": [[logprobs(p) for p in o.outputs[0].logprobs] for o in outputs],
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
    }
    print("\n" + json.dumps(answers), flush=True)


def logprobs(position) -> list[float]:
    return [position[token].logprob for token in range(len(position))]


if __name__ == "__main__":
    main()
