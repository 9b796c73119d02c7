"""Greedy agreement of vLLM engines with different FP8 backends on one checkpoint.

    python -m benchmarks.accuracy.agreement --model DIR --out benchmarks/results/engine_agreement-<date>.json

Each engine runs in its own process, with CUDA graphs and torch.compile. `next_token` is the share of prompt positions
at which two engines predict the same most likely next token; every position has the same prefix, so one early
difference does not spoil the rest. `prefix` is the number of generated tokens that agree before the first difference.
`triton` and `deep_gemm` are vLLM's backends made comparable with ours: FP32 scales of activations, as a checkpoint
without `scale_fmt: ue8m0` has them, and no fusion of norms and activations into the quantization, which would save a
rounding to BF16. `triton default` and `deep_gemm default` run as `--quantization fp8` does.

For our engines, the report also has the log line that names the backend.
"""

import argparse
import itertools
import os
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine.serve_demo import IN_USE
from benchmarks.engines import ENGINES, in_own_process, read_config, run_and_answer
from benchmarks.report import write_report
from warmup.report import installed

PROMPTS, PROMPT_TOKENS, GENERATED = 768, 96, 32
SERVED = re.compile(rf"{IN_USE}: backend \w+")


def run_engine(model: str, name: str) -> dict[str, Any]:
    """Returns the answers of one engine, in this process, and the seconds of its start."""
    from vllm import LLM

    start = time.monotonic()
    arguments, _ = ENGINES[name]
    llm = LLM(model=model, max_model_len=512, max_num_seqs=256, max_num_batched_tokens=8192, **arguments)
    ready = time.monotonic() - start
    return {"ready_s": ready} | answers(llm, read_config(Path(model))["vocab_size"], PROMPTS)


def answers(llm: Any, vocab: int, count: int) -> dict[str, Any]:
    """Returns the answers to `count` prompts of random tokens, the same in each call."""
    import torch
    from vllm import SamplingParams, TokensPrompt

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, vocab, (count, PROMPT_TOKENS), generator=generator).tolist()
    prompts = [TokensPrompt(prompt_token_ids=i) for i in ids]
    sampling = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    best = [[max(p, key=lambda t: p[t].logprob) for p in o.prompt_logprobs[1:]] for o in outputs]
    logprobs = [[max(v.logprob for v in p.values()) for p in o.prompt_logprobs[1:]] for o in outputs]
    generated = [list(o.outputs[0].token_ids) for o in outputs]
    return {"next_token": best, "logprob": logprobs, "generated": generated}


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    pairs = [(x, y) for p, q in zip(a["next_token"], b["next_token"], strict=True) for x, y in zip(p, q, strict=True)]
    prefixes = [
        sum(1 for _ in itertools.takewhile(lambda t: t[0] == t[1], zip(p, q, strict=True)))
        for p, q in zip(a["generated"], b["generated"], strict=True)
    ]
    offs = [abs(x - y) for p, q in zip(a["logprob"], b["logprob"], strict=True) for x, y in zip(p, q, strict=True)]
    return {
        "logprob": sum(offs) / len(offs),
        "next_token": sum(x == y for x, y in pairs) / len(pairs),
        "prefix": sum(prefixes) / len(prefixes),
        "first_token": sum(n > 0 for n in prefixes) / len(prefixes),
    }


def served_by(log: str) -> str | None:
    """Returns what the log says about the kernels of our first layer of experts; None if no layer is ours."""
    found = SERVED.search(log)
    return found and found[0]


def ask(model: str, name: str, timeout: float) -> dict[str, Any]:
    """Returns the answers of an engine in its own process, or its `error`."""
    environment = os.environ | ENGINES[name][1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        found = in_own_process("benchmarks.accuracy.agreement", {"--model": model}, name, timeout, environment, log)
        return found | {"served": served_by(log.read_text(errors="replace"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--twin", help="the same model unquantized, for the engine `bf16`")
    parser.add_argument("--engines", default="fp8moe,triton,deep_gemm")
    parser.add_argument("--timeout", type=float, default=400, help="seconds per engine")
    parser.add_argument("--out", type=Path, help="the report, rewritten after each engine")
    parser.add_argument("--run", choices=ENGINES, help="run one engine and write its answers to --out")
    args = parser.parse_args()
    if args.run:
        run_and_answer(partial(run_engine, args.model, args.run), args.out)
        return
    said: dict[str, dict[str, Any]] = {}
    pairs: dict[str, dict[str, float]] = {}
    for name in args.engines.split(","):
        new = ask(args.twin if name == "bf16" else args.model, name, args.timeout)
        if "error" in new:
            sys.exit(f"{name}: {new['error']}")
        print(f"{name}: engine ready after {new['ready_s']:.0f} s; {new['served'] or 'no layer of ours'}", flush=True)
        for other, answers in said.items():
            result = pairs[f"{other} ~ {name}"] = compare(answers, new)
            print(
                f"{other} ~ {name}: next token {result['next_token']:.4f}, "
                f"prefix {result['prefix']:.2f} of {GENERATED}, logprob off by {result['logprob']:.4f}",
                flush=True,
            )
        said[name] = new
        ready, served = ({name: of[key] for name, of in said.items()} for key in ("ready_s", "served"))
        about = {"vllm": installed("vllm"), "prompts": PROMPTS, "ready_s": ready, "served": served}
        if args.out:
            write_report(args.out, about | {"pairs": pairs})


if __name__ == "__main__":
    main()
