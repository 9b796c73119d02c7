"""A tiny DeepSeek-V4 with a layer of each kind, in the names, dtypes and scales of the published checkpoints.

Sizes are as in `benchmarks.checkpoints.synthetic`, so that a forward pass behaves like a trained model's. Experts are
in MXFP4, or the same weights in block FP8 with E8M0 scales, without `expert_dtype`, as in converted checkpoints. No
gate or up reaches the limit of SwiGLU, because vLLM's kernel of MXFP4 experts for CPUs ignores it.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.checkpoints.mxfp4 import draw, rounded
from benchmarks.checkpoints.synthetic import with_powers_of_two
from fp8moe_plugin.layers.recode import block_fp8

HIDDEN, INNER, VOCAB, HEADS, HEAD_DIM, RANK, GROUPS, STREAMS = 256, 256, 512, 8, 512, 128, 2, 4
EXPERTS, TOPK = 256, 6  # vLLM's router for CPUs has no other number of experts
RATIOS = (0, 4, 128)  # tokens for each entry of a layer's cache; only the layer of 4 has an indexer
INDEX_HEADS, INDEX_DIM = 64, 128
RESIDUAL = 1 / 8  # gain of the layers that write to the residual stream
E8M0 = torch.float8_e8m0fnu
CONFIG: dict[str, Any] = {
    **{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16"},
    **{"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": len(RATIOS), "max_position_embeddings": 4096},
    **{"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "qk_rope_head_dim": 64},
    **{"q_lora_rank": RANK, "o_lora_rank": RANK, "o_groups": GROUPS, "sliding_window": 128},
    **{"index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM, "index_topk": 512, "compress_ratios": list(RATIOS)},
    **{"n_routed_experts": EXPERTS, "num_experts_per_tok": TOPK, "moe_intermediate_size": INNER, "n_shared_experts": 1},
    **{"num_hash_layers": 2, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True},
    **{"routed_scaling_factor": 1.5, "hidden_act": "silu", "swiglu_limit": 10.0, "num_nextn_predict_layers": 0},
    **{"hc_mult": STREAMS, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "bos_token_id": 0},
    **{"rope_theta": 10000, "compress_rope_theta": 160000, "eos_token_id": 1, "tie_word_embeddings": False},
    "rope_scaling": {
        **{"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    },
    "quantization_config": {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
        "weight_block_size": [128, 128],
    },
}
Tensors = Iterator[tuple[str, torch.Tensor]]


def dense(name: str, n: int, k: int, gain: float = 1.0) -> Tensors:
    q, scales = with_powers_of_two(draw(name, n, k) * gain)
    yield f"{name}.weight", q
    yield f"{name}.scale", scales.to(E8M0)


def plain(name: str, *shape: int, std: float | None = None) -> Tensors:
    yield name, draw(name, *shape, std=std).bfloat16()


def norm(name: str, size: int) -> Tensors:
    yield f"{name}.weight", torch.ones(size).bfloat16()


def routed(name: str, w: str, n: int, k: int, gain: float, fp8: bool) -> Tensors:
    codes, exponents = rounded(draw(f"{name}.{w}", EXPERTS, n, k) * gain)
    for e in range(EXPERTS):
        weight, scale = f"{name}.{e}.{w}.weight", f"{name}.{e}.{w}.scale"
        if fp8:
            q, scales = block_fp8(weight, codes[e], exponents[e])
            yield from ((weight, q), (scale, scales.to(E8M0)))
        else:
            yield from ((weight, codes[e].view(torch.int8)), (scale, exponents[e]))


def compressor(name: str, dim: int, ratio: int) -> Tensors:
    width = (2 if ratio == 4 else 1) * dim
    yield from plain(f"{name}.wkv.weight", width, HIDDEN)
    yield from plain(f"{name}.wgate.weight", width, HIDDEN)
    yield f"{name}.ape", draw(f"{name}.ape", ratio, width, std=0.1)
    yield from norm(f"{name}.norm", dim)


def attention(name: str, ratio: int) -> Tensors:
    yield from dense(f"{name}.wq_a", RANK, HIDDEN)
    yield from dense(f"{name}.wkv", HEAD_DIM, HIDDEN)
    yield from dense(f"{name}.wq_b", HEADS * HEAD_DIM, RANK)
    yield from dense(f"{name}.wo_a", GROUPS * RANK, HEADS * HEAD_DIM // GROUPS)
    yield from dense(f"{name}.wo_b", HIDDEN, GROUPS * RANK, RESIDUAL)
    yield from norm(f"{name}.q_norm", RANK)
    yield from norm(f"{name}.kv_norm", HEAD_DIM)
    yield f"{name}.attn_sink", draw(f"{name}.attn_sink", HEADS, std=0.1)
    if ratio:
        yield from compressor(f"{name}.compressor", HEAD_DIM, ratio)
    if ratio == 4:
        yield from dense(f"{name}.indexer.wq_b", INDEX_HEADS * INDEX_DIM, RANK)
        yield from plain(f"{name}.indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)
        yield from compressor(f"{name}.indexer.compressor", INDEX_DIM, ratio)


def experts(name: str, layer: int, fp8: bool) -> Tensors:
    yield from plain(f"{name}.gate.weight", EXPERTS, HIDDEN, std=2 / math.sqrt(HIDDEN))
    if layer < CONFIG["num_hash_layers"]:
        yield f"{name}.gate.tid2eid", draw(f"{name}.tid2eid", VOCAB, EXPERTS).topk(TOPK).indices
    else:
        yield f"{name}.gate.bias", draw(f"{name}.gate.bias", EXPERTS, std=0.1)
    for w, n, k, gain in (("w1", INNER, HIDDEN, 1), ("w2", HIDDEN, INNER, RESIDUAL), ("w3", INNER, HIDDEN, 1)):
        yield from dense(f"{name}.shared_experts.{w}", n, k, gain)
        yield from routed(f"{name}.experts", w, n, k, gain, fp8)


def tensors(fp8: bool) -> Tensors:
    yield from plain("embed.weight", VOCAB, HIDDEN, std=1.0)
    yield from plain("head.weight", VOCAB, HIDDEN, std=3 / math.sqrt(HIDDEN))
    yield from norm("norm", HIDDEN)
    yield "hc_head_fn", draw("hc_head_fn", STREAMS, STREAMS * HIDDEN, std=(STREAMS * HIDDEN) ** -0.5)
    yield "hc_head_base", torch.zeros(STREAMS)
    yield "hc_head_scale", torch.ones(1)
    mixes = (2 + STREAMS) * STREAMS
    for i, ratio in enumerate(RATIOS):
        layer = f"layers.{i}"
        for part in ("attn", "ffn"):
            hc = f"{layer}.hc_{part}"
            yield from norm(f"{layer}.{part}_norm", HIDDEN)
            yield f"{hc}_fn", draw(f"{hc}_fn", mixes, STREAMS * HIDDEN, std=(STREAMS * HIDDEN) ** -0.5)
            yield f"{hc}_base", draw(f"{hc}_base", mixes, std=0.1)
            yield f"{hc}_scale", torch.ones(3)
        yield from attention(f"{layer}.attn", ratio)
        yield from experts(f"{layer}.ffn", i, fp8)


def write(folder: Path, fp8: bool) -> None:
    folder.mkdir()
    apart = {name: tensor.clone() for name, tensor in tensors(fp8)}
    save_file(apart, folder / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG if fp8 else CONFIG | {"expert_dtype": "fp4"}
    (folder / "config.json").write_text(json.dumps(config))
