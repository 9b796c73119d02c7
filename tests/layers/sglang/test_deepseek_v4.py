"""DeepSeek-V4's experts, loaded by SGLang's own model code: on several threads, by the names of the checkpoint."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.formats.spec import SCALE, QuantSpec
from fp8moe_plugin.layers.sglang import moe
from fp8moe_plugin.layers.sglang.loads import Loads
from tests import helpers as h
from tests.layers.experts import EXPERTS, make_mxfp4
from tests.layers.packed import assert_holds
from tests.layers.sglang import layers
from tests.layers.sglang.layers import Layer, in_mxfp4

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures("slicing")]

INTERMEDIATE = 256


class Model(torch.nn.Module):
    """One layer of experts, and what SGLang's loader asks of a model."""

    load_weights = DeepseekV4ForCausalLM.load_weights
    remap_weight_name_to_dpsk_hf_format = staticmethod(DeepseekV4ForCausalLM.remap_weight_name_to_dpsk_hf_format)
    num_fused_shared_experts, wo_a_fp8, vision, quant_config = 0, True, None, None
    pp_group = SimpleNamespace(is_first_rank=False, is_last_rank=False)  # so embeddings and head may be missing

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_routed_experts=EXPERTS, num_hidden_layers=1, model_type="deepseek_v4")
        mlp = torch.nn.ModuleDict({"experts": Layer(INTERMEDIATE, 1, 0)})
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": mlp})])})
        layers.QUANT.loads.follow(self)

    @property
    def experts(self) -> Layer:
        return self.get_submodule("model.layers.0.mlp.experts")

    def post_load_weights(self, **_: object) -> None: ...

    def _prewarm_mhc_kernels(self) -> None: ...


def named() -> Iterator[tuple[str, torch.Tensor]]:
    """As in the checkpoint, whose scales come before their weights."""
    found = {
        f"layers.0.ffn.experts.{expert}.{shard}.{'weight' if kind == 'weight' else 'scale'}": tensor
        for name, tensors in make_mxfp4(INTERMEDIATE).items()
        for shard, _, kind in [name.partition("_")]
        for expert, tensor in enumerate(tensors)
    }
    yield from sorted(found.items())


@pytest.fixture(params=["mxfp4", "fp8"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(moe, "get_server_args", lambda: SimpleNamespace(enable_eplb=False))
    weights = PACKED_MXFP4 if request.param == "mxfp4" else FP8_BLOCK
    monkeypatch.setattr(layers.QUANT, "spec", QuantSpec(weights, recoded_from=MXFP4))
    monkeypatch.setattr(layers.QUANT, "loads", Loads(SCALE))
    return Model()


def test_a_checkpoint_is_loaded(model):
    model.load_weights(named())
    model.experts.finish()
    layers.QUANT.loads.finish()
    if layers.QUANT.spec.weights is PACKED_MXFP4:
        assert_holds(model.experts, in_mxfp4(INTERMEDIATE))
    one_by_one = Layer(INTERMEDIATE, 1, 0).load(in_mxfp4(INTERMEDIATE))
    for name, parameter in one_by_one.named_parameters():
        assert h.same_bits(getattr(model.experts, name).data, parameter.data), name


def test_a_missing_half_is_noticed(model):
    model.load_weights(found for found in named() if found[0] != "layers.0.ffn.experts.1.w2.scale")
    with pytest.raises(CheckpointError, match="a tensor is missing"):
        model.experts.finish()
