"""DeepSeek-V4.1: its experts in MXFP4 are ours, its dense layers in FP8 by 32x32 blocks are the engine's.

Its config.json is reconstructed from what is known of the published one. The rest is that of V4-Flash, or made up.
"""

from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.placement import Server
from fp8moe_plugin.checkpoint.shapes import Experts, is_down
from fp8moe_plugin.checkpoint.splits import computes_experts, engine_layers, rank_shapes, split_refusal
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK_32
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.launches.kernel_sets import model_kernels
from tests.checkpoint.published import described
from tests.checkpoint.test_model import describe, header, write_shard
from tests.helpers import environment
from warmup.__main__ import main
from warmup.memory import cache_bytes

FLASH = described("DeepSeek-V4-Flash")
QUANTIZATION = {  # published
    **{"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
    **{"weight_block_size": [32, 32], "expert_dtype": "fp4"},
}
PUBLISHED = {
    **{"model_type": "deepseek_v41_text", "num_hidden_layers": 40, "num_nextn_predict_layers": 3},
    **{"hidden_size": 5120, "moe_intermediate_size": 2304, "n_routed_experts": 384, "num_experts_per_tok": 6},
    **{"q_lora_rank": 1280, "index_n_heads": 32, "rms_norm_eps": 1e-20},
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
}
MADE_UP = {"kv_source_layer_ids": [2, 20], "index_source_layer_ids": [2, 20]}  # vLLM needs them
UNKNOWN = {"architectures", "quantization_config", "expert_dtype", "num_hash_layers"}  # in V4.1's text_config
TEXT = {key: value for key, value in FLASH.items() if key not in UNKNOWN} | PUBLISHED | MADE_UP
CONFIG = {
    **{"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"},
    **{"text_config": TEXT, "quantization_config": QUANTIZATION},
}
WHY = "is FP8 in 32x32 blocks, which the kernels do not compute in dense layers"
DENSE = {
    **dict.fromkeys(("attn.fused_wqa_wkv", "attn.wq_b", "attn.wo_a", "attn.wo_b"), 40),
    **{"attn.indexer.wq_b": 2, "ffn.shared_experts.gate_up_proj": 40, "ffn.shared_experts.down_proj": 40},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return describe(tmp_path, CONFIG)


def test_only_experts_and_indexer_have_kernels(folder):
    model = read_model(folder)
    assert model.experts == Experts(40, 384, 6, 5120, 2304)
    assert (model.weights, model.recoded_from, model.dense_weights) == (PACKED_MXFP4, MXFP4, FP8_BLOCK_32)
    sources = {key.source for key in model_kernels(model)}
    assert {"gate_up_few_rows", "grouped_gemm_few_rows", "mqa_logits"} <= sources
    assert not any("dense" in source for source in sources)


@pytest.mark.parametrize("tp", [1, 8])  # 8: a rank has 288 channels of the shared expert, 9 scale blocks
def test_dense_layers_are_the_engines(folder, tp):
    model, parallel = read_model(folder), Parallel(tp)
    assert computes_experts(model, parallel)
    assert {layer.name: layer.layers for layer in engine_layers(model, parallel)} == DENSE
    assert {layer.why for layer in engine_layers(model, parallel)} == {WHY}
    down = next(i for i, layer in enumerate(model.dense) if is_down(layer.name))
    assert rank_shapes(model, Parallel(tp, sglang=True)).dense_placements[down].server is Server.ENGINE
    with environment("FP8MOE_FALLBACK", "forbid"):
        assert split_refusal(model, parallel) == f"attn.fused_wqa_wkv {WHY}"


def test_commands_name_the_layers_of_the_engine(folder, capsys):
    for command in ("list", "explain"):
        main([command, "--model", str(folder)])
        captured = capsys.readouterr()
        assert "vLLM's own kernels compute attn.fused_wqa_wkv (40 layers), attn.wq_b (40 layers), " in captured.err
        assert "'deepseek_v41_text' are not known" in captured.err  # its n-gram tables are missing in the figures
    with environment("FP8MOE_FALLBACK", "forbid"):
        assert main(["list", "--model", str(folder)])
    assert f"attn.fused_wqa_wkv {WHY}" in capsys.readouterr().err


def test_layers_share_the_cache(folder, tmp_path):
    entry = 584 + 128 + 4  # with the indexer's key
    assert cache_bytes(read_model(folder), Parallel(), fp8=False) == entry // 2 + entry  # of layers 2 and 20
    unknown = {key: value for key, value in TEXT.items() if key not in MADE_UP}
    model = read_model(describe(tmp_path, CONFIG, text_config=unknown))
    assert cache_bytes(model, Parallel(), fp8=False) == 18 * entry // 2 + 20 * entry


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": QUANTIZATION | {"expert_dtype": "fp8"}}, r"weight_block_size is \[32, 32\]"),
        ({"quantization_config": QUANTIZATION | {"weight_block_size": [32, 64]}}, r"weight_block_size is \[32, 64\]"),
        ({"text_config": TEXT | {"compress_ratios": [4] * 43}}, r"compress_ratios has \[4\], but only 0, 1 and 2"),
    ],
)
def test_others_are_refused(tmp_path, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        read_model(describe(tmp_path, CONFIG, **changes))


def test_experts_found_in_fp8_are_not_ours(folder):
    write_shard(folder / "model.safetensors", header({"layers.0.ffn.experts.0.w1.weight": ("F8_E4M3", [2304, 5120])}))
    assert not computes_experts(read_model(folder), Parallel())
