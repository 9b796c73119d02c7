"""One engine's greedy answers, as a line of JSON: `python -m tests.engine.generate MODEL ARGUMENTS_AS_JSON`."""

import json
import sys

import torch

PROMPTS, PROMPT_TOKENS, GENERATED = 4, 24, 8
LIMITS = {"max_model_len": 128, "max_num_seqs": PROMPTS, "max_num_batched_tokens": 128, "gpu_memory_utilization": 0.3}


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model=sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, **LIMITS, **json.loads(sys.argv[2]))
    ids = torch.randint(10, 512, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    greedy = SamplingParams(
        temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False, logprobs=2, prompt_logprobs=2
    )
    outputs = llm.generate([TokensPrompt(prompt_token_ids=i) for i in ids], greedy, use_tqdm=False)
    answers = {
        "prompts": [[best(p) for p in o.prompt_logprobs[1:]] for o in outputs],
        "generated": [[best(p) for p in o.outputs[0].logprobs] for o in outputs],
    }
    print("\n" + json.dumps(answers), flush=True)


def best(position) -> tuple[int, float]:
    """The likeliest token, and by how much its log-probability leads the second's."""
    first, second = sorted(position, key=lambda token: -position[token].logprob)[:2]
    return first, position[first].logprob - position[second].logprob


if __name__ == "__main__":
    main()
