"""A mixture-of-experts block of SGLang's DeepSeek-V3 on fp8moe, in a process of its own, against float32 math.

    python -m tests.layers.sglang.moe_block DEVICE EXPERTS [fused]

`fused`: SGLang fuses the shared expert into the routed ones, as expert number EXPERTS, which each token uses.
Prints, as JSON, relative errors, each the median of the tokens: `error` of the block as it is, and `unscaled` of one
whose experts leave `routed_scaling_factor` out; the number of `experts`, and `topk` of a token.
"""

import json
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig

from benchmarks.checkpoints.synthetic import PRESETS, config, quantization_config
from fp8moe_plugin.ops.reference import dequantize_blocks
from tests.helpers import random_tokens, random_weights, seeded
from tests.layers.sglang.process import start

TOKENS = 64
SHAPE = replace(PRESETS["deepseek_v3", "tiny"], topk=8, groups=8, topk_groups=4, yarn=True)
Weights = dict[str, tuple[torch.Tensor, torch.Tensor]]


def make_block(folder: str, device: str, experts: int, fused: bool) -> tuple[Any, Any]:
    """SGLang's block and the model's configuration."""
    described = config(SHAPE, fp8=True) | {"n_routed_experts": experts}
    Path(folder, "config.json").write_text(json.dumps(described))
    start(ServerArgs(model_path=folder, device=device, quantization="fp8moe", disable_shared_experts_fusion=not fused))
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    model = AutoConfig.from_pretrained(folder)
    quant = get_quantization_config("fp8moe").from_config(quantization_config(SHAPE))
    with torch.device(device), sharing(fused):
        block = DeepseekV2MoE(model, layer_id=1, quant_config=quant, prefix="model.layers.1.mlp")
    return block, model


def sharing(fused: bool) -> AbstractContextManager[None]:
    """Since SGLang 0.5.22 its loader of models decides, from the command line, whether a block fuses shared experts."""
    from sglang.srt.layers.moe import utils

    if not hasattr(utils, "SharedExpertsConfig"):
        return nullcontext()
    layout = utils.SharedExpertsConfig(fusion_disabled=not fused, num_fused_shared_experts=int(fused))
    return utils.get_model().override(shared_experts=layout)


def load(block: Any, weights: Weights, experts: int, fused: bool) -> None:
    """The weights, by the names of a checkpoint, through the block's own loaders."""
    for name, parts in weights.items():
        *of, projection = name.split(".")
        for kind, tensor in zip(("weight", "weight_scale_inv"), parts, strict=True):
            if of[0] == "shared_experts" and not fused:
                down = projection == "down_proj"
                param = getattr(getattr(block.shared_experts, projection if down else "gate_up_proj"), kind)
                param.weight_loader(param, tensor, *([] if down else [["gate_proj", "up_proj"].index(projection)]))
                continue
            expert = experts if of[0] == "shared_experts" else int(of[1])
            shard = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[projection]
            param = getattr(block.experts, f"{'w2' if shard == 'w2' else 'w13'}_{kind}")
            param.weight_loader(param, tensor, f"{name}.{kind}", shard_id=shard, expert_id=expert)
    for module in block.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


def expected(block: Any, model: Any, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Returns what the block is to compute, float32 `[T, H]`: the model as DeepSeek describes it."""

    def mlp(prefix: str, token: torch.Tensor) -> torch.Tensor:
        gate, up, down = (dequantize_blocks(*weights[f"{prefix}.{p}_proj"]).float() for p in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ token) * (up @ token))

    x = x.float()
    scores = (x @ block.gate.weight.float().T).sigmoid()
    biased = scores + block.gate.e_score_correction_bias.float()
    groups = biased.view(len(x), model.n_group, -1)
    best = groups.topk(2).values.sum(-1).topk(model.topk_group).indices
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=x.device).scatter(1, best, True)
    ids = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(model.num_experts_per_tok).indices
    routed = scores.gather(1, ids)
    routed = model.routed_scaling_factor * routed / routed.sum(1, keepdim=True)
    rows = [
        mlp("shared_experts", token)
        + sum(weight * mlp(f"experts.{expert}", token) for weight, expert in zip(*of, strict=True))
        for token, of in zip(x, zip(routed, ids.tolist(), strict=True), strict=True)
    ]
    return torch.stack(rows)


def main() -> None:
    device, experts, fused = sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["fused"]
    load_plugins()
    gen = seeded(0, torch.device(device))
    hidden, width = SHAPE.hidden, SHAPE.moe_intermediate
    weights: Weights = {}
    for prefix in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
        for name, n, k in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            weights[f"{prefix}.{name}_proj"] = random_weights(gen, n, k)
    torch.set_default_dtype(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        block, model = make_block(folder, device, experts, fused)
    load(block, weights, experts, fused)
    block.gate.weight.data.copy_(random_tokens(gen, experts, hidden) * 2 / hidden**0.5)
    block.gate.e_score_correction_bias.data.copy_(random_tokens(gen, experts) * 0.1)
    x = random_tokens(gen, TOKENS, hidden)
    found: dict[str, Any] = {"experts": len(block.experts.w2_weight)}
    method = block.experts.quant_method
    apply = method.apply

    def counted(layer: Any, dispatch_output: Any) -> Any:
        found["topk"] = dispatch_output.topk_output.topk_ids.shape[1]
        return apply(layer, dispatch_output)

    method.apply = counted
    with torch.inference_mode():
        wanted = expected(block, model, weights, x)
        for name in ("error", "unscaled"):
            difference = (block(x.clone()).float() - wanted).norm(dim=1) / wanted.norm(dim=1)
            found[name] = difference.median().item()
            method.experts = method.dispatched_experts
    print(json.dumps(found))


if __name__ == "__main__":
    main()
