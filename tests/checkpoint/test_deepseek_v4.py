"""What is read of DeepSeek-V4: its layers, their splits, the cache, and the format of its experts."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from fp8moe_plugin.checkpoint.cache import Indexer
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Experts, Model
from fp8moe_plugin.checkpoint.splits import computes_experts, split_refusal
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.launches.kernel_sets import model_kernels
from tests.checkpoint.published import described
from tests.checkpoint.test_model import describe, header, write_shard
from tests.helpers import environment
from warmup import device_memory, memory
from warmup.__main__ import main
from warmup.choose import choose, text, ways
from warmup.explain import explain
from warmup.target import Target

FLASH = described("DeepSeek-V4-Flash")
PRO = FLASH | {
    **{"hidden_size": 7168, "moe_intermediate_size": 3072, "n_routed_experts": 384, "num_hidden_layers": 61},
    **{"num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16},
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
}
# Names with layers, inputs and outputs.
DENSE: dict[str, list[tuple[str, int, int, tuple[int, ...]]]] = {
    "Flash": [
        ("attn.fused_wqa_wkv", 44, 4096, (1024, 512)),
        ("attn.wq_b", 44, 1024, (32768,)),
        ("attn.wo_a", 44, 4096, (8192,)),
        ("attn.wo_b", 44, 8192, (4096,)),
        ("attn.indexer.wq_b", 21, 1024, (8192,)),
        ("ffn.shared_experts.gate_up_proj", 44, 4096, (2048, 2048)),
        ("ffn.shared_experts.down_proj", 44, 2048, (4096,)),
        ("e_proj", 1, 4096, (4096,)),
        ("h_proj", 1, 4096, (4096,)),
    ],
    "Pro": [
        ("attn.fused_wqa_wkv", 62, 7168, (1536, 512)),
        ("attn.wq_b", 62, 1536, (65536,)),
        ("attn.wo_a", 62, 4096, (16384,)),
        ("attn.wo_b", 62, 16384, (7168,)),
        ("attn.indexer.wq_b", 30, 1536, (8192,)),
        ("ffn.shared_experts.gate_up_proj", 62, 7168, (3072, 3072)),
        ("ffn.shared_experts.down_proj", 62, 3072, (7168,)),
        ("e_proj", 1, 7168, (7168,)),
        ("h_proj", 1, 7168, (7168,)),
    ],
}
PLAIN = [
    ("attn.compressor.fused_wkv_wgate", 21, 4096, (1024, 1024)),
    ("attn.compressor.fused_wkv_wgate", 20, 4096, (512, 512)),
    ("attn.indexer.weights_proj", 21, 4096, (64,)),
    ("attn.indexer.compressor.fused_wkv_wgate", 21, 4096, (256, 256)),
]


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return read_model(describe(tmp_path_factory.mktemp("flash"), FLASH))


@pytest.fixture(scope="module")
def recoded(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With experts that become block FP8."""
    with environment("FP8MOE_FP4_EXPERTS", "fp8"):
        return read_model(describe(tmp_path_factory.mktemp("recoded"), FLASH))


def sizes(layers: Any) -> list[tuple[str, int, int, tuple[int, ...]]]:
    return [(layer.name, layer.layers, layer.inputs, layer.outputs) for layer in layers]


@pytest.mark.parametrize(
    ("name", "config", "experts"),
    [("Flash", FLASH, Experts(44, 256, 6, 4096, 2048)), ("Pro", PRO, Experts(62, 384, 6, 7168, 3072))],
)
def test_layers_are_those_of_vllm(tmp_path, name, config, experts):
    model = read_model(describe(tmp_path, config))
    assert model.experts == experts
    assert sizes(model.dense) == DENSE[name]
    assert (model.heads, model.kv_heads, model.experts.mtp) == (*[config["num_attention_heads"]] * 2, 1)
    assert model.indexer == Indexer(64, 128)
    assert model.unknown_family is None


