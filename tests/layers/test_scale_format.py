"""A state dict records the scale format of its layer, and does not load into a layer of the other format."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.fused_moe import FP8MoE
from fp8moe_plugin.layers.linear import FP8Linear
from tests import helpers as h

WEIGHTS = {"linear": ["weight", "weight_scale"], "experts": ["w13", "w13_scale", "w2", "w2_scale"]}
kinds = pytest.mark.parametrize("kind", WEIGHTS)


def layer_of(kind: str, ue8m0: bool, seed: int = 0) -> torch.nn.Module:
    gen = h.seeded(seed, torch.device("cpu"))
    if kind == "linear":
        return FP8Linear.from_fp8(*h.random_weights(gen, 64, 256), ue8m0=ue8m0)
    return FP8MoE.from_fp8(*h.random_layer(gen, 2, 256, 128), ue8m0)


def same_parameters(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(h.same_bits(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@kinds
@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_state_dict_loads_into_a_layer_of_its_format(tmp_path: Path, kind: str, ue8m0: bool) -> None:
    saved, loaded = layer_of(kind, ue8m0), layer_of(kind, ue8m0, seed=1)
    save_file(saved.state_dict(), tmp_path / "layer.safetensors")
    state = load_file(tmp_path / "layer.safetensors")
    assert sorted(state) == sorted(WEIGHTS[kind] + ["ue8m0"] * ue8m0)
    loaded.load_state_dict(state)
    assert same_parameters(loaded, saved)


@kinds
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_state_dict_of_the_other_format_is_refused(kind: str, ue8m0: bool, strict: bool) -> None:
    layer = layer_of(kind, ue8m0)
    before = copy.deepcopy(layer)
    model = torch.nn.ModuleDict({"mlp": layer})
    state = torch.nn.ModuleDict({"mlp": layer_of(kind, not ue8m0, seed=1)}).state_dict()
    with pytest.raises(CheckpointError, match=f"mlp has ue8m0={ue8m0}, but the state dict .* ue8m0={not ue8m0}"):
        model.load_state_dict(state, strict=strict)
    assert same_parameters(layer, before)
    assert layer.ue8m0 == ue8m0


@kinds
def test_weights_alone_load_into_a_ue8m0_layer_once_they_are_marked(kind: str) -> None:
    saved, loaded = layer_of(kind, ue8m0=True), layer_of(kind, ue8m0=True, seed=1)
    state = {name: saved.state_dict()[name] for name in WEIGHTS[kind]}
    with pytest.raises(CheckpointError, match=r"set state_dict\['ue8m0'\] = torch.tensor\(True\) before loading"):
        loaded.load_state_dict(state)
    state["ue8m0"] = torch.tensor(True)
    loaded.load_state_dict(state)
    assert same_parameters(loaded, saved)


@kinds
@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_state_dict_of_other_layers_leaves_this_one_alone(kind: str, ue8m0: bool) -> None:
    model = torch.nn.ModuleDict({"mlp": layer_of(kind, ue8m0), "norm": torch.nn.LayerNorm(8)})
    model.load_state_dict({"norm.bias": torch.ones(8)}, strict=False)
    assert (model["norm"].bias == 1).all()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"norm.bias": torch.ones(8)})


@kinds
def test_other_wrong_entries_are_still_named(kind: str) -> None:
    layer = layer_of(kind, ue8m0=True)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*: "other"'):
        layer.load_state_dict(layer.state_dict() | {"other": torch.zeros(1)})


WRONG = {
    "bytes": lambda state, weight: state | {weight: state[weight].view(torch.uint8)},
    "another float8": lambda state, weight: state | {weight: state[weight].to(torch.float8_e5m2)},
    "unquantized": lambda state, weight: state | {weight: state[weight].bfloat16()},
    "scales in half precision": lambda state, weight: state | {f"{weight}_scale": state[f"{weight}_scale"].half()},
    "negative scales": lambda state, weight: state | {f"{weight}_scale": -state[f"{weight}_scale"]},
    "no scales": lambda state, weight: {name: tensor for name, tensor in state.items() if name != f"{weight}_scale"},
    "no weight": lambda state, weight: {name: tensor for name, tensor in state.items() if name != weight},
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize(("kind", "weight"), [("linear", "weight"), ("experts", "w13"), ("experts", "w2")])
def test_tensors_that_torch_would_convert_or_leave_out_are_refused(kind: str, weight: str, fault: str) -> None:
    layer, state = layer_of(kind, ue8m0=False), layer_of(kind, ue8m0=False, seed=1).state_dict()
    before = copy.deepcopy(layer)
    with pytest.raises(CheckpointError, match=weight):
        layer.load_state_dict(WRONG[fault](state, weight), strict=False)
    assert same_parameters(layer, before)
