"""Answers of a tiny Qwen3.5 on a CPU, without and with multi-token prediction, and with a merged shared expert.

python -m tests.engine.generate_qwen3_5 CHECKPOINT

Prints two lines of JSON, then the number of layers for multi-token prediction whose experts are ours, then another line
of JSON, where the shared expert is merged as on a GPU. vLLM's kernels for the states of linear attention need Triton;
its interpreter stands in for the CPU backend.
"""

import gc
import json
import os
import sys
from typing import Any

from benchmarks.checkpoints.answers import ask, random_prompts
from tests.checkpoint.engine_models import Images
from tests.engine.generate import GENERATED, LIMITS, PROMPT_TOKENS, PROMPTS, share_imports
from tests.engine.generate_deepseek_v4 import interpret_triton


def our_draft_layers(worker: Any) -> int:
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod

    drafter = worker.model_runner.speculator.model
    experts = [module for module in drafter.modules() if isinstance(module, RoutedExperts)]
    return sum(isinstance(layer.quant_method, Fp8MoeMethod) for layer in experts)


def route_as_on_gpu() -> None:
    """Make our router choose the experts, for which the reference computes, and keep shared experts' gates unpacked."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from fp8moe_plugin.layers.vllm import compat, moe
    from fp8moe_plugin.layers.vllm.router import FusedRouter

    pack = UnquantizedLinearMethod.process_weights_after_loading
    UnquantizedLinearMethod.process_weights_after_loading = lambda self, layer: (
        None if layer.prefix.endswith("shared_expert_gate") else pack(self, layer)
    )
    moe.fused_router = lambda layer, experts: FusedRouter(experts, compat.runner_of(layer).router)


def main() -> None:
    interpret_triton()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    sys.meta_path.append(Images)
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    share_imports()
    for speculative, merged in ((None, False), ({"method": "mtp", "num_speculative_tokens": 1}, False), (None, True)):
        if merged:
            route_as_on_gpu()
        own = {"quantization": "fp8moe", "dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True}
        llm = LLM(sys.argv[1], speculative_config=speculative, **own, **LIMITS)
        print(json.dumps(ask(llm, random_prompts(PROMPTS, PROMPT_TOKENS), GENERATED)), file=lines, flush=True)
        if speculative:
            print(*llm.collective_rpc(our_draft_layers), file=lines, flush=True)
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
