"""What becomes of an update that fails, and the names of the parameters that are loaded; without an engine."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.layers.linear import ReplicatedLinear

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.spec import COMPRESSED_SCALE, SCALE
from fp8moe_plugin.layers.sglang import compat
from fp8moe_plugin.layers.sglang.loads import FUSED_BY_THE_MODEL, Loads
from tests.layers.experts import HIDDEN
from tests.layers.sglang.layers import PARAMETERS, Layer, Quantized

pytestmark = pytest.mark.seam


@pytest.mark.parametrize("written", [False, True])
def test_all_ranks_answer_what_one_has_refused(monkeypatch, written):
    """SGLang returns only the answer of the first rank."""

    def gather(found, own, group):
        found[:] = [own, ("The other rank refuses.", written)]

    monkeypatch.setattr(compat, "get_tp_group", lambda: SimpleNamespace(world_size=2, cpu_group=None))
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    loads = Loads(SCALE)
    done, message = compat._answer(loads, None, lambda: (True, "Success"))
    assert not done
    assert message.startswith("The other rank refuses.")
    if written:
        with pytest.raises(CheckpointError, match=r"The other rank refuses\..*ends at its next step"):
            loads.check_usable()
    else:
        loads.check_usable()


def test_a_scale_has_one_name():
    """Offloading copies `state_dict()` and calls the layer with the copies, which two names of a tensor break."""
    dense = ReplicatedLinear(HIDDEN, HIDDEN, bias=False, quant_config=Quantized(), params_dtype=torch.bfloat16)
    assert dict.fromkeys(dense.state_dict()) == dict.fromkeys(("weight", SCALE))
    assert dict.fromkeys(Layer(256, 1, 0).state_dict()) == dict.fromkeys(PARAMETERS)
    dense.weight.data.copy_(torch.randn(HIDDEN, HIDDEN))
    dense.weight_scale_inv.data.fill_(1)
    copies = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    x = torch.randn(3, HIDDEN, dtype=torch.bfloat16)
    called, _ = torch.func.functional_call(dense, copies, (x,))
    assert torch.equal(called, dense(x)[0])


class Model(torch.nn.Module):
    def load_weights(self, weights):
        self.named = list(weights)


@pytest.mark.parametrize("scale", [SCALE, COMPRESSED_SCALE])
def test_scales_of_each_format_reach_the_model_by_that_name(scale):
    model = Model()
    Loads(scale).follow(model)
    names = ["a.weight", f"a.{scale}", "a.k_scale", "experts.0.up_proj.input_scale"]
    model.load_weights([(name, torch.zeros(1)) for name in names])
    assert [name for name, _ in model.named] == ["a.weight", "a.weight_scale_inv", *names[2:]]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_single_scales_that_sglang_fuses_stay_apart(shape):
    """SGLang would take the first of the two for both."""
    model = Model()
    model.config = SimpleNamespace(q_lora_rank=3, kv_lora_rank=1, qk_rope_head_dim=1)
    Loads(COMPRESSED_SCALE, COMPRESSED_SCALE).follow(model)
    names = [f"a.{part}.{kind}" for part in FUSED_BY_THE_MODEL for kind in (COMPRESSED_SCALE, "input_scale")]
    model.load_weights([(name, torch.full(shape, float(i))) for i, name in enumerate(names)])
    assert {name: tensor.tolist() for name, tensor in model.named} == dict(
        zip(names, ([[0.0]] * 3, 1.0, [[2.0]] * 2, 3.0), strict=True)
    )


def test_an_error_of_the_model_names_the_tensor():
    model, loads = torch.nn.Module(), Loads(SCALE)

    def load_weights(weights):
        for name, tensor in weights:
            if name == "b.weight":
                torch.cat([tensor, tensor.bfloat16()])

    model.load_weights = load_weights
    loads.follow(model)
    tensors = [(name, torch.zeros(2).to(torch.float8_e4m3fn)) for name in ("a.weight", "b.weight")]
    with pytest.raises(CheckpointError, match=r"failed at b\.weight \(torch.float8_e4m3fn \[2\]\).*RuntimeError"):
        model.load_weights(tensors)
    assert loads.written
