"""The methods that vLLM itself uses for the layers of a checkpoint, without `--quantization fp8moe`."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.quantization import get_quantization_config

from fp8moe_plugin.errors import UnsupportedError

EngineMethod = Callable[[Any, str], Any]  # takes a layer and its name, returns vLLM's own method for it


def engine_config(checkpoint: Mapping[str, Any], mappers: Sequence[Any], packed: Mapping[str, list[str]]) -> Any:
    """Returns vLLM's own config of a quantized checkpoint.

    Args:
        checkpoint: its `quantization_config`.
        mappers: those that vLLM has applied to our config, from names in the checkpoint to names in the model.
        packed: the projections of each fused layer of the model.
    """
    config = get_quantization_config(checkpoint["quant_method"].lower()).from_config(deepcopy(dict(checkpoint)))
    config.packed_modules_mapping = packed
    for mapper in mappers:
        config.apply_vllm_mapper(mapper)
    return config


def architecture_of(engine: Any) -> str:
    """Returns the name of a model's class in vLLM, from vLLM's configuration; empty if there is none."""
    model = engine.model_config if engine else None
    return next(iter(getattr(model.hf_config, "architectures", None) or ()), "") if model else ""


def refuse_to_load(layer: torch.nn.Module, scale: torch.nn.Parameter, refusal: UnsupportedError) -> None:
    """Make the loader of a layer's scales raise `refusal`.

    For parts that begin within a scale block: vLLM's loader would copy the scales of other blocks. Models that compute
    the scales of a rank themselves (MiMo-V2.5) do not call it.
    """

    def refuse(layer: Any, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise refusal

    scale.weight_loader = MethodType(refuse, layer)  # type: ignore[attr-defined]
