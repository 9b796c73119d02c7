"""SGLang's mixture-of-experts block of gpt-oss on fp8moe, in a process of its own, against float64 math.

    python -m tests.layers.sglang.gpt_oss_block

Prints as JSON, by form of the experts, `error`, relative, and the `name` by which SGLang's model chooses its loader.
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from transformers import GptOssConfig

from fp8moe_plugin.settings import settings
from tests.engine.tiny_gpt_oss import QUANTIZATION
from tests.helpers import environment, random_tokens, relative_l2, seeded
from tests.layers.experts import EXPERTS, TOPK
from tests.layers.gpt_oss import CHECKPOINT, HIDDEN, INTERMEDIATE, experts_in_float64, named
from tests.layers.sglang.moe_block import SHAPE, config
from tests.layers.sglang.process import start

MODEL = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "swiglu_limit": 7.0}


def make_block(form: str) -> tuple[Any, Any]:
    """Returns SGLang's block, with the weights of CHECKPOINT, and its quantization config."""
    from sglang.srt.models.gpt_oss import GptOssForCausalLM, GptOssSparseMoeBlock

    described = GptOssConfig(**MODEL, num_experts_per_tok=TOPK, torch_dtype="bfloat16")
    with environment("FP8MOE_FP4_EXPERTS", form):
        settings.cache_clear()
        quant = get_quantization_config("fp8moe").from_config(QUANTIZATION)
    block = GptOssSparseMoeBlock(0, described, quant_config=quant, prefix="model.layers.0.mlp")
    model = torch.nn.Module()
    model.config, model.mlp = described, block
    GptOssForCausalLM._load_mxfp4_experts_weights(model, named(CHECKPOINT, "mlp.experts"))
    block.experts.quant_method.process_weights_after_loading(block.experts)
    return block, quant


def main() -> None:
    load_plugins()
    torch.set_default_dtype(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config(SHAPE, fp8=True)))  # the block has its own
        start(ServerArgs(model_path=folder, device="cpu", quantization="fp8moe"))
    gen, found = seeded(0, torch.device("cpu")), {}
    x = 4 * random_tokens(gen, 9, HIDDEN)
    for form in ("fp8", "mxfp4"):
        block, quant = make_block(form)
        block.router.weight.data.copy_(random_tokens(gen, EXPERTS, HIDDEN) / HIDDEN**0.5)
        block.router.bias.data.copy_(random_tokens(gen, EXPERTS))
        with torch.inference_mode():
            logits = x.float() @ block.router.weight.float().T + block.router.bias.float()
            weights, ids = logits.topk(TOPK)
            wanted = experts_in_float64(x, weights.softmax(-1), ids)
            error = relative_l2(block(x.clone(), SimpleNamespace()), wanted)
        found[form] = {"error": error, "name": quant.get_name()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
