"""Plans of a layer whose weights have another format than block FP8, as far as they follow from the format alone."""

import pytest

from fp8moe_plugin.jit.launch import TensorMap
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.launches.operands import LAYER_SLOTS
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.parameters import PARAMETERS
from fp8moe_plugin.plan.sm90.catalog import WEIGHT_MACROS
from fp8moe_plugin.plan.sm90.grouped import plan_batched
from fp8moe_plugin.plan.sm90.layer import plan_layer
from fp8moe_plugin.plan.spec import Arrival, LayerSpec, MoeShape
from tests.formats.fp4 import FP4

SPEC = LayerSpec(MoeShape(8, 2048, 768, 128, 128), FP4)
MACRO = "WEIGHTS", 4


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WEIGHT_MACROS, FP4, (MACRO,))


@pytest.mark.parametrize("arrival", Arrival)
def test_kernels_that_read_weights_have_its_macro(arrival: Arrival) -> None:
    for key in BACKENDS[SM90].layer_kernels(SPEC, arrival):
        names = {parameter.name for parameter in PARAMETERS[key.source]}
        assert (MACRO in key.defines) == bool(names & {"w_map", "b_map"}), key


def test_plans_take_its_kernels() -> None:
    kernels = BACKENDS[SM90].layer_kernels(SPEC, Arrival.STANDARD) | BACKENDS[SM90].layer_kernels(SPEC, Arrival.BATCHED)
    plans = [plan_layer(SPEC, tokens) for tokens in (1, 16, 100, 5000)]
    for plan in [*plans, *(plan_batched(SPEC, 1024, expected_m) for expected_m in (8, 500))]:
        assert {plan.gate_up, plan.down} <= kernels.keys()


@pytest.mark.parametrize("tokens", [1, 100, 5000])
def test_maps_have_its_bytes(tokens: int) -> None:
    _, hidden, intermediate, *_ = SPEC.shape
    launches = BACKENDS[SM90].plan_layer(SPEC, tokens, 132).launches(LAYER_SLOTS, False)
    maps = {
        argument.address: argument for launch in launches for argument in launch.args if isinstance(argument, TensorMap)
    }
    for address, channels in ((LAYER_SLOTS.w13, hidden), (LAYER_SLOTS.w2, intermediate)):
        assert maps[address].sizes[0] == channels // 2
        assert maps[address].box[0] == 128 // 2
        assert min(maps[address].strides) == channels // 2
