"""Write synthetic mixture-of-experts checkpoints that a real engine loads: safetensors, config.json, tokenizer.

    python -m benchmarks.checkpoints.synthetic --family deepseek_v3 --preset tiny --out DIR [--bf16]

The scale of the weights, chosen so that a forward pass behaves like a trained model's:
- linear layers: standard deviation 1.5 / sqrt(inputs), 0.018 at 7168 inputs, which keeps activations near 1; an eighth
  of that for layers that write to the residual stream, so that a block changes the stream by about a third;
- routers: 2 / sqrt(hidden), so that logits have a standard deviation of about 2, tokens differ clearly in their experts
  and experts in their load; 0.1 for DeepSeek's correction bias;
- embeddings: 1; output head: 3 / sqrt(hidden), so that the best token stands out; norms: all ones.

The random numbers of a tensor depend only on the seed and its name. `--bf16` draws and quantizes the same weights and
writes them dequantized: the two checkpoints are the same model, up to the rounding of weights to BF16.
"""

import argparse
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.checkpoints.tokenizer import write_tokenizer
from fp8moe_plugin.layers.weights import per_block_cast_to_fp8
from fp8moe_plugin.ops.reference import dequantize_blocks

SHARD_BYTES = 4 << 30
YARN = {
    **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. The first block is common, the second DeepSeek-V3's, the third DeepSeek-V3.2's, the fourth
    Qwen3-MoE's, the fifth Qwen3.5's.
    """

    family: str
    hidden: int
    vocab: int
    heads: int
    moe_layers: int
    experts: int
    topk: int
    moe_intermediate: int
    residual_gain: float = 1 / 8  # gain of the layers that write to the residual stream
    block_spread: float = (
        0  # standard deviation of log2 of the magnitude of 128x128 blocks; with 0, scales hardly differ
    )
    ue8m0: bool = False  # scales are powers of two, as in DeepSeek-V3.1
    swiglu_limit: float | None = None  # of gates and ups, as in DeepSeek-V4; vLLM's DeepSeek-V3 ignores it

    dense_layers: int = 0
    mtp_layers: int = 0
    dense_intermediate: int = 0
    groups: int = 1
    topk_groups: int = 1
    q_lora: int = 0
    kv_lora: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    yarn: bool = False  # scaled rotary embeddings, as published; SGLang does not start without

    index_heads: int = 0  # 0: attention to all tokens
    index_dim: int = 128
    index_topk: int = 2048

    kv_heads: int = 0
    head_dim: int = 128

    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_dim: int = 128  # of a head of linear attention

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers


# Linear layers of a vision tower of one layer, which no engine quantizes.
VISION = [
    *(f"model.visual.blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")),
    *(f"model.visual.merger.{name}" for name in ("linear_fc1", "linear_fc2")),
]
PRESETS = {
    ("deepseek_v3", "tiny"): Shape(
        family="deepseek_v3", hidden=256, vocab=512, heads=4, moe_layers=2, experts=16, topk=4, moe_intermediate=256,
        dense_layers=1, mtp_layers=1, dense_intermediate=512, groups=4, topk_groups=2, q_lora=256,
    ),
    ("deepseek_v3", "small"): Shape(
        family="deepseek_v3", hidden=1024, vocab=512, heads=32, moe_layers=1, experts=32, topk=4, moe_intermediate=512,
        dense_layers=1, mtp_layers=1, dense_intermediate=1024, groups=4, topk_groups=2, q_lora=512,
    ),
    ("deepseek_v3", "dsv3-3layer"): Shape(
        family="deepseek_v3", hidden=7168, vocab=129280, heads=128, moe_layers=2, experts=256, topk=8,
        moe_intermediate=2048, dense_layers=1, dense_intermediate=18432, groups=8, topk_groups=4, q_lora=1536,
    ),
    ("deepseek_v3", "dsv3-tp8-30layer"): Shape(  # what a rank of eight has of half of the layers
        family="deepseek_v3", hidden=7168, vocab=16160, heads=16, moe_layers=29, experts=256, topk=8,
        moe_intermediate=256, dense_layers=1, dense_intermediate=2304, groups=8, topk_groups=4, q_lora=1536,
    ),
    ("deepseek_v3", "dsv32-3layer"): Shape(
        family="deepseek_v3", hidden=7168, vocab=129280, heads=128, moe_layers=2, experts=256, topk=8,
        moe_intermediate=2048, dense_layers=1, dense_intermediate=18432, groups=8, topk_groups=4, q_lora=1536,
        index_heads=64,
    ),
    ("qwen3_moe", "tiny"): Shape(
        family="qwen3_moe", hidden=256, vocab=512, heads=4, moe_layers=2, experts=16, topk=4, moe_intermediate=256,
        kv_heads=2,
    ),
    ("qwen3_moe", "small"): Shape(
        family="qwen3_moe", hidden=1024, vocab=512, heads=16, moe_layers=1, experts=32, topk=4, moe_intermediate=512,
        kv_heads=4,
    ),
    ("qwen3_moe", "qwen3-24layer"): Shape(
        family="qwen3_moe", hidden=2048, vocab=151936, heads=32, moe_layers=24, experts=128, topk=8,
        moe_intermediate=768, kv_heads=4,
    ),
    ("qwen3_5_moe", "tiny"): Shape(
        family="qwen3_5_moe", hidden=256, vocab=512, heads=4, moe_layers=4, experts=16, topk=4, moe_intermediate=128,
        kv_heads=2, head_dim=64, linear_key_heads=2, linear_value_heads=4, linear_dim=64,
    ),
    ("qwen3_5_moe", "qwen3.5-35b"): Shape(
        family="qwen3_5_moe", hidden=2048, vocab=248320, heads=16, moe_layers=40, experts=256, topk=8,
        moe_intermediate=512, kv_heads=2, head_dim=256, linear_key_heads=16, linear_value_heads=32,
    ),
}  # fmt: skip
PRESETS["qwen3_moe", "qwen3-48layer"] = replace(PRESETS["qwen3_moe", "qwen3-24layer"], moe_layers=48)


@dataclass(frozen=True)
class Tensor:
    """One weight to draw; `quantized` weights are stored as FP8 with scales, others as `dtype`."""

    name: str
    shape: tuple[int, ...]
    std: float | None = None  # all ones if None
    quantized: bool = False
    dtype: torch.dtype = torch.bfloat16


def linear(name: str, n: int, k: int) -> Tensor:
    return Tensor(f"{name}.weight", (n, k), std=1.5 / math.sqrt(k), quantized=True)


def norm(name: str, size: int) -> Tensor:
    return Tensor(f"{name}.weight", (size,))


def mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Tensor]:
    yield linear(f"{prefix}.gate_proj", intermediate, hidden)
    yield linear(f"{prefix}.up_proj", intermediate, hidden)
    yield linear(f"{prefix}.down_proj", hidden, intermediate)


def router_and_experts(prefix: str, s: Shape) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}.gate.weight", (s.experts, s.hidden), std=2 / math.sqrt(s.hidden))
    for e in range(s.experts):
        yield from mlp(f"{prefix}.experts.{e}", s.hidden, s.moe_intermediate)


def embedding(name: str, s: Shape) -> Tensor:
    return Tensor(f"{name}.weight", (s.vocab, s.hidden), std=1.0)


def head(name: str, s: Shape) -> Tensor:
    return Tensor(f"{name}.weight", (s.vocab, s.hidden), std=3 / math.sqrt(s.hidden))


def mla(prefix: str, s: Shape) -> Iterator[Tensor]:
    yield linear(f"{prefix}.q_a_proj", s.q_lora, s.hidden)
    yield norm(f"{prefix}.q_a_layernorm", s.q_lora)
    yield linear(f"{prefix}.q_b_proj", s.heads * (s.nope_dim + s.rope_dim), s.q_lora)
    yield linear(f"{prefix}.kv_a_proj_with_mqa", s.kv_lora + s.rope_dim, s.hidden)
    yield norm(f"{prefix}.kv_a_layernorm", s.kv_lora)
    yield linear(f"{prefix}.kv_b_proj", s.heads * (s.nope_dim + s.v_dim), s.kv_lora)
    yield linear(f"{prefix}.o_proj", s.hidden, s.heads * s.v_dim)


def indexer(prefix: str, s: Shape) -> Iterator[Tensor]:
    yield linear(f"{prefix}.wq_b", s.index_heads * s.index_dim, s.q_lora)
    yield Tensor(f"{prefix}.wk.weight", (s.index_dim, s.hidden), std=1.5 / math.sqrt(s.hidden))
    yield Tensor(f"{prefix}.weights_proj.weight", (s.index_heads, s.hidden), std=1.5 / math.sqrt(s.hidden))
    yield norm(f"{prefix}.k_norm", s.index_dim)
    yield Tensor(f"{prefix}.k_norm.bias", (s.index_dim,), std=0.1)


def gqa(prefix: str, s: Shape) -> Iterator[Tensor]:
    yield linear(f"{prefix}.q_proj", s.heads * s.head_dim, s.hidden)
    yield linear(f"{prefix}.k_proj", s.kv_heads * s.head_dim, s.hidden)
    yield linear(f"{prefix}.v_proj", s.kv_heads * s.head_dim, s.hidden)
    yield linear(f"{prefix}.o_proj", s.hidden, s.heads * s.head_dim)
    yield norm(f"{prefix}.q_norm", s.head_dim)
    yield norm(f"{prefix}.k_norm", s.head_dim)


def gain(name: str, size: int) -> Tensor:
    """A norm of Qwen3.5, which multiplies by 1 plus the weight."""
    return Tensor(f"{name}.weight", (size,), std=0.0)


def gated_attention(prefix: str, s: Shape) -> Iterator[Tensor]:
    yield linear(f"{prefix}.q_proj", 2 * s.heads * s.head_dim, s.hidden)  # half of the rows are a gate
    yield linear(f"{prefix}.k_proj", s.kv_heads * s.head_dim, s.hidden)
    yield linear(f"{prefix}.v_proj", s.kv_heads * s.head_dim, s.hidden)
    yield linear(f"{prefix}.o_proj", s.hidden, s.heads * s.head_dim)
    yield gain(f"{prefix}.q_norm", s.head_dim)
    yield gain(f"{prefix}.k_norm", s.head_dim)


def linear_attention(prefix: str, s: Shape) -> Iterator[Tensor]:
    """A gated delta net."""
    values, heads = s.linear_value_heads * s.linear_dim, s.linear_value_heads
    keys_and_values = 2 * s.linear_key_heads * s.linear_dim + values
    yield linear(f"{prefix}.in_proj_qkv", keys_and_values, s.hidden)
    yield linear(f"{prefix}.in_proj_z", values, s.hidden)
    for name in "ab":
        yield Tensor(f"{prefix}.in_proj_{name}.weight", (heads, s.hidden), std=1.5 / math.sqrt(s.hidden))
    yield Tensor(f"{prefix}.conv1d.weight", (keys_and_values, 1, 4), std=0.5)
    yield Tensor(f"{prefix}.A_log", (heads,), std=1.0)
    yield Tensor(f"{prefix}.dt_bias", (heads,), std=1.0)
    yield norm(f"{prefix}.norm", s.linear_dim)
    yield linear(f"{prefix}.out_proj", s.hidden, values)


def is_full_attention(i: int) -> bool:
    """Whether a layer of Qwen3.5 is one of softmax attention."""
    return i % 4 == 3


def qwen3_5_layer(i: int, s: Shape) -> Iterator[Tensor]:
    prefix = f"model.language_model.layers.{i}"
    yield gain(f"{prefix}.input_layernorm", s.hidden)
    yield gain(f"{prefix}.post_attention_layernorm", s.hidden)
    if is_full_attention(i):
        yield from gated_attention(f"{prefix}.self_attn", s)
    else:
        yield from linear_attention(f"{prefix}.linear_attn", s)
    yield from router_and_experts(f"{prefix}.mlp", s)
    yield from mlp(f"{prefix}.mlp.shared_expert", s.hidden, s.moe_intermediate)
    yield Tensor(f"{prefix}.mlp.shared_expert_gate.weight", (1, s.hidden), std=1.5 / math.sqrt(s.hidden))


def layer(i: int, s: Shape) -> Iterator[Tensor]:
    if s.family == "qwen3_5_moe":
        yield from qwen3_5_layer(i, s)
        return
    prefix = f"model.layers.{i}"
    yield norm(f"{prefix}.input_layernorm", s.hidden)
    yield norm(f"{prefix}.post_attention_layernorm", s.hidden)
    if s.family == "qwen3_moe":
        yield from gqa(f"{prefix}.self_attn", s)
        yield from router_and_experts(f"{prefix}.mlp", s)
        return
    yield from mla(f"{prefix}.self_attn", s)
    if s.index_heads:
        yield from indexer(f"{prefix}.self_attn.indexer", s)
    if i < s.dense_layers:
        yield from mlp(f"{prefix}.mlp", s.hidden, s.dense_intermediate)
        return
    yield from router_and_experts(f"{prefix}.mlp", s)
    yield Tensor(f"{prefix}.mlp.gate.e_score_correction_bias", (s.experts,), std=0.1, dtype=torch.float32)
    yield from mlp(f"{prefix}.mlp.shared_experts", s.hidden, s.moe_intermediate)


def mtp_layer(i: int, s: Shape) -> Iterator[Tensor]:
    """DeepSeek's multi-token-prediction layer: its own embedding and head (here copies), and one more MoE layer."""
    prefix = f"model.layers.{i}"
    yield from layer(i, s)
    yield norm(f"{prefix}.enorm", s.hidden)
    yield norm(f"{prefix}.hnorm", s.hidden)
    yield Tensor(f"{prefix}.eh_proj.weight", (s.hidden, 2 * s.hidden), std=1 / math.sqrt(2 * s.hidden))
    yield norm(f"{prefix}.shared_head.norm", s.hidden)
    yield head(f"{prefix}.shared_head.head", s)
    yield embedding(f"{prefix}.embed_tokens", s)


def tensors(s: Shape) -> Iterator[Tensor]:
    model = "model.language_model" if s.family == "qwen3_5_moe" else "model"
    yield embedding(f"{model}.embed_tokens", s)
    for i in range(s.layers):
        yield from layer(i, s)
    for i in range(s.layers, s.layers + s.mtp_layers):
        yield from mtp_layer(i, s)
    yield (gain if s.family == "qwen3_5_moe" else norm)(f"{model}.norm", s.hidden)
    yield head("lm_head", s)


def config(s: Shape, fp8: bool) -> dict[str, Any]:
    """Returns the config.json of the model's family."""
    common = {
        "hidden_size": s.hidden,
        "vocab_size": s.vocab,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_experts_per_tok": s.topk,
        "moe_intermediate_size": s.moe_intermediate,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    quantization = {"quantization_config": quantization_config(s)} if fp8 else {}
    if s.family == "qwen3_5_moe":
        return qwen3_5_config(s, common) | quantization
    family = deepseek_config(s) if s.family == "deepseek_v3" else qwen_config(s)
    return common | family | quantization


def deepseek_config(s: Shape) -> dict[str, Any]:
    sparse = {"index_n_heads": s.index_heads, "index_head_dim": s.index_dim, "index_topk": s.index_topk}
    return {
        "architectures": ["DeepseekV32ForCausalLM" if s.index_heads else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v32" if s.index_heads else "deepseek_v3",
        **(sparse if s.index_heads else {}),
        "num_key_value_heads": s.heads,
        "intermediate_size": s.dense_intermediate,
        "first_k_dense_replace": s.dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "n_group": s.groups,
        "topk_group": s.topk_groups,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": s.mtp_layers,
        "q_lora_rank": s.q_lora,
        "kv_lora_rank": s.kv_lora,
        "qk_nope_head_dim": s.nope_dim,
        "qk_rope_head_dim": s.rope_dim,
        "v_head_dim": s.v_dim,
        **({"swiglu_limit": s.swiglu_limit} if s.swiglu_limit else {}),
        **({"rope_scaling": YARN} if s.yarn else {}),
    }


def qwen_config(s: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": 2 * s.moe_intermediate,
        "num_experts": s.experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    }


def qwen3_5_config(s: Shape, common: dict[str, Any]) -> dict[str, Any]:
    """The published models also see. With `language_model_only` engines need no weights of the vision tower."""
    third = math.ceil(s.head_dim / 24)
    kinds = ["full_attention" if is_full_attention(i) else "linear_attention" for i in range(s.layers)]
    text = common | {
        "model_type": "qwen3_5_moe_text",
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": kinds,
        "head_dim": s.head_dim,
        "num_key_value_heads": s.kv_heads,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": s.linear_dim,
        "linear_value_head_dim": s.linear_dim,
        "linear_num_key_heads": s.linear_key_heads,
        "linear_num_value_heads": s.linear_value_heads,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "num_experts": s.experts,
        "shared_expert_intermediate_size": s.moe_intermediate,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [third, third, s.head_dim // 8 - 2 * third],
        },
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": {"depth": 1},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def quantization_config(s: Shape) -> dict[str, Any]:
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    if s.ue8m0:
        quantization["scale_fmt"] = "ue8m0"
    if s.family == "qwen3_moe":  # an engine treats its routers as linear layers
        quantization["modules_to_not_convert"] = ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(s.layers))]
    if s.family == "qwen3_5_moe":
        plain = [t.name for t in tensors(s) if len(t.shape) > 1 and not t.quantized]
        quantization["modules_to_not_convert"] = [*(name.removesuffix(".weight") for name in plain), *VISION]
    return quantization


def draw(t: Tensor, s: Shape, seed: int, device: torch.device) -> torch.Tensor:
    """Returns the tensor's values, float32. The MTP layer's embedding and head repeat the model's."""
    if t.std is None:
        return torch.ones(t.shape, device=device)
    name = t.name
    if name.endswith("shared_head.head.weight"):
        name = "lm_head.weight"
    elif name.endswith("embed_tokens.weight"):
        name = "model.embed_tokens.weight"
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode(), seed))  # it takes 32 bits on a CPU
    writes = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))  # to the residual stream
    std = t.std * (s.residual_gain if writes else 1)
    values = torch.randn(t.shape, generator=generator, device=device) * std
    if t.quantized and s.block_spread:
        blocks = [math.ceil(size / 128) for size in t.shape]
        gains = torch.exp2(s.block_spread * torch.randn(blocks, generator=generator, device=device))
        gains /= gains.square().mean().sqrt()
        values *= gains.repeat_interleave(128, 0).repeat_interleave(128, 1)[: t.shape[0], : t.shape[1]]
    return values


