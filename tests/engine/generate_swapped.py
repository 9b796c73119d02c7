"""`generate` with a bug: every expert takes its gate for its up projection. The tests have to notice."""

import sys

from tests.engine import generate


def swap_gate_and_up() -> None:
    import fp8moe_plugin.ops.gate_up  # noqa: F401  (`fp8moe_plugin.ops.gate_up` itself is the function)

    module = sys.modules["fp8moe_plugin.ops.gate_up"]
    correct = module.silu_mul_quant_fp8
    module.silu_mul_quant_fp8 = lambda gate_up, *rest: correct(gate_up.roll(gate_up.shape[-1] // 2, -1), *rest)


if __name__ == "__main__":
    swap_gate_and_up()
    generate.main()
