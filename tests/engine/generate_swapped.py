"""`generate` with a bug: every expert takes its gate for its up projection. The tests have to notice."""

from tests.engine import generate


def swap_gate_and_up() -> None:
    from fp8moe_plugin.ops import reference

    correct = reference.silu_mul_quant
    reference.silu_mul_quant = lambda gate_up, *rest: correct(gate_up.roll(gate_up.shape[-1] // 2, -1), *rest)


if __name__ == "__main__":
    swap_gate_and_up()
    generate.main()
