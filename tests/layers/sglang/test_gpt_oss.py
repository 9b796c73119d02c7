"""gpt-oss's experts, loaded by SGLang's own model code: of all experts at once, cut in groups of a scale."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.models import gpt_oss as models

from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.layers.sglang import gpt_oss
from fp8moe_plugin.layers.sglang.loads import Loads
from tests import helpers as h
from tests.layers.experts import EXPERTS, TOPK
from tests.layers.gpt_oss import (
    CHECKPOINT,
    HIDDEN,
    INTERMEDIATE,
    OTHER,
    assert_holds,
    experts_in_float64,
    named,
    part_of,
)
from tests.layers.sglang import layers
from tests.layers.sglang.layers import Layer, Quant

FORMS = {
    "mxfp4": QuantSpec(PACKED_MXFP4, recoded_from=MXFP4, gpt_oss=True),
    "fp8": QuantSpec(FP8_BLOCK, recoded_from=MXFP4, gpt_oss=True),
}
RUNNER = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
pytestmark = pytest.mark.seam


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The options of SGLang's command line."""
    args = SimpleNamespace(enable_eplb=False, ep_num_redundant_experts=0)
    monkeypatch.setattr(gpt_oss, "get_server_args", lambda: args)
    return args


class Rank(Layer):
    def __init__(self, form: str, ranks: int = 1, rank: int = 0, bias: bool = True, **runner: object) -> None:
        torch.nn.Module.__init__(self)
        self.moe_tp_size, self.moe_tp_rank = ranks, rank
        self.quant_config = Quant(
            **vars(layers.QUANT) | {"spec": FORMS[form], "loads": Loads("weight_scale_inv", gpt_oss.SCALE)}
        )
        self.quant_method = gpt_oss.GptOssMethod(self.quant_config, "L", "warmup")
        self.quant_method.create_weights(
            layer=self,
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size_per_partition=INTERMEDIATE // ranks,
            params_dtype=torch.bfloat16,
            weight_loader=self.weight_loader,
            with_bias=bias,
        )
        self.quant_method.create_moe_runner(self, MoeRunnerConfig(**RUNNER | runner))

    @property
    def moe_ep_size(self) -> int:
        return self.num_experts // EXPERTS

    def load_all(self, tensors: dict[str, torch.Tensor], experts: int = EXPERTS) -> "Rank":
        """By the loader of SGLang's model, which sees this layer alone."""
        config = SimpleNamespace(intermediate_size=INTERMEDIATE, hidden_size=HIDDEN, num_local_experts=experts)
        model = torch.nn.Module()
        model.config, model.experts = config, self
        ranks = {name: getattr(self, name) for name in ("moe_tp_rank", "moe_tp_size", "moe_ep_rank", "moe_ep_size")}
        with mock.patch.object(models, "get_parallel", return_value=SimpleNamespace(**ranks)):  # of older versions
            models.GptOssForCausalLM._load_mxfp4_experts_weights(model, named(tensors, "experts"))
        return self


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_hold_their_part(form, ranks):
    for rank in range(ranks):
        layer = Rank(form, ranks, rank).load_all(CHECKPOINT)
        assert_holds(layer, part_of(CHECKPOINT, ranks, rank), "weight_bias")
        layer.quant_config.loads.finish()


@pytest.mark.parametrize("form", FORMS)
def test_ranks_hold_whole_experts(monkeypatch, form):
    """The second of two ranks."""
    for name, value in {
        "num_experts": 2 * EXPERTS,
        "_num_global_routed": 2 * EXPERTS,
        "moe_ep_rank": 1,
        "_expert_storage_rank": 1,
    }.items():
        monkeypatch.setattr(Rank, name, value, raising=False)
    both = {name: torch.cat([OTHER[name], tensor]) for name, tensor in CHECKPOINT.items()}
    assert_holds(Rank(form).load_all(both, 2 * EXPERTS), CHECKPOINT, "weight_bias")


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_the_ranks_add_up_to_the_layer(form, ranks):
    gen = h.seeded(0, torch.device("cpu"))
    x = 4 * h.random_tokens(gen, 9, HIDDEN)  # so that gates and up projections exceed the limit
    weights, ids = h.random_routing(gen, "distinct", 9, TOPK, EXPERTS)
    found = torch.zeros(9, HIDDEN, dtype=torch.float64)
    for rank in range(ranks):
        layer = Rank(form, ranks, rank).load_all(CHECKPOINT)
        layer.finish()
        topk = StandardTopKOutput(weights, ids, torch.empty(0))
        sums = layer.quant_method.apply(layer, StandardDispatchOutput(x, None, topk)).hidden_states
        found += sums[:, :HIDDEN].double()  # as SGLang's layer cuts it
    assert h.relative_l2(found.bfloat16(), experts_in_float64(x, weights, ids)) < 0.06


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_loaded_again_in_place(form):
    layer = Rank(form).load_all(CHECKPOINT)
    loads = layer.quant_config.loads
    loads.finish_load(torch.nn.ModuleList([layer]))
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    assert_holds(layer.load_all(OTHER), OTHER, "weight_bias")
    loads.finish()
    assert [parameter.data_ptr() for parameter in layer.parameters()] == addresses
    layer.load_all({"w2_weight": CHECKPOINT["w2_weight"]})
    with pytest.raises(CheckpointError, match=r"arrived without the|holds NaN"):  # codes are any bytes
        loads.finish()


@pytest.mark.parametrize("missing", CHECKPOINT)
def test_a_missing_tensor_is_noticed(missing):
    layer = Rank("fp8").load_all({name: tensor for name, tensor in CHECKPOINT.items() if name != missing})
    with pytest.raises(CheckpointError, match="is missing from the checkpoint"):
        layer.finish()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("w2_bias", lambda t: t * math.nan, "holds NaN or infinity"),
        ("w2_bias", lambda t: t[:, :-1], r"has shape \[3, 95\], but must have \[3, 96\]"),
        ("w13_weight_scale", lambda t: t[..., :-1], r"has shape \[3, 320, 2\], but must have \[3, 320, 3\]"),
        ("w2_weight_scale", lambda t: torch.full_like(t, 0xFF), "the scales of .*w2 of local experts 0 to 2"),
    ],
)
def test_damaged_tensors_are_refused(name, damage, message):
    with pytest.raises(CheckpointError, match=message):
        Rank("mxfp4").load_all(CHECKPOINT | {name: damage(CHECKPOINT[name])})


def test_other_experts_are_refused(options):
    with pytest.raises(UnsupportedError, match="quant_method 'mxfp4' is only supported for gpt-oss"):
        Rank("fp8", bias=False)
    for runner in ({"gemm1_clamp_limit": 5.0}, {"gemm1_alpha": None}, {"activation": "gelu"}):
        with pytest.raises(UnsupportedError, match=r"only supported with alpha 1\.702 and limit 7"):
            Rank("fp8", **runner)
    options.enable_eplb = True
    with pytest.raises(UnsupportedError, match="not supported with EPLB"):
        Rank("fp8")
