"""How ranks share dense layers: in whole scale blocks, loaded by SGLang's loaders; without an engine."""

import itertools

import pytest

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.layers import linear

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_block import GROUP
from tests.checkpoint.test_shapes import SHARES
from tests.layers.experts import HIDDEN, make_checkpoint
from tests.layers.sglang.layers import KINDS, assert_assembled, load_mlp

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures("slicing")]


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), [*SHARES, (512, 2, 256)])
def test_mlp_ranks_hold_the_checkpoint_then_zeros(make_mlp, intermediate, ranks, channels):
    checkpoint, parts = make_checkpoint(intermediate), []
    for rank in range(ranks):
        gate_up, down = mlp = make_mlp(intermediate, ranks, rank)
        for _ in range(2):  # the second time it is updated
            load_mlp(mlp, checkpoint)
            for half in mlp:
                half.quant_method.process_weights_after_loading(half)
        assert gate_up.weight.shape == (2 * channels, HIDDEN)
        parts.append({f"w2_{kind}": getattr(down, kind).data for kind in KINDS})
        for kind in KINDS:
            parts[-1][f"w1_{kind}"], parts[-1][f"w3_{kind}"] = getattr(gate_up, kind).data.chunk(2)
    assert_assembled(parts, {name: tensors[0] for name, tensors in checkpoint.items()}, 2)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_tensor_of_an_mlp_of_another_size_is_refused(make_mlp, ranks):
    for name, intermediate in itertools.product(make_checkpoint(256), (256, 1024)):
        with pytest.raises(CheckpointError, match=r"mlp\.(gate_up|down)_proj.* has shape .*Check that config"):
            load_mlp(make_mlp(512, ranks, ranks - 1), {name: make_checkpoint(intermediate)[name]})


@pytest.mark.parametrize("name", list(make_checkpoint(256)))
def test_a_missing_tensor_of_an_mlp_is_noticed(make_mlp, name):
    checkpoint = make_checkpoint(256)
    checkpoint[name][0] = None
    gate_up, down = mlp = make_mlp(256, 1, 0)
    load_mlp(mlp, checkpoint)
    half, kind = down if name.startswith("w2") else gate_up, name.partition("_")[2]
    with pytest.raises(CheckpointError, match=rf"mlp\..*\.{kind}: a tensor is missing"):
        half.quant_method.process_weights_after_loading(half)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("shard", ["q", "k", "v"])
def test_only_queries_keys_and_values_of_all_heads_are_loaded(on_rank, kv_heads, shard):
    """On more ranks than heads of keys, several ranks hold a head."""
    heads = 4 if shard == "q" else kv_heads
    for rank, ranks in ((0, 1), (1, 2), (3, 4)):
        options = on_rank(rank, ranks)
        layer = linear.QKVParallelLinear(HIDDEN, GROUP, 4, kv_heads, prefix="qkv_proj", **options)
        tensors = make_checkpoint(heads * GROUP)
        for kind in KINDS:
            param = getattr(layer, kind)
            param.weight_loader(param, tensors[f"w1_{kind}"][0], shard)
            for others in {heads // 2, heads * 2, heads * 2 + 1} - {0}:
                wrong = make_checkpoint(others * GROUP)[f"w1_{kind}"][0]
                with pytest.raises(
                    CheckpointError, match=rf"qkv_proj.{kind} \({shard}\) has shape .*Check that config"
                ):
                    param.weight_loader(param, wrong, shard)