def with_powers_of_two(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `per_block_cast_to_fp8`, with each scale rounded up to a power of two."""
    scales = per_block_cast_to_fp8(values)[1]
    mantissa, exponent = scales.frexp()
    scales = torch.ones_like(scales).ldexp(exponent - (mantissa == 0.5).int())
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: values.shape[0], : values.shape[1]]
    return (values / wide).to(torch.float8_e4m3fn), scales


def stored(t: Tensor, values: torch.Tensor, s: Shape, fp8: bool) -> dict[str, torch.Tensor]:
    """Returns the tensors that the checkpoint stores for this weight."""
    if not t.quantized:
        return {t.name: values.to(t.dtype)}
    q, scales = with_powers_of_two(values) if s.ue8m0 else per_block_cast_to_fp8(values)
    if fp8:
        return {t.name: q, f"{t.name}_scale_inv": scales}
    return {t.name: dequantize_blocks(q, scales).to(t.dtype)}


class ShardWriter:
    """Collects tensors in host memory and writes a safetensors file whenever `SHARD_BYTES` are full."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shard: dict[str, torch.Tensor] = {}
        self.weight_map: dict[str, str] = {}
        self.shard_bytes = self.total_bytes = self.shards = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self.shard and self.shard_bytes + tensor.nbytes > SHARD_BYTES:
            self.flush()
        self.shard[name] = tensor.cpu()
        self.shard_bytes += tensor.nbytes

    def flush(self) -> None:
        self.shards += 1
        file = f"model-{self.shards:05d}.safetensors"
        save_file(self.shard, self.folder / file, metadata={"format": "pt"})
        self.weight_map.update(dict.fromkeys(self.shard, file))
        self.total_bytes += self.shard_bytes
        self.shard, self.shard_bytes = {}, 0

    def finish(self) -> None:
        self.flush()
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_checkpoint(folder: Path, shape: Shape, fp8: bool = True, seed: int = 0) -> int:
    """Write a whole checkpoint into `folder`, which is made if missing; the arithmetic runs on a GPU if there is one.

    Returns:
        The bytes of its weights.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder)
    for t in tensors(shape):
        for name, tensor in stored(t, draw(t, shape, seed, device), shape, fp8).items():
            writer.add(name, tensor)
    writer.finish()
    (folder / "config.json").write_text(json.dumps(config(shape, fp8), indent=2))
    write_tokenizer(folder, shape.vocab)
    return writer.total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a synthetic mixture-of-experts checkpoint.")
    parser.add_argument("--family", choices=sorted({family for family, _ in PRESETS}), default="deepseek_v3")
    parser.add_argument("--preset", choices=sorted({preset for _, preset in PRESETS}), default="tiny")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bf16", action="store_true", help="write the unquantized twin")
    parser.add_argument("--yarn", action="store_true", help="DeepSeek: with rope_scaling, which SGLang needs")
    parser.add_argument("--seed", type=int, default=0)
    for size in ("hidden", "vocab", "moe_layers", "mtp_layers", "experts", "topk", "moe_intermediate"):
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, help="instead of the preset's")
    args = parser.parse_args()
    if (args.family, args.preset) not in PRESETS:
        parser.error(f"{args.family} has no preset {args.preset}")
    shape = PRESETS[args.family, args.preset]
    given = {k: v for k, v in vars(args).items() if v is not None and hasattr(shape, k) and k != "family"}
    size = write_checkpoint(args.out, replace(shape, **given), fp8=not args.bf16, seed=args.seed)
    print(f"{args.out}: {size / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
