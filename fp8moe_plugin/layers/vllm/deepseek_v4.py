"""The experts of vLLM's DeepSeek-V4: which format they have, before vLLM reads the weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.transformers_utils.config import get_safetensors_params_metadata

from fp8moe_plugin.checkpoint.expert_format import is_weight_of_expert, named_dtype, stored_dtype


def dtype_of_experts(model: str, revision: str | None, fields: Mapping[str, Any]) -> str | None:
    """Returns the safetensors dtype of an expert's weight, or None if it is not known.

    Of a model in a hub, headers are read only if its config.json does not name the dtype: that takes many requests.

    Args:
        model, revision: vLLM's, a folder or the name of a model in a hub.
        fields: see `expert_format`.
    Raises:
        CheckpointError: the index or a header in the folder is damaged.
    """
    folder = Path(model)
    if folder.is_dir():
        return stored_dtype(folder)
    if named_dtype(fields):
        return None
    tensors = get_safetensors_params_metadata(model, revision=revision)
    return next((entry["dtype"] for name, entry in tensors.items() if is_weight_of_expert(name)), None)
