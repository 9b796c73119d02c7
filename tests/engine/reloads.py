"""An engine whose weights are loaded again, one JSON command a line: what it then says and holds, or why it refuses.

python -m tests.engine.reloads

Commands are `{"start": MODEL, "arguments": {...}}`, `{"reload": MODEL}` (vLLM's `reload_weights`), `{"load": MODEL,
"how": {...}}` (the model's own `load_weights`, in place; see `load_in_place`), `{"buckets": MODEL}` (`load_buckets`)
and `{"ask": null}`. `{"wait": null}` waits until an engine in a process of its own has ended. Each is answered by a
line of JSON with `tokens` and `parameters`, or with `refused` and the plugin's error, or with `raised` and another.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.checkpoints.answers import random_prompts
from fp8moe_plugin.errors import Fp8MoeError
from fp8moe_plugin.layers.unquantized import is_quantized
from tests.engine.generate import LIMITS, share_imports
from tests.engine.load import digests

PROMPTS, PROMPT_TOKENS, GENERATED = 2, 16, 6
BUCKET = 5  # fewer weights than a layer's experts have


class Engine:
    """In this process, so that it can be looked into, or in one of its own if vLLM's environment says so."""

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

    def load(self, model: str, **how: Any) -> None:
        self.llm.collective_rpc(load_in_place, args=(model,), kwargs=how)

    def buckets(self, model: str) -> None:
        self.llm.collective_rpc(load_buckets, args=(model,))

    def wait(self, _: None) -> None:
        """vLLM's client waits forever for the answer to a call that it sends before it notices the end."""
        while not self.llm.llm_engine.engine_core.resources.engine_dead:
            time.sleep(0.05)

    def ask(self) -> dict[str, Any]:
        from vllm import SamplingParams, TokensPrompt

        self.llm.reset_prefix_cache()
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in random_prompts(PROMPTS, PROMPT_TOKENS)]
        greedy = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False, logprobs=0)
        outputs = self.llm.generate(prompts, greedy, use_tqdm=False)
        (parameters,) = self.llm.collective_rpc(parameters_of)
        return {"tokens": [said(output.outputs[0].logprobs) for output in outputs], "parameters": parameters}


def said(positions: Any) -> list[tuple[int, float]]:
    """Returns the tokens, each with its log-probability."""
    return [(token, found.logprob) for position in positions for token, found in position.items()]


def load_in_place(
    worker: Any, model: str, part: str = "", lacking: str | None = None, after: int | None = None, apart: bool = False
) -> None:
    """Load the layers that the plugin serves: vLLM's CPU build frees other weights once it has rearranged them.

    Args:
        part: only the tensors whose names contain it.
        lacking: how names of tensors end that are left out.
        after: so many tensors come before an error.
        apart: the scales come in a second call.
    """
    from safetensors.torch import load_file

    (shard,) = (entry.path for entry in os.scandir(model) if entry.name.endswith(".safetensors"))
    tensors = {
        name: tensor
        for name, tensor in load_file(shard).items()
        if is_quantized(name.rpartition(".weight")[0]) and part in name and not (lacking and name.endswith(lacking))
    }

    def stream(names: list[str]) -> Iterator[tuple[str, Any]]:
        for i, name in enumerate(names):
            if i == after:
                raise OSError("the next tensor cannot be read")
            yield name, tensors[name]

    scales = [name for name in tensors if "scale" in name]
    for names in ([name for name in tensors if name not in scales], scales) if apart else (list(tensors),):
        worker.model_runner.get_model().load_weights(stream(names))


def load_buckets(worker: Any, model: str) -> None:
    """Load an unquantized checkpoint as a trainer does: `BUCKET` weights at a time, quantized in blocks if they are.

    Trainers quantize if the engine's config is vLLM's own class. See `load_in_place` about other layers on a CPU.
    """
    import torch
    from safetensors.torch import load_file
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    from fp8moe_plugin.layers.weights import per_block_cast_to_fp8

    config = worker.model_runner.vllm_config.quant_config
    assert isinstance(config, Fp8Config)
    assert list(config.weight_block_size) == [128, 128]
    (shard,) = (entry.path for entry in os.scandir(model) if entry.name.endswith(".safetensors"))
    weights = [(name, tensor, is_quantized(name.removesuffix(".weight"))) for name, tensor in load_file(shard).items()]
    if not torch.cuda.is_available():
        weights = [weight for weight in weights if weight[-1]]
    for begin in range(0, len(weights), BUCKET):
        bucket = []
        for name, tensor, in_blocks in weights[begin : begin + BUCKET]:
            if in_blocks:
                weight, scales = per_block_cast_to_fp8(tensor)
                bucket += [(name, weight), (f"{name}_scale_inv", scales)]
            else:
                bucket += [(name, tensor)]
        worker.model_runner.get_model().load_weights(bucket)


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
            for way in command.keys() & {"reload", "load", "buckets", "wait"}:
                getattr(engine, way)(command[way], **command.get("how", {}))
            answer = engine.ask()
        except Exception as error:  # noqa: BLE001  # from another process, an error comes as its text
            ours = isinstance(error, Fp8MoeError) or "Restart the engine" in str(error)
            answer = {"refused" if ours else "raised": str(error) if ours else repr(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
