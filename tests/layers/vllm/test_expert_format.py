"""DeepSeek-V4's experts: vLLM names their format before it makes a layer, and the weights decide what it is."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from safetensors.torch import save_file
from transformers import PretrainedConfig
from vllm.config.offload import OffloadConfig, UVAOffloadConfig

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.layers.vllm import deepseek_v4
from fp8moe_plugin.layers.vllm.config import moe_method
from fp8moe_plugin.layers.vllm.entry import Entry
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.vllm.pack import PackedMoeMethod
from fp8moe_plugin.layers.vllm.recode import RecodedMoeMethod, check_layers
from tests.helpers import environment
from tests.layers.vllm.one_rank import default_config
from tests.layers.vllm.test_config import CHECKPOINT, moe_layer

pytestmark = pytest.mark.seam

WEIGHT = "layers.0.ffn.experts.0.w1.weight"


class Config(PretrainedConfig):
    model_type = "deepseek_v4"


def described(kind=Config, **fields):
    return kind(n_routed_experts=8, hidden_act="silu", **fields)


def updated(model, hf_config, **arguments):
    config = Entry.from_config(CHECKPOINT | {"quant_method": "deepseek_v4_fp8"})
    config.maybe_update_config(str(model), hf_config=hf_config, **arguments)
    return config


@pytest.mark.parametrize("fields", [{}, {"expert_dtype": "fp4"}, {"expert_dtype": "fp8"}])
@pytest.mark.parametrize(("form", "method"), [("fp8", RecodedMoeMethod), ("mxfp4", PackedMoeMethod)])
def test_weights_in_mxfp4_get_the_form_of_the_setting(tmp_path, form, method, fields):
    save_file({WEIGHT: torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    hf_config = described(**fields)
    with environment("FP8MOE_FP4_EXPERTS", form):
        config = updated(tmp_path, hf_config)
    assert hf_config.expert_dtype == "fp4"
    assert config.spec.recoded_from is MXFP4
    assert moe_method(config.spec) is method
    assert config.model.scales == ("weight_scale_inv", "weight_scale")


@pytest.mark.parametrize("fields", [{}, {"expert_dtype": "fp4"}, {"expert_dtype": "fp8"}])
def test_weights_in_fp8_are_not(tmp_path, fields):
    save_file({WEIGHT: torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    hf_config = described(**fields)
    config = updated(tmp_path, hf_config)
    assert hf_config.expert_dtype == "fp8"
    assert config.spec.recoded_from is None
    assert moe_method(config.spec) is Fp8MoeMethod
    assert config.model.scales == ("weight_scale_inv",)


@pytest.mark.parametrize(("dtype", "recoded"), [("I8", True), ("F8_E4M3", False), (None, True)])
def test_headers_in_a_hub_are_read_where_config_lacks_the_field(monkeypatch, dtype, recoded):
    read = []

    def metadata(model, *, revision):
        read.append((model, revision))
        return {"layers.0.attn.wo_a.weight": {"dtype": "BF16"}} | ({WEIGHT: {"dtype": dtype}} if dtype else {})

    monkeypatch.setattr(deepseek_v4, "get_safetensors_params_metadata", metadata)
    assert bool(updated("a/model", described(), revision="main").spec.recoded_from) is recoded
    assert updated("a/model", described(expert_dtype="fp4"), revision="main").spec.recoded_from is MXFP4
    assert read == [("a/model", "main")]


def test_other_models_keep_their_experts(tmp_path):
    hf_config = described(PretrainedConfig)
    assert updated(tmp_path, hf_config).spec.recoded_from is None
    assert not hasattr(hf_config, "expert_dtype")


def test_nvfp4_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match="experts are 'nvfp4'"):
        updated(tmp_path, described(expert_dtype="nvfp4"))
    with pytest.raises(UnsupportedError, match="quantized by ModelOpt to 'NVFP4'"):
        Entry.from_config(CHECKPOINT | {"moe_quant_algo": "NVFP4"})


@pytest.mark.parametrize("offload", [{}, {"cpu_offload_gb": 400}])
def test_experts_that_a_gpu_cannot_hold_are_refused_before_loading(offload):
    moe = moe_layer(intermediate=2048, num_logical_experts=256, num_local_experts=128, hidden_dim=4096)
    engine = copy.copy(default_config())
    engine.offload_config = OffloadConfig(uva=UVAOffloadConfig(**offload))
    engine.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=43))
    check_layers(engine, moe, 150_000_000_000)
    refused = pytest.raises(UnsupportedError, match=r"hold 138\.5 GB .* at least 4 GPUs")
    with contextlib.nullcontext() if offload else refused:
        check_layers(engine, moe, 80_000_000_000)
