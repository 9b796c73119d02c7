"""Backends compute the computed cells of the table, and refuse each other one with its reason."""

import pytest

from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.plan.spec import Arrival, LayerSpec, MoeShape
from tests.layers.conformance import CELLS, COMPUTED, Cell

SHAPE = MoeShape(8, 2048, 768, 128, 128)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_backend_refuses_what_it_does_not_compute(cell: Cell) -> None:
    spec = LayerSpec(SHAPE, cell.weights, activation=cell.activation, bias=cell.bias)
    refusal = None if cell in COMPUTED else cell.refusal
    for backend in BACKENDS.values():
        for arrival in Arrival:
            pushed = arrival is Arrival.PUSHED and backend.name == "triton"  # which has no kernels for it
            assert backend.refusal(spec, arrival) == ("rows that arrive pushed" if pushed else refusal)