def test_other_weights_are_not_quantized(flash):
    assert sizes(flash.plain) == PLAIN
    tables = {part.name: (part.layers, part.shape, part.dtype) for part in flash.replicated}
    assert tables["ffn.gate.tid2eid"] == (3, (129280, 6), "I32")
    assert tables["hc_attn_fn, hc_ffn_fn"] == (44, (2, 24, 4 * 4096), "F32")


def test_the_weights_have_the_published_size(flash):
    """160 GB with MXFP4 experts."""
    total = sum(shape.bytes for shape in memory.weight_shapes(flash, Parallel()))
    bases = 44 * 256 * 3 * 4096 * 2048 * 4 / 128**2
    assert total - bases == pytest.approx(160e9, rel=0.01)


def test_compressed_entries_are_cached(flash):
    entry, key, window = 584, 128 + 4, 128
    assert memory.cache_bytes(flash, Parallel(8), fp8=False) == math.ceil(21 * (entry + key) / 4 + 20 * entry / 128)
    assert memory.cache_bytes(flash, Parallel(), fp8=True) == memory.cache_bytes(flash, Parallel(8), fp8=False)
    states = 21 * 8 * 2 * (2 * 512 + 2 * 128) * 4 + 20 * 128 * 2 * 512 * 4
    assert memory.sequence_bytes(flash, Parallel()) == 43 * window * entry + states
    assert flash.cache
    assert flash.cache.growing == 41
    many, few = (device_memory.cache_bytes(flash, Parallel(), 4096, sequences) for sequences in (64, 32))
    assert many - few == 1.25 * 32 * memory.sequence_bytes(flash, Parallel())


