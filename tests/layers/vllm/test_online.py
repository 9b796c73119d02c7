"""The loaders that quantize, on layers that only record what is loaded into them."""

import inspect
import weakref
from types import MethodType, SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.spec import ONLINE
from fp8moe_plugin.layers.vllm import config, online
from fp8moe_plugin.layers.vllm.loading import LayerLoading
from fp8moe_plugin.layers.vllm.model_state import ModelState
from fp8moe_plugin.layers.weights import per_block_cast_to_fp8
from tests import helpers as h
from tests.layers.vllm import one_rank

pytestmark = pytest.mark.seam


class Layer(SimpleNamespace):
    """A layer of this rank; `loaded` has the arguments of each call."""


def load(layer, param, loaded_weight, *arguments, **named):
    layer.loaded.append((param, loaded_weight, *arguments, *named.values()))
    return True


def parameters(device):
    names = ("weight", "weight_scale_inv", "w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")
    loading = LayerLoading("prefix", ModelState(), online=True)
    return Layer(loaded=[], fp8moe_loading=loading, **{name: torch.empty(1, device=device) for name in names})


def loader(layer, make):
    return MethodType(make("prefix", load), layer)


@pytest.mark.parametrize(("part", "shard"), [("w13", "w1"), ("w13", "w3"), ("w2", "w2")])
def test_an_expert_is_loaded_as_if_it_came_with_its_scales(part, shard):
    layer, weight = parameters("cpu"), torch.randn(256, 384).bfloat16()
    param, name = getattr(layer, f"{part}_weight"), f"experts.{part}_weight"
    done = loader(layer, online._experts_loader)(
        param=param, loaded_weight=weight, weight_name=name, shard_id=shard, expert_id=5, return_success=True
    )
    q, scales = per_block_cast_to_fp8(weight)
    assert done is True
    (scale_param, loaded_scales, *scale_rest), (weight_param, loaded, *rest) = layer.loaded
    assert scale_param is getattr(layer, f"{part}_weight_scale_inv")
    assert weight_param is param
    assert h.same_bits(loaded, q)
    assert h.same_bits(loaded_scales, scales)
    assert rest == [name, shard, 5, True]
    assert scale_rest == [f"{name}_scale_inv", shard, 5, True]


def test_a_dense_layer_gets_its_scales_under_the_same_shard():
    layer, weight = parameters("cpu"), torch.randn(300, 256).bfloat16()
    loader(layer, online._linear_loader)(layer.weight, weight, "k")
    q, scales = per_block_cast_to_fp8(weight)
    (param, loaded, shard), (scale_param, loaded_scales, scale_shard) = layer.loaded
    assert param is layer.weight
    assert scale_param is layer.weight_scale_inv
    assert shard == scale_shard == "k"
    assert h.same_bits(loaded, q)
    assert h.same_bits(loaded_scales, scales)


def test_parameters_without_memory_get_sizes():
    """vLLM first loads into meta parameters when it reloads, to count the tensors."""
    layer, weight = parameters("meta"), torch.full((300, 256), float("nan"))
    loader(layer, online._linear_loader)(layer.weight, weight)
    (_, q), (_, scales) = layer.loaded
    assert (q.device.type, q.dtype, q.shape) == ("meta", h.FP8, (300, 256))
    assert (scales.device.type, scales.dtype, scales.shape) == ("meta", torch.float32, (3, 2))


def test_no_weight_is_kept():
    layer, weight = parameters("cpu"), torch.randn(128, 128).bfloat16()
    seen = weakref.ref(weight)
    loader(layer, online._linear_loader)(layer.weight, weight)
    del weight
    assert seen() is None


@pytest.mark.parametrize("make", [online._linear_loader, online._experts_loader])
def test_damaged_weights_are_refused_by_name(make):
    layer, damaged = parameters("cpu"), torch.full((128, 128), float("inf"))
    arguments = ("w1_weight", "w1", 4) if make is online._experts_loader else ()
    name = r"prefix\.4\.w1\.weight" if make is online._experts_loader else r"prefix\.weight"
    with pytest.raises(CheckpointError, match=f"{name}: .* holds NaN or infinity"):
        loader(layer, make)(layer.weight, damaged, *arguments)
    assert not layer.loaded


def test_vllm_can_tell_the_arguments_and_whose_method_a_loader_is():
    """As vLLM does when reloading: it binds arguments by name, and unbinds methods of a layer."""
    layer = parameters("cpu")
    bound = loader(layer, online._linear_loader)
    assert list(inspect.signature(bound).parameters)[:2] == ["param", "loaded_weight"]
    assert bound.__self__ is layer


def test_experts_that_are_not_quantized_cost_one_line(plugin_log):
    config.announce_unquantized.cache_clear()
    online_config, experts = config.Fp8MoeConfig(ONLINE), one_rank.Layer(256, 1, 0)
    with set_current_vllm_config(VllmConfig()):
        for layer in range(2):
            method = online_config.get_quant_method(experts, f"mtp.layers.{layer}.mlp.experts")
            assert type(method) is UnquantizedFusedMoEMethod
    (record,) = (record for record in plugin_log.records if record.name == "fp8moe")
    assert "does not quantize the experts mtp.layers.N.mlp.experts, which run on vLLM" in record.getMessage()
