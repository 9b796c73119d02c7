"""The specs of the layers that a checkpoint describes."""

from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape, layer_refusal
from fp8moe_plugin.settings import NAME


def model_specs(model: Model, shape: MoeShape) -> list[LayerSpec]:
    """Returns the specs of a model's experts, one for each activation, that of most layers first.

    Args:
        shape: the sizes of a layer on one rank.
    """
    return [LayerSpec(shape, model.weights, model.ue8m0, activation) for activation in model.activations]


def check_model(model: Model) -> None:
    """Raise `UnsupportedError` for a model whose quantized experts no kernel computes."""
    experts = model.experts
    for spec in model_specs(model, MoeShape.of(experts, experts.experts)) if experts.layers else ():
        if refusal := layer_refusal(spec):
            raise UnsupportedError(
                f"The checkpoint's experts have {refusal}, which the kernels do not support. Serve it without "
                f"--quantization {NAME}."
            )
