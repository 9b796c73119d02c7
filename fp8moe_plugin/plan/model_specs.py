"""The specs of the layers that a checkpoint describes."""

from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape


def model_specs(model: Model, shape: MoeShape) -> list[LayerSpec]:
    """Returns the specs of a model's experts, one for each activation, that of most layers first.

    Args:
        shape: the sizes of a layer on one rank.
    """
    return [LayerSpec(shape, model.weights, model.ue8m0, each, bias=model.gpt_oss) for each in model.activations]
