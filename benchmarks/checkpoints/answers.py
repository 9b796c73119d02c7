"""Prompts for engines of small checkpoints, and the distance between their answers.

An answer is greedy tokens and, at each position of prompts and answers, the log-probabilities of the whole vocabulary.
"""

from typing import Any, NamedTuple

import torch

Answers = dict[str, Any]

ALL = -1  # log-probabilities
# Relative distance of the log-probability vectors at a position: rounding activations to FP8 causes 0.01 to 0.03, a
# mistake in the experts 0.08 and more. 9 of 10 positions must be below; rounding may also change a token's expert.
LARGEST_DIFFERENCE = 0.05
# Lead in log-probability below which rounding decides which token is most likely.
CLEAR_LEAD = 0.5


class Comparison(NamedTuple):
    """One engine's answers compared with a reference's, at positions with the same preceding tokens."""

    difference: float  # relative distance, 90th percentile of the positions
    clear: float  # share of positions where the reference's best token leads clearly
    same: float  # share of these where the best token is the same


def random_prompts(count: int, tokens: int, vocab: int = 512, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(10, vocab, (count, tokens), generator=generator).tolist()
    return ids


def ask(llm: Any, prompts: list[list[int]], generated: int) -> Answers:
    """Returns the answers of a vLLM engine to these prompts."""
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
    """Both engines' log-probabilities at positions with the same preceding tokens."""
    pairs: list[Any] = []
    for mine, theirs in zip(ours["prompts"], other["prompts"], strict=True):
        pairs += zip(mine, theirs, strict=True)
    for i, (mine, theirs) in enumerate(zip(ours["generated"], other["generated"], strict=True)):
        equal = equal_prefix(ours["tokens"][i], other["tokens"][i])
        pairs += list(zip(mine, theirs, strict=True))[: equal + 1]
    return torch.tensor(pairs).unbind(1)


def equal_prefix(ours: list[int], other: list[int]) -> int:
    """Returns the number of equal tokens before the first difference."""
    tokens = zip(ours, other, strict=True)
    return next((n for n, (mine, theirs) in enumerate(tokens) if mine != theirs), len(ours))


def compare(ours: Answers, other: Answers) -> Comparison:
    mine, theirs = (x - x.mean(1, keepdim=True) for x in same_history(ours, other))
    difference = ((mine - theirs).norm(dim=1) / theirs.norm(dim=1)).quantile(0.9)
    first, second = theirs.topk(2).values.unbind(1)
    clear = first - second > CLEAR_LEAD
    same = mine.argmax(1) == theirs.argmax(1)
    return Comparison(difference.item(), clear.float().mean().item(), same[clear].float().mean().item())