def test_a_prefill_gathers_compressed_entries(flash):
    short, long = (memory.step_bytes(flash, Parallel(), 8192, 0, longest) for longest in (2**19, 2**20))
    assert long - short == 4 * (2**19 // 4) * 512 * 2


@pytest.mark.parametrize(
    ("config", "way", "refusal"),
    [
        (FLASH, Parallel(8), None),
        (FLASH, Parallel(8, ep=8), None),
        (FLASH, Parallel(16), "attn.wo_a has 8 groups, which 16 ranks cannot share equally"),
        (FLASH, Parallel(2, 8, 16), None),
        (
            FLASH | {"o_lora_rank": 1040},
            Parallel(8),
            "attn.wo_a has groups of 1040 output channels, not a multiple of .*",
        ),
        (PRO, Parallel(16), None),
        (PRO, Parallel(32), "attn.wo_a has 16 groups, which 32 ranks cannot share equally"),
    ],
    ids=str,
)
def test_ranks_share_whole_groups(tmp_path, config, way, refusal):
    found = split_refusal(read_model(describe(tmp_path, config)), way)
    assert re.fullmatch(refusal, found or "") if refusal else found is None


@pytest.mark.parametrize("sglang", [False, True])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
def test_every_split_is_explained(flash, recoded, gpus, sglang):
    for model, weights in ((flash, 155e9), (recoded, 285e9)):
        every_split_is_explained(model, weights, gpus, sglang)


def every_split_is_explained(model: Model, weights: float, gpus: int, sglang: bool) -> None:
    for way in ways(gpus, sglang, dense_tp1=sglang):
        if split_refusal(model, way) is None:
            found = explain(model, way, 8192, (1, 64))
            assert found.weight_bytes > weights / gpus
            assert [step.tokens for step in found.steps] == [1, 64, 8192]


def test_the_shared_expert_follows_the_experts(flash):
    """Whole on each rank for whole experts and replicas, as the MLPs of other models."""

    def width(way: Parallel) -> int:
        shapes = {shape.name: shape.shape for shape in memory.weight_shapes(flash, way)}
        return shapes["ffn.shared_experts.gate_up_proj"][0] // 2

    assert [width(way) for way in (Parallel(8), Parallel(1, 8, 8), Parallel(2, 4, 8, sglang=True))] == [256, 2048, 256]


@pytest.mark.parametrize(("gpu", "needed"), [("h100", 8), ("h200", 4), ("h20", 4)])
def test_experts_that_double_are_said_to(recoded, gpu, needed):
    def judged(gpus: int) -> str:
        found = choose(recoded, Target(gpu, gpus, 0.92, False, None, 8192), "V4")
        assert found.needed == (needed if gpus < needed else None)
        return text(found)

    note = (
        "The experts are in MXFP4, 147.2 GB in all. While they are loaded, they are re-encoded to block-FP8, 277.1 GB."
    )
    assert note in judged(needed)
    assert "Best for latency" in judged(needed)
    assert f"Take {needed} GPUs." in judged(2)
    assert "FP8 KV cache" in judged(2)


def test_no_note_about_experts_that_stay_as_they_are(tmp_path):
    assert memory.recoding_note(read_model(describe(tmp_path, FLASH, expert_dtype="fp8"))) == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"o_groups": None}, CheckpointError, "o_groups is missing"),
        ({"o_lora_rank": None}, CheckpointError, "o_lora_rank is missing"),
        ({"q_lora_rank": None}, CheckpointError, "q_lora_rank is missing"),
        ({"head_dim": None}, CheckpointError, "head_dim is missing"),
        ({"compress_ratios": None}, CheckpointError, "compress_ratios is missing"),
        ({"compress_ratios": [4] * 42}, CheckpointError, "compress_ratios has 42 entries for 43 layers"),
        (
            {"compress_ratios": [4] * 42 + [2, 1]},
            UnsupportedError,
            r"compress_ratios has \[1, 2\], but only 0, 4 and 128",
        ),
        ({"compress_ratios": [-4] * 43}, CheckpointError, "greater than or equal to 0"),
        ({"o_groups": 0}, CheckpointError, "o_groups is 0"),
        ({"head_dim": 0}, CheckpointError, "gives attn.* an invalid size"),
        ({"hc_mult": 2**31}, CheckpointError, "hc_mult is 2147483648"),
        ({"expert_dtype": "nvfp4"}, UnsupportedError, r"experts are 'nvfp4' \(expert_dtype\)"),
    ],
)
def test_fields_that_are_not_valid(tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        read_model(describe(tmp_path, FLASH, **change))


def test_dense_layers_without_blocks_are_refused(tmp_path):
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    with pytest.raises(UnsupportedError, match="dense layers are per-channel FP8, but those of DeepSeek-V4 need block"):
        read_model(describe(tmp_path, FLASH | {"expert_dtype": "fp8"}, quantization_config=quantization))


@pytest.mark.parametrize("sglang", [False, True])
def test_experts_stay_in_mxfp4_under_both_engines(flash, sglang):
    assert flash.weights is PACKED_MXFP4
    for way in (Parallel(8, sglang=sglang), Parallel(8, ep=8, sglang=sglang)):
        assert split_refusal(flash, way) is None
        assert computes_experts(flash, way)


def test_version_4_1_is_refused_for_its_blocks(tmp_path):
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    config = FLASH | {"model_type": "deepseek_v41", "quantization_config": quantization}
    with pytest.raises(UnsupportedError, match=r"weight_block_size is \[32, 32\].* Remove --quantization to let the"):
        read_model(describe(tmp_path, config))


def test_layers_of_a_window_alone_need_no_compressor(tmp_path):
    model = read_model(describe(tmp_path, FLASH, compress_ratios=[0] * 43, num_hash_layers=0, hc_mult=None))
    assert model.plain == model.replicated == ()
    assert model.cache
    assert (model.cache.growing, model.cache.token_bytes) == (0, 0)
    assert not any("indexer" in layer.name for layer in model.dense)


def kept(folder: Path, *names: str) -> Model:
    quantization = FLASH["quantization_config"] | {"modules_to_not_convert": list(names)}
    return read_model(describe(folder, FLASH, quantization_config=quantization))


def test_published_names_keep_layers_unquantized(tmp_path):
    names = [f"layers.0.attn.{name}" for name in ("wq_a", "wkv", "indexer.weights_proj", "wo_b")]
    names += [f"layers.1.ffn.shared_experts.w{i}" for i in (1, 2, 3)]
    model = kept(tmp_path, *names, "head", "layers.2.ffn.experts.0.w1")
    layers = {layer.name: layer.layers for layer in model.dense}
    assert (layers["attn.fused_wqa_wkv"], layers["attn.wo_b"], layers["attn.wo_a"]) == (43, 43, 44)
    assert layers["ffn.shared_experts.gate_up_proj"] == layers["ffn.shared_experts.down_proj"] == 43
    assert model.experts.layers == 43
    assert model.incomplete_names == ()
    assert kept(tmp_path, "layers.0.attn", "ffn.experts").incomplete_names == ("layers.0.attn", "ffn.experts")
    with pytest.raises(UnsupportedError, match=r"only a part of layer 0's attn\.fused_wqa_wkv"):
        kept(tmp_path, "layers.0.attn.wkv")


def test_commands_understand_the_published_description(tmp_path, capsys):
    arguments = ["--model", str(describe(tmp_path, FLASH))]
    assert main(["list", *arguments]) == 0
    assert "gate_up GATHER=0 MODIFIED_SWIGLU=1" in capsys.readouterr().out
    assert main(["explain", *arguments, "--tp", "8"]) == 0
    printed = capsys.readouterr().out
    assert "44 layers (1 of them for multi-token prediction, MTP) of 256 experts, 6 per token; hidden 4096" in printed
    assert re.search(r"attn\.wo_a +44 x +\[1024, 4096\] ", printed)
    assert re.search(r"attn\.indexer\.compressor\.fused_wkv_wgate \(BF16\) +21 x +\[512, 4096\] ", printed)
    assert main(["explain", *arguments, "--gpu", "h200", "--gpus", "8"]) == 0
    assert "Best for latency: --tp 8." in capsys.readouterr().out
    assert main(["list", "--model", str(describe(tmp_path, FLASH, expert_dtype=None))]) == 0
    assert "the experts may be in MXFP4 or in block FP8. The kernels for both are included" in capsys.readouterr().err


def test_both_forms_have_one_set_of_kernels(tmp_path):
    with environment("FP8MOE_FP4_EXPERTS", "fp8"):
        forms = [read_model(describe(tmp_path, FLASH, expert_dtype=dtype)) for dtype in ("fp4", "fp8", None)]
    assert [(form.recoded_from, form.unknown_format) for form in forms] == [
        (MXFP4, False),
        (None, False),
        (MXFP4, True),
    ]
    assert len({frozenset(model_kernels(form)) for form in forms}) == 1
    assert forms[0] == forms[1] == forms[2]
    assert {form.weights for form in forms} == {FP8_BLOCK}


def test_packed_experts_of_an_unknown_format_get_both_sets_of_kernels(tmp_path):
    with environment("FP8MOE_FP4_EXPERTS", "mxfp4"):
        fp4, fp8, unknown = (
            model_kernels(read_model(describe(tmp_path, FLASH, expert_dtype=dtype))) for dtype in ("fp4", "fp8", None)
        )
    assert fp4.keys() - fp8.keys()
    assert unknown.keys() == fp4.keys() | fp8.keys()


W1, W2 = "layers.2.ffn.experts.0.w1", "layers.0.ffn.experts.255.w2"
FP4 = {
    f"{W1}.weight": ("I8", [2048, 2048]),
    f"{W1}.scale": ("F8_E8M0", [2048, 128]),
    f"{W2}.weight": ("U8", [4096, 1024]),
    f"{W2}.scale": ("U8", [4096, 64]),
    "layers.0.attn.wo_a.weight": ("F8_E4M3", [8192, 4096]),
    "norm.weight": ("BF16", [4096]),
}
FP8 = {
    f"{W1}.weight": ("F8_E4M3", [2048, 4096]),
    f"{W1}.scale": ("F8_E8M0", [16, 32]),
    f"{W2}.weight": ("F8_E4M3", [4096, 2048]),
    f"{W2}.scale": ("F32", [32, 16]),
}


def test_codes_of_four_bits_are_counted_one_by_one(tmp_path):
    """In F4, unlike in bytes of two codes."""
    describe(tmp_path, FLASH)
    write_shard(tmp_path / "model.safetensors", header(FP4 | {f"{W1}.weight": ("F4", [2048, 4096])}))
    assert read_model(tmp_path).recoded_from is MXFP4
    write_shard(tmp_path / "model.safetensors", header(FP4 | {f"{W1}.weight": ("F4", [2048, 2048])}))
    with pytest.raises(CheckpointError, match=r"is F4 \[2048, 2048\], but .* or F4 \[2048, 4096\]"):
        read_model(tmp_path)


@pytest.mark.parametrize("given", ["fp4", "fp8", None])
def test_weights_at_hand_decide_the_format(tmp_path, given):
    describe(tmp_path, FLASH, expert_dtype=given)
    for tensors, expected in ((FP4, MXFP4), (FP8, None)):
        write_shard(tmp_path / "model.safetensors", header(tensors))
        model = read_model(tmp_path)
        assert (model.recoded_from, model.unknown_format) == (expected, False)


@pytest.mark.parametrize(
    ("sound", "name", "found", "wanted"),
    [
        (FP4, f"{W1}.weight", ("I8", [2048, 4096]), r"is I8 .* config.json requires U8 or I8 or F4 \[2048, 2048\]"),
        (FP4, f"{W1}.weight", ("U8", [2048, 2047]), r"requires U8 or I8 or F4 \[2048, 2048\]"),
        (FP4, f"{W2}.weight", ("I8", [1024, 4096]), r"requires U8 or I8 or F4 \[4096, 1024\]"),
        (FP4, f"{W1}.scale", ("F8_E8M0", [2048, 32]), r"requires F8_E8M0 or U8 \[2048, 128\]"),  # groups of 128
        (FP4, f"{W1}.scale", ("F8_E8M0", [2048, 256]), r"requires F8_E8M0 or U8"),  # of 16, as in NVFP4
        (FP4, f"{W1}.scale", ("F8_E4M3", [2048, 128]), r"is F8_E4M3 \[2048, 128\], but .* requires F8_E8M0 or U8"),
        (FP4, f"{W1}.scale", ("F32", [2048, 128]), r"requires F8_E8M0 or U8"),
        (FP4, f"{W2}.weight", ("F8_E4M3", [4096, 2048]), r"is F8_E4M3 .* requires U8 or I8 or F4"),  # mixed
        (FP8, f"{W2}.weight", ("U8", [4096, 1024]), r"is U8 .* requires F8_E4M3 \[4096, 2048\]"),
        (FP4, f"{W2}.weight", ("BF16", [4096, 2048]), r"is BF16 .* requires U8 or I8"),
        (FP4, f"{W1}.weight_scale_inv", ("F32", [16, 32]), "whose scales are named scale or weight_scale, which"),
        (FP8, f"{W1}.scale", ("F32", [2048, 128]), r"requires F32 or BF16 .*\[16, 32\]"),
        (FP4, W2.replace("255", "256") + ".weight", ("I8", [4096, 1024]), "of experts 0 to 255"),
    ],
)  # fmt: skip
def test_experts_that_contradict_the_config(tmp_path, sound, name, found, wanted):
    write_shard(tmp_path / "model.safetensors", header(sound | {name: found}))
    with pytest.raises(CheckpointError, match=wanted) as caught:
        read_model(describe(tmp_path, FLASH))
    assert str(caught.value).isprintable()


def test_the_files_of_the_layer_that_is_checked_decide(tmp_path):
    """As the format of all layers, which loading requires to be the same."""
    write_shard(tmp_path / "a.safetensors", header({"layers.0.ffn.experts.0.w1.weight": ("I8", [2048, 2048])}))
    write_shard(tmp_path / "b.safetensors", header({"layers.1.ffn.experts.0.w1.weight": ("F8_E4M3", [2048, 4096])}))
    with pytest.raises(CheckpointError, match=r"b\.safetensors.* is F8_E4M3 .* requires U8 or I8"):
        read_model(describe(tmp_path, FLASH))
