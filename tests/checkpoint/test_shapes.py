"""How ranks share experts and MLPs."""

from dataclasses import replace

import pytest

from fp8moe_plugin.checkpoint.cache import KvCache
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import (
    Dense,
    Experts,
    Model,
    Split,
    experts_refusal,
    local_intermediate,
    padding_share,
)
from fp8moe_plugin.checkpoint.splits import rank_shapes
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import GROUP

# Intermediate size, ranks, and the channels that each holds: Qwen3-235B and GLM-4.5; Qwen3-30B; Qwen3-Coder-480B;
# GLM-4.5-Air; ERNIE-4.5. Then a last block that is not full, alone and shared, and ranks without any channel.
SHARES = [
    (1536, 8, 256),
    (768, 4, 256),
    (768, 8, 128),
    (2560, 8, 384),
    (1408, 4, 384),
    (1408, 8, 256),
    (3584, 8, 512),
    (320, 1, 384),
    (320, 2, 256),
    (64, 2, 128),
]
EXPERTS = Experts(layers=1, experts=16, topk=4, hidden=1024, intermediate=1536)
MLP = (  # of GLM-4.5's shared expert
    Dense("mlp.shared_experts.gate_up_proj", 1, 1024, (1536, 1536), Split.OUTPUTS),
    Dense("mlp.shared_experts.down_proj", 1, 1536, (1024,), Split.INPUTS),
)
MODEL = Model("M", EXPERTS, dense=MLP, heads=48, kv_heads=48, vocab=512, ue8m0=False, quantized=True)


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_a_rank_holds_whole_blocks_and_no_more_than_it_must(intermediate: int, ranks: int, channels: int) -> None:
    assert local_intermediate(intermediate, ranks) == channels
    assert channels % GROUP == 0
    assert channels * ranks >= intermediate
    assert (channels - GROUP) * ranks < intermediate  # however whole blocks are distributed, some rank has this many
    assert padding_share(intermediate, ranks) == pytest.approx(channels / (intermediate / ranks) - 1)


@pytest.mark.parametrize(("intermediate", "ranks"), [(2048, 1), (2048, 8), (2048, 16), (1536, 4), (128, 1)])
def test_whole_blocks_for_every_rank_are_not_padded(intermediate: int, ranks: int) -> None:
    assert local_intermediate(intermediate, ranks) == intermediate // ranks
    assert padding_share(intermediate, ranks) == 0


def test_a_rank_of_a_model_holds_whole_blocks() -> None:
    assert rank_shapes(MODEL, Parallel(8)).experts == replace(EXPERTS, intermediate=256)
    assert rank_shapes(MODEL, Parallel(2, 4)).experts == replace(EXPERTS, intermediate=256)  # replicas share them too
    assert rank_shapes(MODEL, Parallel(8, ep=8)).experts == replace(EXPERTS, experts=2)


def test_both_halves_of_an_mlp_hold_the_same_whole_blocks() -> None:
    for tp, width in ((1, 1536), (4, 384), (8, 256)):
        up, down = rank_shapes(MODEL, Parallel(tp)).dense
        assert (up.outputs, down.inputs) == ((width, width), width)
    half_a_block = tuple(replace(half, outputs=(320, 320)) if half.inputs == 1024 else half for half in MLP)
    assert rank_shapes(replace(MODEL, dense=half_a_block), Parallel(2)).dense[0].outputs == (256, 256)


def test_other_layers_are_cut_where_vllm_cuts_them() -> None:
    attention = Dense("self_attn.o_proj", 1, 1536, (1024,), Split.INPUTS)
    with pytest.raises(UnsupportedError, match=r"self_attn.o_proj has 192 input channels on this rank.*--tp 4\.$"):
        rank_shapes(replace(MODEL, dense=(attention,)), Parallel(8))


def test_what_cannot_be_shared_is_refused() -> None:
    assert experts_refusal(320) == "hidden size 320 is not a multiple of 128, the size of a scale block"
    uneven = replace(MODEL, experts=replace(EXPERTS, intermediate=1000))
    with pytest.raises(
        UnsupportedError, match=r"--tp 16 is not supported: experts: 16 ranks cannot share 1000 .*: .*--ep 16 or --tp 8"
    ):
        rank_shapes(uneven, Parallel(16))
    odd = replace(MODEL, experts=replace(EXPERTS, hidden=320, intermediate=192))
    with pytest.raises(
        UnsupportedError, match=r"No other split is supported either; on one GPU: experts: hidden size 320 is .*own"
    ):
        rank_shapes(odd, Parallel(2))


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [(Parallel(2, 5, 10, sglang=True), "--tp-size 2"), (Parallel(1, 5, 5, sglang=True), "--tp-size 1")],
    ids=str,
)
def test_where_fewer_replicas_are_possible_they_are_named(asked: Parallel, nearest: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"equally.* The nearest supported options are: {nearest}\.$"):
        rank_shapes(MODEL, asked)


def test_more_stages_than_layers_are_refused_and_one_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"100 stages .* The nearest supported options are: --tp 1\.$"):
        rank_shapes(replace(MODEL, cache=KvCache(4, mla=True, elements=576)), Parallel(pp=100))


@pytest.mark.parametrize(
    ("way", "attention", "mlp", "shared"),
    [
        (Parallel(8), 8, 8, 8),
        (Parallel(8, ep=8), 8, 8, 8),
        (Parallel(4, 2), 4, 4, 4),
        (Parallel(4, 2, 8), 4, 4, 1),  # vLLM gives each rank a part of the tokens
        (Parallel(4, 2, 8, sglang=True), 4, 8, 8),
        (Parallel(4, 2, 8, sglang=True, dense_tp1=True), 4, 1, 8),
    ],
)
def test_ranks_share_attention_mlps_and_shared_experts(way: Parallel, attention: int, mlp: int, shared: int) -> None:
    names = ("self_attn.o_proj", "mlp.down_proj", "mlp.shared_experts.down_proj")
    assert [way.dense_ranks(name) for name in names] == [attention, mlp, shared]
