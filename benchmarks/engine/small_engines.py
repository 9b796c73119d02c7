"""What engines of small checkpoints are asked, and how far apart their answers are.

An answer is greedy tokens and, at each position of prompts and answers, the log-probabilities of the whole vocabulary.
"""

from typing import Any, NamedTuple

import torch

Answers = dict[str, Any]

ALL = -1  # log-probabilities
# Of the log-probabilities at a position, as vectors: rounding activations to FP8 moves them by 0.01 to 0.03 of their
# length, a mistake in the experts by 0.08 and more. 9 of 10 positions must be nearer: rounding may change an expert.
LARGEST_DIFFERENCE = 0.05
# In log-probability: below it, rounding decides which token is the likeliest.
CLEAR_LEAD = 0.5
# Around two faults of vLLM 0.32 on CPUs, which its BF16 models have too: the C++ kernel of rotary embeddings turns
# DeepSeek's slices wrongly, and inductor moves a linear layer (onednn_mm) behind the first reader of its output.
EAGER: dict[str, Any] = {"enforce_eager": True, "compilation_config": {"custom_ops": ["-rotary_embedding"]}}


class Comparison(NamedTuple):
    """Of one engine's answers with another's, over positions after the same tokens."""

    difference: float  # how far apart 9 of 10 positions are at most, relative
    clear: float  # the share of positions where the other's best token leads clearly
    same: float  # of these, the share where the best token is the same


def random_prompts(count: int, tokens: int, vocab: int = 512, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(10, vocab, (count, tokens), generator=generator).tolist()
    return ids


def ask(llm: Any, prompts: list[list[int]], generated: int) -> Answers:
    """What a vLLM engine answers to these prompts."""
    from vllm import SamplingParams, TokensPrompt

    greedy = SamplingParams(
        temperature=0, max_tokens=generated, ignore_eos=True, detokenize=False, logprobs=ALL, prompt_logprobs=ALL
    )
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], greedy, use_tqdm=False)
    return {
        "prompts": [[_logprobs(p) for p in o.prompt_logprobs[1:]] for o in outputs],
        "generated": [[_logprobs(p) for p in o.outputs[0].logprobs] for o in outputs],
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
    }


def _logprobs(position: Any) -> list[float]:
    return [position[token].logprob for token in range(len(position))]


def same_history(ours: Answers, other: Answers) -> tuple[torch.Tensor, ...]:
    """Both engines' log-probabilities after the same tokens: of an answer, up to the first difference."""
    pairs: list[Any] = []
    for mine, theirs in zip(ours["prompts"], other["prompts"], strict=True):
        pairs += zip(mine, theirs, strict=True)
    for i, (mine, theirs) in enumerate(zip(ours["generated"], other["generated"], strict=True)):
        equal = equal_prefix(ours["tokens"][i], other["tokens"][i])
        pairs += list(zip(mine, theirs, strict=True))[: equal + 1]
    return torch.tensor(pairs).unbind(1)


def equal_prefix(ours: list[int], other: list[int]) -> int:
    """How many tokens are equal before the first that differs."""
    tokens = zip(ours, other, strict=True)
    return next((n for n, (mine, theirs) in enumerate(tokens) if mine != theirs), len(ours))


def compare(ours: Answers, other: Answers) -> Comparison:
    mine, theirs = (x - x.mean(1, keepdim=True) for x in same_history(ours, other))
    difference = ((mine - theirs).norm(dim=1) / theirs.norm(dim=1)).quantile(0.9)
    first, second = theirs.topk(2).values.unbind(1)
    clear = first - second > CLEAR_LEAD
    same = mine.argmax(1) == theirs.argmax(1)
    return Comparison(difference.item(), clear.float().mean().item(), same[clear].float().mean().item())
