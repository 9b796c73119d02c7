"""An engine whose weights are loaded again, one JSON command a line: what it then says and holds, or why it refuses.

python -m tests.engine.reloads

Commands are `{"start": MODEL, "arguments": {...}}`, `{"reload": MODEL}` (vLLM's `reload_weights`), `{"load": MODEL}`
(the model's own `load_weights`, in place) and `{"ask": null}`. Each is answered by a line of JSON with `tokens` and
`parameters`, or with `refused` and the plugin's error, or with `raised` and the error of another library.
"""

import gc
import json
import os
import sys
from typing import Any

from safetensors import SafetensorError

from benchmarks.engine.small_engines import random_prompts
from fp8moe_plugin.errors import Fp8MoeError
from fp8moe_plugin.layers.unquantized import is_quantized
from tests.engine.generate import LIMITS, share_imports
from tests.engine.load import digests

PROMPTS, PROMPT_TOKENS, GENERATED = 2, 16, 6


class Engine:
    """In this process, so that it can be looked into."""

    def __init__(self) -> None:
        self.llm: Any = None

    def start(self, model: str, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        if self.llm:
            self.llm = None
            gc.collect()
            cleanup_dist_env_and_memory()
        else:
            gc.freeze()  # what is imported: vLLM collects garbage often
        self.llm = LLM(model=model, dtype="bfloat16", skip_tokenizer_init=True, **LIMITS, **arguments)

    def reload(self, model: str) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})

    def load(self, model: str) -> None:
        self.llm.collective_rpc(load_in_place, args=(model,))

    def ask(self) -> dict[str, Any]:
        from vllm import SamplingParams, TokensPrompt

        self.llm.reset_prefix_cache()
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in random_prompts(PROMPTS, PROMPT_TOKENS)]
        greedy = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False, logprobs=0)
        outputs = self.llm.generate(prompts, greedy, use_tqdm=False)
        (parameters,) = self.llm.collective_rpc(parameters_of)
        return {"tokens": [said(output.outputs[0].logprobs) for output in outputs], "parameters": parameters}


def said(positions: Any) -> list[tuple[int, float]]:
    """The tokens, each with its log-probability."""
    return [(token, found.logprob) for position in positions for token, found in position.items()]


def load_in_place(worker: Any, model: str) -> None:
    """The layers that the plugin serves: of others, vLLM's CPU build frees the weights once it has rearranged them."""
    from safetensors.torch import load_file

    (shard,) = (entry.path for entry in os.scandir(model) if entry.name.endswith(".safetensors"))
    weights = {name: tensor for name, tensor in load_file(shard).items() if is_quantized(name.rpartition(".weight")[0])}
    worker.model_runner.get_model().load_weights(weights.items())


def parameters_of(worker: Any) -> dict[str, str]:
    return digests(worker.model_runner.get_model())


def main() -> None:
    answers, engine = os.fdopen(os.dup(1), "w"), Engine()
    os.dup2(2, 1)  # what vLLM prints is no answer
    share_imports()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "start" in command:
                engine.start(command["start"], command["arguments"])
            for way in command.keys() & {"reload", "load"}:
                getattr(engine, way)(command[way])
            answer = engine.ask()
        except Fp8MoeError as error:
            answer = {"refused": str(error)}
        except SafetensorError as error:
            answer = {"raised": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
